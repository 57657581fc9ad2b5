"""Secure aggregation, step 3 of 5: train as `train` does, and send the update under a mask."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import Meta, field

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.steps.masked.mask_keys import Signature
from fedge.steps.masked.mask_shares import Position, Sealed
from fedge.steps.training.train import Train, require_score
from fedge.system.files import compute_digest
from fedge.tensors.layout import Codec, Layout
from fedge.wire.messages import BlobRef, Id, NonNegative, Score


class TrainedMasked(Result, frozen=True, kw_only=True):
    """The masked `fedge.tensors.fixed_point.Summand` as bytes, with figures as in `Trained`.

    `statement` is the device's signed statement with whom it has masked
    (`fedge.privacy.masked_sums.Roster.make_mask_statement`).
    """

    REVEALS: ClassVar = {
        "masked": Reveals.MASKED,
        "statement": Reveals.NOTHING,
        "loss_before": Reveals.LOSS,
        "loss_after": Reveals.LOSS,
        "gradient_norm": Reveals.LOSS,
        "val_score": Reveals.LOSS,
    }
    masked: BlobRef
    statement: Signature
    loss_before: float | None = None
    loss_after: float | None = None
    gradient_norm: NonNegative | None = None
    val_score: Score | None = field(name="val_accuracy", default=None)


def compute_common_digest(train: Train, heaviest: int) -> str:
    """Return the digest of the request that all devices of a sum share; whether losses are measured may differ.

    The digest is that of the decoded order, as devices have it.
    """
    same = msgspec.structs.replace(train, measure=False, codec=Codec.FLOAT32)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(same), type=Train)
    return compute_digest(msgspec.msgpack.encode((decoded, heaviest)))


class TrainMasked(Action, frozen=True, kw_only=True):
    """A request to train from the one start of `train` and mask the change with the peers in `shares`.

    Masks cancel only between devices whose `train` and `heaviest` have the same `compute_common_digest`, so another
    field of `Train` or `Sgd` must be absent from orders that do not use it, or VERSION be raised.

    `heaviest` is the upper limit of a device's weight, which is its number of samples. `sharers` lists the devices that
    have shared secrets, the same for all (`fedge.privacy.masked_sums.write_positions`). `shares` holds the shares that
    neighbours among them sealed for this device, by the neighbours' positions in the roster.
    """

    STEP: ClassVar = "train_masked"
    VERSION: ClassVar = 2
    RESULT: ClassVar = TrainedMasked
    session: Id
    roster: BlobRef
    train: Train
    heaviest: Annotated[int, Meta(ge=1, le=2**32)]
    sharers: BlobRef
    shares: Annotated[dict[Position, Sealed], Meta(max_length=256)]

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of plain training."""
        return self.train.passes(n_shared, n_train, n_val)

    def without(self, withheld: Collection[str]) -> Self | None:
        """Return the action without losses."""
        measure = self.train.measure and Reveals.LOSS not in withheld
        spared = msgspec.structs.replace(self, train=msgspec.structs.replace(self.train, measure=measure))
        return spared if super().without(withheld) else None

    def check(self, result: TrainedMasked, task: TaskSpec) -> None:
        """Require losses if they were asked for, and a score that the problem can give."""
        measured = (result.loss_before, result.loss_after, result.gradient_norm)
        require(not self.train.measure or None not in measured, "no losses, which were asked for")
        require_score(result.val_score, task)

    def uploads(self, result: TrainedMasked, layout: Layout) -> Mapping[BlobRef, Layout | None]:
        """Return the masked update as plain bytes; only their size, that of a summand, can be checked."""
        from fedge.tensors.fixed_point import count_bytes

        size, needed = result.masked.size_bytes, count_bytes(layout)
        require(size == needed, f"the masked update has {size} bytes instead of {needed}")
        return {result.masked: None}
