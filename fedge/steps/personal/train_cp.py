"""FedCP: a policy divides the features between the shared head and the device's own, which stays."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.training.train import Train
from fedge.wire.messages import NonNegative


class TrainCp(Train, frozen=True, kw_only=True):
    """FedCP's training; `personal` selects the own head, and `mmd` weighs the distance to the global features."""

    STEP: ClassVar = "train_cp"
    HEAD_CLASS: ClassVar = "policy"

    mmd: NonNegative

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of `Train`, and a forward pass of the global model for each step."""
        steps = self.sgd.count_steps(n_shared)
        return super().passes(n_shared, n_train, n_val) + steps * min(self.sgd.batch_size, n_shared)
