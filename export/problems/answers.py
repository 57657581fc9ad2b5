"""The answers of a mixture, whatever the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from export.graph_nodes import Graph
from export.mixture import Mixture
from export.problems import classification, multi_label, own, reconstruction, regression, segmentation
from fedge.data.task import TaskSpec

_ANSWERS: Final[dict[str, Callable[[Graph, TaskSpec, Mixture], None]]] = {
    "classification": classification.add_answers,
    "multi-label": multi_label.add_answers,
    "regression": regression.add_answers,
    "segmentation": segmentation.add_answers,
    "reconstruction": reconstruction.add_answers,
    "own": own.add_answers,
}


def add_answers(graph: Graph, task: TaskSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Add what a mixture answers with, and weights and energies; return the shapes of the answers by name."""
    _ANSWERS[task.problem.kind](graph, task, mixture)
    return dict(zip(task.problem.OUTPUTS, task.problem.get_answer_shapes(task.input_shape), strict=True))
