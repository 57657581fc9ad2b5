"""APFL: beside the shared model a device's own one learns, and the share of each in their mixture."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from fedge.steps.training.train import Train
from fedge.tensors.layout import Layout, Selector, TensorInfo

ALPHA: Final = "apfl/alpha"
"""Name under which a device keeps the share of its own model."""

OwnShare = Annotated[float, Meta(ge=0, le=1)]


class TrainApfl(Train, frozen=True, kw_only=True):
    """APFL's training; `alpha` is the share of the device's own model in its first round, learned from then on."""

    STEP: ClassVar = "train_apfl"

    alpha: OwnShare

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the training of two models, for equally many steps."""
        shared = super().passes(n_shared, n_train, n_val)
        return shared + self.sgd.count_passes(self.sgd.count_steps(n_shared), n_train)

    @property
    def shareable(self) -> bool:
        """Always False, since the device's own model learns from all samples."""
        return False

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the own model, followed by alpha, (1,)."""
        return Layout(tensors=(*layout.tensors, TensorInfo(name=ALPHA, shape=(1,))))
