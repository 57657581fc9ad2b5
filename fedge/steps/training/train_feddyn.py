"""FedDyn: local training whose loss a linear and a quadratic term draw to the optimum that all devices share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.steps.training.train import Train
from fedge.tensors.layers import make_reversible_layout
from fedge.tensors.layout import Layout, Selector


class TrainFedDyn(Train, frozen=True, kw_only=True):
    """FedDyn's training with weight `alpha` of both terms.

    `counted`: the round of the device's last report that is in the server's h; 0 if there is none, and g begins at 0.
    """

    STEP: ClassVar = "train_feddyn"

    alpha: Annotated[float, Meta(gt=0)]
    counted: Annotated[int, Meta(ge=0)] = 0

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the local gradient, with the one before."""
        del personal
        return make_reversible_layout(layout)
