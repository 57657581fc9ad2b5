"""A problem of the user's own: the outputs of the candidate with the largest share."""

from __future__ import annotations

import math

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.task import LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add the outputs, (n, ...), from c{k}/logits and gate; zeros if no candidate is usable."""
    shape, m = task.problem.get_output_shape(task.input_shape), len(mixture.candidates)
    n_numbers, last, nothing = math.prod(shape), graph.const([2]), graph.const(np.float32(0))
    flat = [graph.op("Reshape", f"c{k}/{LOGITS}", graph.const([-1, 1, n_numbers])) for k in range(m)]
    outputs = graph.op("Concat", *flat, axis=1)
    energy = graph.op("Mul", "gate", nothing)
    alpha, usable = add_weights(graph, mixture, energy, lambda: graph.op("ReduceL1", outputs, last, keepdims=0))
    there = graph.op("Gather", usable, "order", axis=1)
    shares = graph.op("Where", there, add_shares(graph, mixture, alpha, there), nothing)
    own = graph.op("Gather", outputs, "order", axis=1)
    own = graph.op("Where", graph.op("Unsqueeze", there, last), own, nothing)
    chosen = graph.op("GatherND", own, graph.op("ArgMax", shares, axis=1, keepdims=1), batch_dims=1)
    graph.op("Reshape", chosen, graph.const([-1, *shape]), out="outputs")
