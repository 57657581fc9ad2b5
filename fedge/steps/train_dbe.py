"""DBE: a vector added to the features stays on the device; the features' mean is pulled to the global one."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from fedge.messages import BlobRef, NonNegative
from fedge.steps.train import Train
from fedge.tensors import HEAD, Layout, Selector, TensorInfo

OFFSET: Final = "offset"


class TrainDbe(Train, frozen=True, kw_only=True):
    """`momentum`: of the running mean of the features; `kappa`: weight of its distance to `global_mean`."""

    STEP: ClassVar = "train_dbe"
    DEVICE: ClassVar = "edge_agent.steps.train_dbe"

    global_mean: BlobRef  # {"mean": (D,) float32}
    momentum: Annotated[float, Meta(gt=0, le=1)] = 1.0
    kappa: NonNegative = 1.0

    @staticmethod
    def kept(personal: Selector, layout: Layout) -> Layout:
        """The vector, (D,)."""
        del personal
        return Layout(tensors=(TensorInfo(name=OFFSET, shape=layout.select(HEAD).tensors[0].shape[1:]),))
