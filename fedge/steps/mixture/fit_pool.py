"""PM-MoE stage 2: denoise the pool, train the gate, write the bundle (pm_moe.md sections 5 to 7)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedge.data.task import MAX_POOL
from fedge.steps.mixture.install import Installed, Served
from fedge.wire.messages import BlobRef, Count, Id


class FitPool(Served, frozen=True, kw_only=True):
    """A request for a gate over the pool; `model`, `personal`, `kept_by` and `initial` are as in `Install`."""

    STEP: ClassVar = "fit_pool"
    RESULT: ClassVar = Installed
    EXPORTS: ClassVar = True
    TIMED: ClassVar = False

    kept_by: Id
    initial: BlobRef
    pool: Annotated[tuple[BlobRef | None, ...], Meta(min_length=1, max_length=MAX_POOL)]  # None if not available
    own: Count  # the device's own index in the pool; its entry is None, since the device has that module
    preset: Literal["paper", "anchored"] = "anchored"
    top: Annotated[int, Meta(ge=1)] | None = None  # k; ceil(M / 2) if None
    denoise: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    epochs: Count = 50
    guard: bool = True

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of the gate's epochs."""
        return (n_train + n_val) * (1 + self.epochs)
