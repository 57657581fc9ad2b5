"""DBE: a vector added to the features stays on the device; the features' mean is pulled to the global mean."""

from __future__ import annotations

from typing import ClassVar, Final

from fedge.steps.training.train import Train
from fedge.tensors.layout import HEAD, Layout, Selector, TensorInfo
from fedge.wire.messages import BlobRef, NonNegative

OFFSET: Final = "offset"


class TrainDbe(Train, frozen=True, kw_only=True):
    """DBE's training; `kappa` weighs the distance of a batch's mean features to `global_mean`."""

    STEP: ClassVar = "train_dbe"

    global_mean: BlobRef  # {"mean": (D,) float32}
    kappa: NonNegative = 1.0

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the vector, (D,)."""
        return Layout(tensors=(TensorInfo(name=OFFSET, shape=layout.select(HEAD).tensors[0].shape[1:]),))
