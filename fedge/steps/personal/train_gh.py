"""FedGH: a device trains under the shared head, and sends the mean features of its classes in place of the change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from fedge.steps.contract import Reveals
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import HEAD, Layout, TensorInfo
from fedge.wire.messages import BlobRef

MEANS: Final = "means"
PRESENT: Final = "present"
"""Names of what is sent: mean features of each class, (C, D), 0 where the device has none, and whether it has any."""


def make_means_layout(layout: Layout) -> Layout:
    """Return the layout of what is sent; `layout` is the network's.

    Raises:
        ConfigError: the network has no head.
    """
    n_classes, d = layout.select(HEAD).tensors[0].shape
    return Layout(tensors=(TensorInfo(name=MEANS, shape=(n_classes, d)), TensorInfo(name=PRESENT, shape=(n_classes,))))


class TrainedGh(Trained, frozen=True, kw_only=True):
    """The result: `update` holds the class means of D_L, and no change of any weight."""

    REVEALS: ClassVar = {**Trained.REVEALS, "update": Reveals.FEATURES}


class TrainGh(Train, frozen=True, kw_only=True):
    """FedGH's training; `personal` selects the base."""

    STEP: ClassVar = "train_gh"
    RESULT: ClassVar = TrainedGh

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of `Train`, and one for the features."""
        return super().passes(n_shared, n_train, n_val) + n_shared

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return the class means, with their layout."""
        return {result.update: make_means_layout(layout)}
