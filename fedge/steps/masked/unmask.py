"""Secure aggregation, step 5 of 5: devices reveal what opens the sum, and nothing that opens a single update."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, Reveals, require
from fedge.steps.masked.mask_keys import MaskStep
from fedge.steps.masked.mask_shares import Position
from fedge.wire.messages import BlobRef

KeyShare = Annotated[bytes, Meta(min_length=33, max_length=33)]


class Unmasked(Result, frozen=True, kw_only=True):
    """Shares of neighbours' secrets, by the neighbour's position.

    `seeds` holds shares of the own masks of neighbours in the sum, `keys` shares of the masking keys of all others.
    """

    REVEALS: ClassVar = {"seeds": Reveals.NOTHING, "keys": Reveals.NOTHING}
    seeds: Annotated[dict[Position, KeyShare], Meta(max_length=256)]
    keys: Annotated[dict[Position, KeyShare], Meta(max_length=256)]


class Unmask(MaskStep, frozen=True, kw_only=True):
    """A request to reveal shares for the sum that this device has confirmed.

    `confirmations` are those of all devices that have confirmed it (`fedge.privacy.masked_sums.write_signatures`).
    """

    STEP: ClassVar = "unmask"
    VERSION: ClassVar = 2
    RESULT: ClassVar = Unmasked
    roster: BlobRef
    confirmations: BlobRef

    def check(self, result: Unmasked, task: TaskSpec) -> None:
        """Refuse shares of both secrets of one device."""
        require(result.seeds.keys().isdisjoint(result.keys), "the report has shares of both secrets of a device")
