"""Compare the trial's global model with the trial's expert on the validation samples (fedge.md section 5)."""

from __future__ import annotations

from typing import ClassVar

from fedge.steps.contract import Result, Reveals
from fedge.steps.noise import Noisy
from fedge.wire.messages import BlobRef


class Tried(Result, frozen=True, kw_only=True):
    """The difference delta = loss(G) - loss(E), or None without validation samples."""

    REVEALS: ClassVar = {"delta": Reveals.LOSS}
    delta: float | None = None


class Trial(Noisy, frozen=True, kw_only=True):
    """A request for the validation loss of the trial's global model minus that of its expert."""

    STEP: ClassVar = "trial"
    RESULT: ClassVar = Tried

    global_model: BlobRef
    expert: BlobRef

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of two models on the validation samples."""
        return 2 * n_val
