"""MOON: features are drawn to those of the global model, and away from those of the device's own last model."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.steps.training.train import Train
from fedge.tensors.layout import HEAD, Layout, Selector
from fedge.wire.messages import NonNegative

Temperature = Annotated[float, Meta(gt=0)]


class TrainMoon(Train, frozen=True, kw_only=True):
    """MOON's training; `mu` weighs the contrast of features, and `tau` is its temperature."""

    STEP: ClassVar = "train_moon"

    mu: NonNegative
    tau: Temperature

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of `Train`, and two forward passes of other models for each step."""
        steps = self.sgd.count_steps(n_shared)
        return super().passes(n_shared, n_train, n_val) + 2 * steps * min(self.sgd.batch_size, n_shared)

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of the last model that the device has trained; it must have a head."""
        layout.select(HEAD)
        return layout
