"""Ditto: besides the shared model, a personal model learns, pulled towards the shared one, and stays on the device."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.tensors.layout import Layout, Selector
from fedge.wire.messages import NonNegative


class TrainDitto(Train, frozen=True, kw_only=True):
    """Ditto's training; `proximal_lambda` is lambda in (lambda/2) ||v - w||^2, where w is the round's start."""

    STEP: ClassVar = "train_ditto"

    proximal_lambda: NonNegative

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the training of two models."""
        shared = super().passes(n_shared, n_train, n_val)
        return shared + self.sgd.count_passes(self.sgd.count_steps(n_train), n_train)

    @property
    def shareable(self) -> bool:
        """Always False, since the personal model learns from all samples."""
        return False

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the personal model."""
        return layout
