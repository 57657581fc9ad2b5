"""A device's memory of a masked sum, on disk before anything of the sum leaves.

A repeated order, changed or not, must not open what another order has closed.

    HOME/masking/{run}/{round}.{session}/keys        three private keys, made once
    HOME/masking/{run}/{round}.{session}/shared      the roster with which secrets were shared, and the result
    HOME/masking/{run}/{round}.{session}/masked      the order answered with a masked update, the update, the result
    HOME/masking/{run}/{round}.{session}/confirmed   the one sum that may be opened
    HOME/masking/{run}/sums                          all sums of the run confirmed here, by their devices

Files are written once and never changed, except that `sums` grows. The first session of a round deletes the sessions of
earlier rounds, and the first session of a run those of other runs; without the keys nothing can be opened any more.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec import Struct

from edge_agent.device.device import Device, FailedError
from fedge.privacy.masked_sums import Roster, Sums, read_positions, read_roster
from fedge.system.files import read_lasting, sync, write_atomically
from fedge.wire.messages import BlobRef

T = TypeVar("T")


class Keys(Struct, frozen=True):
    """The private keys of a session."""

    encryption: bytes
    masking: bytes
    signing: bytes


class Shared(Struct, frozen=True):
    """The secret b shared with the roster of this digest, and the result of the step."""

    roster: str
    seed: bytes
    result: bytes


class Masked(Struct, frozen=True):
    """The result and the update for the action of this digest. `shares`: the action's shares, by position.

    `statement`: the devices masked with, as signed in the result.
    """

    action: str
    statement: bytes
    shares: dict[int, bytes]
    result: bytes
    vector: bytes


class Confirmed(Struct, frozen=True):
    """The positions of a sum, and the statement that confirms it."""

    statement: bytes
    summed: tuple[int, ...]


def _remove_session(folder: Path) -> None:
    """Delete a session, or a whole run, keys first, since what is left after a kill -9 must not sign another sum."""
    with suppress(OSError):  # the folder then stays complete
        for keys in folder.rglob("keys"):
            keys.unlink()
            sync(keys.parent)
        shutil.rmtree(folder, ignore_errors=True)


class Session:
    """A session of one masked sum on this device."""

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._run = device.home / "masking" / device.order.run
        self._folder = self._run / f"{device.order.round}.{name}"

    def load(self, kind: type[T]) -> T | None:
        """Return the stored value of this kind, or None.

        Raises:
            StoreError: it cannot be read.
        """
        return read_lasting(self._folder / kind.__name__.lower(), msgspec.msgpack.Decoder(kind).decode)

    def save(self, value: Struct) -> None:
        """Store a value durably."""
        write_atomically(self._folder / type(value).__name__.lower(), msgspec.msgpack.encode(value))

    def start(self) -> Keys:
        """Return the keys. The first call makes them and deletes earlier sessions."""
        keys = self.load(Keys)
        if keys is None:
            over = [path for path in self._run.glob("*.*") if not path.name.startswith(f"{self._device.order.round}.")]
            for path in (*over, *(other for other in self._run.parent.glob("*") if other != self._run)):
                _remove_session(path)
            kinds = X25519PrivateKey, X25519PrivateKey, Ed25519PrivateKey
            keys = Keys(*(kind.generate().private_bytes_raw() for kind in kinds))
            self.save(keys)
        return keys

    @cached_property
    def encryption(self) -> X25519PrivateKey:
        """The key that opens shares."""
        return X25519PrivateKey.from_private_bytes(self._keys.encryption)

    @cached_property
    def masking(self) -> X25519PrivateKey:
        """The key from which pair seeds are derived."""
        return X25519PrivateKey.from_private_bytes(self._keys.masking)

    @cached_property
    def signing(self) -> Ed25519PrivateKey:
        """The key that signs statements."""
        return Ed25519PrivateKey.from_private_bytes(self._keys.signing)

    @property
    def public(self) -> tuple[bytes, ...]:
        """The public keys, in the order of `Member.keys`."""
        return tuple(key.public_key().public_bytes_raw() for key in (self.encryption, self.masking, self.signing))

    @cached_property
    def _keys(self) -> Keys:
        keys = self.load(Keys)
        if keys is None:
            raise FailedError("the masked sum never began on this device")
        return keys

    def fetch_roster(self, ref: BlobRef) -> tuple[Roster, int]:
        """Fetch the cohort, and return it with this device's position.

        Raises:
            FailedError: the device is not in the cohort with these keys.
            ProtocolError: the file is no roster.
        """
        roster = read_roster(self._device.fetch(ref))
        own = roster.find_position(self._device.id)
        if own is None or roster.members[own].keys != self.public:
            raise FailedError("the roster does not have this device with its keys")
        return roster, own

    def fetch_positions(self, ref: BlobRef, roster: Roster) -> tuple[int, ...]:
        """Fetch the positions of some devices of the cohort.

        Raises:
            ProtocolError: a position is not in the cohort.
        """
        return read_positions(self._device.fetch(ref), roster)

    def load_shared(self, roster: Roster) -> Shared:
        """Return the secrets shared for this roster.

        Raises:
            FailedError: no secrets were shared, or for another roster.
        """
        shared = self.load(Shared)
        if shared is None or shared.roster != roster.digest:
            raise FailedError("no secrets were shared for this roster")
        return shared

    # ---------------------------------------------------------------------------------------------------------- sums

    def load_sums(self) -> Sums:
        """Return the sums of the run confirmed here."""
        return read_lasting(self._run / "sums", msgspec.msgpack.Decoder(Sums).decode) or Sums()

    def record_sum(self, devices: Iterable[str]) -> None:
        """Record a sum durably."""
        if (after := (before := self.load_sums()).with_sum(devices)) is not before:
            write_atomically(self._run / "sums", msgspec.msgpack.encode(after))
