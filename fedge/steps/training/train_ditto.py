"""Ditto: besides the shared model, a personal model that is pulled towards it learns and stays on the device."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.tensors.layout import Layout, Selector
from fedge.wire.messages import NonNegative


class TrainDitto(Train, frozen=True, kw_only=True):
    """`proximal_lambda`: of (lambda/2) ||v - w||^2, where w is the start of the round."""

    STEP: ClassVar = "train_ditto"

    proximal_lambda: NonNegative

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Two models learn."""
        shared = super().passes(n_shared, n_train, n_val)
        return shared + self.sgd.passes(self.sgd.steps_for(n_train), n_train)

    @property
    def shareable(self) -> bool:
        """The personal model learns from all samples."""
        return False

    @staticmethod
    def kept(personal: Selector, layout: Layout) -> Layout:
        """The personal model."""
        return layout
