"""FedRoD: the shared model learns with balanced softmax; a second head on its features stays on the device."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.tensors.layout import HEAD, Layout, Selector


class TrainRod(Train, frozen=True, kw_only=True):
    """FedRoD's training, in which the second head learns beside the shared model."""

    STEP: ClassVar = "train_rod"

    poolable: bool = False  # the second head may be sent (PM-MoE), so it learns from D_L alone

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of `Train`, and those of training the second head."""
        once = super().passes(n_shared, n_train, n_val)
        return once + self.sgd.count_passes(self.sgd.count_steps(n_shared), n_shared)

    @property
    def shareable(self) -> bool:
        """Whether the second head learns from D_L alone."""
        return self.poolable

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the second head, shaped like the first."""
        return layout.select(HEAD)
