"""Secure aggregation, step 4 of 4: devices reveal what opens the sum, and nothing that opens a single update."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.messages import BlobRef
from fedge.step import Result, Reveals, require
from fedge.steps.mask_keys import MaskStep
from fedge.steps.mask_shares import MAX_COHORT, Position
from fedge.task import TaskSpec

KeyShare = Annotated[bytes, Meta(min_length=33, max_length=33)]


class Unmasked(Result, frozen=True, kw_only=True):
    """Shares by the position of the neighbour whose secret they belong to.

    `seeds`: of a neighbour's own mask, if it is in the sum; `keys`: of its masking key, if it is not.
    """

    REVEALS: ClassVar = {"seeds": Reveals.NOTHING, "keys": Reveals.NOTHING}
    seeds: Annotated[dict[Position, KeyShare], Meta(max_length=256)]
    keys: Annotated[dict[Position, KeyShare], Meta(max_length=256)]


class Unmask(MaskStep, frozen=True, kw_only=True):
    """Reveal shares for the sum of some devices of the roster. `summed`: their positions, ascending."""

    STEP: ClassVar = "unmask"
    RESULT: ClassVar = Unmasked
    roster: BlobRef
    summed: Annotated[tuple[Position, ...], Meta(max_length=MAX_COHORT)]

    def check(self, result: Unmasked, task: TaskSpec) -> None:
        """Mask shares for devices in the sum, key shares for the others."""
        require(set(result.seeds) <= set(self.summed), "a share of an own mask of somebody who is not summed")
        require(not set(result.keys) & set(self.summed), "a share of a key of somebody who is summed")
