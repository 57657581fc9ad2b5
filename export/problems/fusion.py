"""The shares of a mixture's candidates in each answer, as a graph (fedge.md section 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from fedge.bundle.formula import LOWEST


def add_weights(graph: Graph, mixture: Mixture, energy: str, add_magnitude: Callable[[], str]) -> tuple[str, str]:
    """Add the outputs weights and energies, (n, M); return the names of the shares alpha, and of what is usable.

    Args:
        graph: has gate, (n, M), and the tensors of the gate's part.
        mixture: gives M and the experts.
        energy: the name of the raw energies E, (n, M).
        add_magnitude: adds, and names, numbers (n, M) that are finite where all of a candidate's outputs are.
    """
    m, infinity = len(mixture.candidates), graph.const(np.float32(np.inf))

    # s = log ω + r + β clip(ẽ); ẽ = (E − μ) / σ
    energy = graph.op("Mul", graph.op("Sub", energy, "energy.mean"), "energy.inverse_std")
    clipped = graph.op("Clip", energy, "energy.low", "energy.high")
    score = graph.op("Add", graph.op("Mul", clipped, "energy.beta"), "gate")

    # usable: every output and the score are finite; one non-finite term makes the sum non-finite
    total = graph.op("Add", add_magnitude(), score)
    usable = graph.op("Less", graph.op("Abs", total), infinity)
    score = graph.op("Where", usable, score, graph.const(LOWEST))
    graph.op("Where", usable, energy, graph.const(np.float32(np.nan)), out="energies")
    if len(mixture.experts) > mixture.top:
        score = _select_top(graph, m, score, mixture.experts, mixture.top)
    alpha = graph.op("Softmax", score, axis=1)
    graph.op("Where", usable, alpha, graph.const(np.float32(0)), out="weights")
    return alpha, usable


def add_shares(graph: Graph, mixture: Mixture, alpha: str, kept: str) -> str:
    """Return the name of the shares (1 − g) α of the candidates and g of the guard, (n, M + 1).

    g = 0 if the guard's candidate is not usable; `kept` names what is usable by row, (n, M + 1).
    """
    guarded = graph.op("Gather", kept, graph.const([len(mixture.candidates)]), axis=1)
    g = graph.op("Where", guarded, "guard.share", graph.const(np.float32(0)))
    rest = graph.op("Mul", alpha, graph.op("Sub", graph.const(np.float32(1)), g))
    return graph.op("Concat", rest, g, axis=1)


def _select_top(graph: Graph, m: int, score: str, experts: Sequence[int], top: int) -> str:
    """Keep the `top` best experts, the lower index on a tie; the others get the score of a dropped candidate."""
    expert = graph.const(np.isin(np.arange(m), experts))
    # Candidates that are no experts are put below even dropped ones, so that TopK never returns them.
    competing = graph.op("Where", expert, score, graph.const(np.float32(-np.inf)))
    best, where = graph.ops("TopK", 2, competing, graph.const([top]), axis=1)
    others = graph.op("Where", expert, graph.const(LOWEST), score)
    return graph.op("ScatterElements", others, where, best, axis=1)
