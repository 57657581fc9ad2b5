"""Numbers: mean = Σ w_k m_k, spread² = Σ w_k (T² s_k² + (m_k − mean)²), with m_k = o_k + κ_k b_k."""

from __future__ import annotations

from typing import cast

import numpy as np

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems.fusion import add_shares, add_weights
from fedge.data.problems.regression import LARGEST, Regression
from fedge.data.task import LOGITS, TaskSpec


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> None:
    """Add mean and spread, (n, D) each and standardised, from c{k}/logits and gate."""
    problem, m = cast(Regression, task.problem), len(mixture.candidates)
    (n_outputs,) = problem.get_output_shape(task.input_shape)
    flat = graph.op("Concat", *(f"c{k}/{LOGITS}" for k in range(m)), axis=1)
    outputs, last = graph.op("Reshape", flat, graph.const([-1, m, n_outputs])), graph.const([2])
    means = outputs
    if problem.variance:
        means, h = graph.ops("Split", 2, outputs, axis=2, num_outputs=2)
        h = graph.op("Clip", h, graph.const(np.float32(-LARGEST)), graph.const(np.float32(LARGEST)))
        energy = graph.op("Mul", graph.op("ReduceSum", h, last, keepdims=0), graph.const(np.float32(-0.5)))
    else:
        energy = graph.op("Mul", "gate", graph.const(np.float32(0)))
    alpha, usable = add_weights(graph, mixture, energy, lambda: graph.op("ReduceL1", outputs, last, keepdims=0))

    # a row for each candidate and one for the guard; 0 and 1, the task's mean and deviation, if nothing is usable
    there = graph.op("Gather", usable, "order", axis=1)
    kept = graph.op("Unsqueeze", there, last)
    own = graph.op("Add", graph.op("Gather", means, "order", axis=1), "prior")
    own = graph.op("Where", kept, own, graph.const(np.float32(0)))
    spread = "deviation"
    if problem.variance:
        half = graph.op("Exp", graph.op("Mul", h, graph.const(np.float32(0.5))))
        spread = graph.op("Mul", graph.op("Gather", half, "order", axis=1), "deviation")
    spread = graph.op("Where", kept, spread, graph.const(np.float32(1)))
    weights, rows = graph.op("Unsqueeze", add_shares(graph, mixture, alpha, there), last), graph.const([1])
    mean = graph.op("ReduceSum", graph.op("Mul", weights, own), rows, keepdims=0, out="mean")
    apart = graph.op("Sub", own, graph.op("Unsqueeze", mean, rows))
    squares = graph.op("Add", graph.op("Mul", spread, spread), graph.op("Mul", apart, apart))
    graph.op("Sqrt", graph.op("ReduceSum", graph.op("Mul", weights, squares), rows, keepdims=0), out="spread")
