"""The devices whose updates are summed together, and what the server learns of their secrets."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedge.privacy.masked_sums import Roster, make_commitment
from fedge.privacy.shares import combine_shares
from fedge.steps.masked.mask_shares import SharesMade
from fedge.steps.masked.train_masked import TrainedMasked
from fedge.steps.masked.unmask import Unmasked
from fedge.steps.training.train import Train
from fedge.wire.messages import BlobRef


class LostError(Exception):
    """A group has no sum, for the reason in the text."""


@dataclass
class Group:
    """The cohort of one sum, its requests, and the answers by position. `sharers`, `to_sum`: files of positions."""

    roster: Roster
    ref: BlobRef
    train: Train
    heaviest: int
    shares: dict[int, SharesMade] = field(default_factory=dict)
    sharers: BlobRef = field(init=False)
    masked: dict[int, TrainedMasked] = field(default_factory=dict)
    summed: tuple[int, ...] = ()
    to_sum: BlobRef = field(init=False)
    confirmed: dict[int, bytes] = field(default_factory=dict)
    shown: dict[int, Unmasked] = field(default_factory=dict)

    @property
    def positions(self) -> range:
        """The positions of all members."""
        return range(len(self.roster.members))

    def add_update(self, k: int, masked: TrainedMasked) -> None:
        """Take an update with a statement that the device's neighbours will accept."""
        if self.roster.find_signers(self.roster.make_mask_statement(self.sharers), {k: masked.statement}):
            self.masked[k] = masked

    def add_confirmation(self, k: int, confirmation: bytes) -> None:
        """Add a genuine confirmation."""
        if self.roster.find_signers(self.roster.make_sum_statement(self.sharers, self.to_sum), {k: confirmation}):
            self.confirmed[k] = confirmation

    def recover_seed(self, k: int) -> bytes:
        """Recover b, the seed of a summed device's own mask.

        Raises:
            LostError: its neighbours do not reveal it.
        """
        seed = self._recover_secret(k, {j + 1: shown.seeds[k] for j, shown in self.shown.items() if k in shown.seeds})
        if make_commitment(seed) != self.shares[k].commitment:
            raise self._make_false_error(k)
        return seed

    def recover_key(self, k: int) -> X25519PrivateKey:
        """Recover the masking key of a device not in the sum.

        Raises:
            LostError: its neighbours do not reveal it.
        """
        secret = self._recover_secret(k, {j + 1: shown.keys[k] for j, shown in self.shown.items() if k in shown.keys})
        key = X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() != self.roster.members[k].masking:
            raise self._make_false_error(k)
        return key

    def _recover_secret(self, k: int, shares: dict[int, bytes]) -> bytes:
        if len(shares) < self.roster.threshold:
            raise LostError(
                f"{len(shares)} of {self.roster.degree} neighbours of {self.roster.members[k].id} have answered, "
                f"{self.roster.threshold} are needed: too many devices have dropped out"
            )
        try:
            return combine_shares(dict(sorted(shares.items())[: self.roster.threshold]))
        except ValueError:
            raise self._make_false_error(k) from None

    def _make_false_error(self, k: int) -> LostError:
        return LostError(f"{self.roster.members[k].id} or one of its neighbours has shown a false share of a secret")
