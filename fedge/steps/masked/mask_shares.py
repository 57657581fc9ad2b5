"""Secure aggregation, step 2 of 5: a device gives its neighbours shares of the secrets behind its masks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from fedge.steps.contract import Result, Reveals
from fedge.steps.masked.mask_keys import MaskStep
from fedge.wire.messages import BlobRef

MAX_COHORT: Final = 10_000
"""Most devices of one sum; `fedge.privacy.masked_sums.DEGREE` neighbours are enough for so many."""
MIN_COHORT: Final = 5
"""Default for the fewest devices of one sum. Whoever knows all updates of a sum but one can compute that one."""
Position = Annotated[int, Meta(ge=0, lt=MAX_COHORT)]
"""Position of a device in the roster."""
Sealed = Annotated[bytes, Meta(min_length=82, max_length=82)]
"""Two shares of 33 bytes and a tag of 16 bytes, encrypted for one device."""


class SharesMade(Result, frozen=True, kw_only=True):
    """The `sealed` shares for each neighbour, and a `commitment`, a hash of the own mask's seed."""

    REVEALS: ClassVar = {"sealed": Reveals.NOTHING, "commitment": Reveals.NOTHING}
    sealed: Annotated[dict[Position, Sealed], Meta(min_length=1, max_length=256)]
    commitment: Annotated[bytes, Meta(min_length=32, max_length=32)]


class MaskShares(MaskStep, frozen=True, kw_only=True):
    """A request to share secrets with the neighbours in a roster (`masked_sums.Roster`)."""

    STEP: ClassVar = "mask_shares"
    VERSION: ClassVar = 2
    RESULT: ClassVar = SharesMade
    roster: BlobRef
