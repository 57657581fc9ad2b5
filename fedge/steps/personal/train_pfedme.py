"""pFedMe: a personal model learns, tied to a copy of the shared one that follows it; only the copy's change is sent."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.steps.training.train import Train
from fedge.tensors.layout import Layout, Selector

InnerSteps = Annotated[int, Meta(ge=1, le=100)]
Positive = Annotated[float, Meta(gt=0)]


class TrainPFedMe(Train, frozen=True, kw_only=True):
    """pFedMe's training: `sgd.steps` are the local rounds R, and its learning rate is that of theta.

    `inner_steps`: K. `moreau_lambda`: lambda. `outer_rate`: eta.
    """

    STEP: ClassVar = "train_pfedme"

    inner_steps: InnerSteps
    moreau_lambda: Positive
    outer_rate: Positive

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count K steps for each that `Train` counts."""
        one = self.sgd.count_passes(self.sgd.count_steps(n_shared), n_shared)
        return super().passes(n_shared, n_train, n_val) + (self.inner_steps - 1) * one

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of theta."""
        return layout
