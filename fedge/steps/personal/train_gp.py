"""GPFL: a conditional valve makes generic and personal features; the head of the personal ones stays on the device."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.wire.messages import NonNegative


class TrainGp(Train, frozen=True, kw_only=True):
    """GPFL's training; `personal` selects the own head.

    `pull` weighs the distance of generic features to the embeddings of their classes, `decay` the squares of the
    valve's and the embeddings' weights.
    """

    STEP: ClassVar = "train_gp"
    HEAD_CLASS: ClassVar = "valve"

    pull: NonNegative
    decay: NonNegative
