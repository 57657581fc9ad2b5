"""Secure aggregation, step 4 of 5: a device confirms that it will help to open one sum, and no other of its cohort."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.steps.contract import Result, Reveals
from fedge.steps.masked.mask_keys import MaskStep, Signature
from fedge.steps.masked.mask_shares import Position
from fedge.wire.messages import BlobRef


class SumConfirmed(Result, frozen=True, kw_only=True):
    """The device's signature of the sum's statement (`fedge.privacy.masked_sums.Roster.make_sum_statement`)."""

    REVEALS: ClassVar = {"confirmation": Reveals.NOTHING}
    confirmation: Signature


class ConfirmSum(MaskStep, frozen=True, kw_only=True):
    """A request to confirm the sum of the devices in `summed`, which masked with all their neighbours among `sharers`.

    Both are files (`fedge.privacy.masked_sums.write_positions`), the same for all devices. `statements` are those of
    this device's summed neighbours (`fedge.steps.masked.train_masked.TrainedMasked`).
    """

    STEP: ClassVar = "confirm_sum"
    RESULT: ClassVar = SumConfirmed
    roster: BlobRef
    sharers: BlobRef
    summed: BlobRef
    statements: Annotated[dict[Position, Signature], Meta(max_length=256)]
