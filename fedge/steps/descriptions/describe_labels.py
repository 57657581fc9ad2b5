"""CFIC's label feature psi of D_L (cfic.md section 3)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, Reveals, require
from fedge.steps.noise import Noisy
from fedge.wire.messages import Count


class LabelsDescribed(Result, frozen=True, kw_only=True):
    """The device's label feature, 0..C-1, or -1 without samples."""

    REVEALS: ClassVar = {"feature": Reveals.LABELS, "n_samples": Reveals.COUNT}
    feature: Annotated[int, Meta(ge=-1, le=2**31)]
    n_samples: Count


class DescribeLabels(Noisy, frozen=True, kw_only=True):
    """A request for the label feature. With `epsilon`, it is drawn once by randomised response and stored.

    With `privacy` it is the commonest label by noisy counts.
    """

    STEP: ClassVar = "describe_labels"
    RESULT: ClassVar = LabelsDescribed

    epsilon: Annotated[float, Meta(gt=0)] | None = None

    def check(self, result: LabelsDescribed, task: TaskSpec) -> None:
        """Require a label of the task."""
        require(result.feature < task.n_classes, f"label {result.feature} is not one of {task.n_classes} classes")
