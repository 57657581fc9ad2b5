"""Reconstruction: surprise = −ln Σ w_k exp l_k, l_k = −½ (e_k / (T s_k)² + ln 2π T² s_k²), e_k = |x − o_k|² / D."""

from __future__ import annotations

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.problems.reconstruction import LARGEST
from fedge.data.task import INPUT, LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add the surprise, (n, 1), from x, c{k}/logits and gate."""
    m = len(mixture.candidates)
    axes = graph.const(list(range(1, 1 + len(task.input_shape))))
    errors = []
    for k in range(m):
        apart = graph.op("Sub", INPUT, f"c{k}/{LOGITS}")
        mean = graph.op("ReduceMean", graph.op("Mul", apart, apart), axes, keepdims=0)
        errors.append(graph.op("Unsqueeze", mean, graph.const([1])))
    error = graph.op("Concat", *errors, axis=1)
    half = graph.const(np.float32(-0.5))
    rows = graph.op("Add", graph.op("Mul", graph.op("Gather", error, "order", axis=1), "scale"), "prior")
    likelihood = graph.op("Mul", rows, half)
    energy = graph.op("Slice", likelihood, graph.const([0]), graph.const([m]), graph.const([1]))
    alpha, usable = add_weights(graph, mixture, energy, lambda: error)

    kept = graph.op("Gather", usable, "order", axis=1)
    weights = add_shares(graph, mixture, alpha, kept)
    counted = graph.op("And", kept, graph.op("Greater", weights, graph.const(np.float32(0))))
    term = graph.op("Add", likelihood, graph.op("Log", weights))
    term = graph.op("Where", counted, term, graph.const(np.float32(-LARGEST)))
    graph.op("Neg", graph.op("ReduceLogSumExp", term, graph.const([1]), keepdims=1), out="surprise")
