"""FedBABU: the base learns under a head that nobody trains before the end."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.tensors.layout import Layout, Selector


class TrainBabu(Train, frozen=True, kw_only=True):
    """FedBABU's training: `personal` selects the head, which stays as `initial` has it."""

    STEP: ClassVar = "train_babu"

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> None:
        """Return None, since the head of `initial` is the same on all devices."""
