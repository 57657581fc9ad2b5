"""The label shares of D_L, HACCS' summary P(y) (baselines.md section 26)."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, Reveals, require
from fedge.steps.noise import Noisy
from fedge.wire.messages import Count, Share


class LabelSharesMeasured(Result, frozen=True, kw_only=True):
    """The share of each class in D_L, (C,); they sum to 1."""

    REVEALS: ClassVar = {"shares": Reveals.LABELS, "n_samples": Reveals.COUNT}
    shares: Annotated[tuple[Share, ...], Meta(min_length=1)]
    n_samples: Count


class LabelShares(Noisy, frozen=True, kw_only=True):
    """A request for the label shares. With `privacy` they are shares of noisy counts."""

    STEP: ClassVar = "label_shares"
    RESULT: ClassVar = LabelSharesMeasured

    def check(self, result: LabelSharesMeasured, task: TaskSpec) -> None:
        """Require a share of each class of the task."""
        require(len(result.shares) == task.n_classes, f"{len(result.shares)} shares of {task.n_classes} classes")
        require(math.isclose(sum(result.shares), 1, abs_tol=1e-6), f"shares sum to {sum(result.shares)}, not to 1")
