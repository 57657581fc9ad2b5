"""Settings of a model's training on a device."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from fedge.system.moved import alias_members

TRAINING_PASSES: Final = 3
"""Cost of a training step in forward passes: one for the forward pass, two for the backward pass."""


@alias_members(steps_for="count_steps", passes="count_passes")
class Sgd(Struct, frozen=True, kw_only=True):
    """Settings of local SGD: momentum (reset at the start), mean cross-entropy."""

    steps: Annotated[int, Meta(ge=0, le=10**7)] = 10
    epochs: Annotated[int, Meta(ge=0, le=10**5)] = 0  # if > 0, passes over the samples, in place of `steps`
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    learning_rate: Annotated[float, Meta(gt=0, le=100)] = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    proximal_mu: Annotated[float, Meta(ge=0)] = 0.0  # FedProx; 0 is plain SGD
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.0  # times the weights, added to the gradient

    def count_steps(self, n: int) -> int:
        """Return the number of steps for n samples: `steps`, or as many as `epochs` passes need."""
        return -(-self.epochs * n // max(1, min(self.batch_size, n))) if self.epochs else self.steps

    def count_passes(self, steps: int, n: int) -> float:
        """Return the cost of these steps on n samples, in forward passes of one sample."""
        return TRAINING_PASSES * steps * min(self.batch_size, n)
