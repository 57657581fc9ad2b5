"""Single-label classification: p = Σ w_k softmax(l_k / T_k + κ_k π)."""

from __future__ import annotations

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.task import LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add the probabilities, (n, C), from c{k}/logits and gate."""
    m = len(mixture.candidates)
    (n_classes,) = task.problem.get_output_shape(task.input_shape)
    flat = graph.op("Concat", *(f"c{k}/{LOGITS}" for k in range(m)), axis=1)
    logits = graph.op("Reshape", flat, graph.const([-1, m, n_classes]))
    last = graph.const([2])
    graph.const(np.float32(np.inf))
    energy = graph.op("ReduceLogSumExp", logits, last, keepdims=0)
    alpha, usable = add_weights(graph, mixture, energy, lambda: graph.op("ReduceL1", logits, last, keepdims=0))

    # exp q, a row for each candidate and one for the guard; a row of zeros is 1/C, which remains if nothing is usable
    rows = graph.op("Gather", logits, "order", axis=1)
    kept = graph.op("Gather", usable, "order", axis=1)
    z = graph.op("Add", graph.op("Mul", rows, "scale"), "prior")
    z = graph.op("Where", graph.op("Unsqueeze", kept, last), z, graph.const(np.float32(0)))
    q = graph.op("Softmax", z, axis=2)
    weights = graph.op("Unsqueeze", add_shares(graph, mixture, alpha, kept), last)
    graph.op("ReduceSum", graph.op("Mul", weights, q), graph.const([1]), keepdims=0, out="probabilities")
