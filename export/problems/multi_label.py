"""Several labels: p = Σ w_k σ(o_k / T_k + κ_k π)."""

from __future__ import annotations

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.task import LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add the probability of each label, (n, C), from c{k}/logits and gate."""
    m = len(mixture.candidates)
    (n_labels,) = task.problem.get_output_shape(task.input_shape)
    flat = graph.op("Concat", *(f"c{k}/{LOGITS}" for k in range(m)), axis=1)
    logits, last = graph.op("Reshape", flat, graph.const([-1, m, n_labels])), graph.const([2])
    energy = graph.op("ReduceSum", graph.op("Softplus", logits), last, keepdims=0)
    alpha, usable = add_weights(graph, mixture, energy, lambda: graph.op("ReduceL1", logits, last, keepdims=0))

    # a row for each candidate and one for the guard; a row of zeros is 1/2, which remains if nothing is usable
    kept = graph.op("Gather", usable, "order", axis=1)
    z = graph.op("Add", graph.op("Mul", graph.op("Gather", logits, "order", axis=1), "scale"), "prior")
    z = graph.op("Where", graph.op("Unsqueeze", kept, last), z, graph.const(np.float32(0)))
    weights = graph.op("Unsqueeze", add_shares(graph, mixture, alpha, kept), last)
    graph.op(
        "ReduceSum", graph.op("Mul", weights, graph.op("Sigmoid", z)), graph.const([1]), keepdims=0, out="probabilities"
    )
