"""Segmentation: p = Σ w_k softmax(o_k / T_k + κ_k π), by pixel, with one w for each sample."""

from __future__ import annotations

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.task import LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add the probabilities, (n, C, H, W), from c{k}/logits and gate."""
    m = len(mixture.candidates)
    shape = task.problem.get_output_shape(task.input_shape)
    flat = graph.op("Concat", *(f"c{k}/{LOGITS}" for k in range(m)), axis=1)
    logits = graph.op("Reshape", flat, graph.const([-1, m, *shape]))
    pixels = graph.op("ReduceLogSumExp", logits, graph.const([2]), keepdims=0)
    energy = graph.op("ReduceMean", pixels, graph.const([2, 3]), keepdims=0)
    whole = graph.const([2, 3, 4])
    alpha, usable = add_weights(graph, mixture, energy, lambda: graph.op("ReduceL1", logits, whole, keepdims=0))

    kept = graph.op("Gather", usable, "order", axis=1)
    z = graph.op("Add", graph.op("Mul", graph.op("Gather", logits, "order", axis=1), "scale"), "prior")
    z = graph.op("Where", graph.op("Unsqueeze", kept, whole), z, graph.const(np.float32(0)))
    weights = graph.op("Unsqueeze", add_shares(graph, mixture, alpha, kept), whole)
    mixed = graph.op("Mul", weights, graph.op("Softmax", z, axis=2))
    graph.op("ReduceSum", mixed, graph.const([1]), keepdims=0, out="probabilities")
