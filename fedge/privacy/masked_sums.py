"""Masks that cancel in a cohort's sum: the shared part of secure aggregation.

Source: Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020 (SecAgg+), Algorithms
1 and 2; Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.

Device i sends x_i + PRG(b_i) + sum of PRG(s_ij) over neighbours j > i - sum of PRG(s_ij) over neighbours j < i. The
seed s_ij of a pair is the X25519 secret of i's and j's keys. The neighbours of i hold Shamir shares of b_i and of i's
key. At the end the shares of b_i are revealed if i is in the sum, those of i's key if i dropped out, never both.

The cohort is listed in the roster, one file that is the same for all: the participants, with three public keys each.
The roster's digest determines the neighbours, so no single party chooses them. U2 is the set of devices that have
shared secrets, S the set that is summed.

A server that sends devices different messages learns no other sum, as long as less than a third of the cohort and fewer
than t neighbours of each device work for the server:

    1. Device i masks once, with all its neighbours in one U2, and signs (roster, U2).
    2. It confirms one S within U2, and signs (roster, U2, S), if its neighbours in S have signed the same (roster, U2).
    3. It shows shares only for that S, and only if more than two thirds of the cohort have confirmed the same.

Only one sum of a cohort can be opened. Opening a sum takes the confirmation of more than two thirds of the n devices.
Then more than n / 3 would have to confirm both of two sums, but an honest device confirms only one. Opening b_i takes t
neighbours; one of them is honest and has seen that i masked with this U2. So any two neighbours in S whose b are open
have masked with one another, and their keys stay closed. What is left is the sum of all honest devices of S that are
joined through neighbours. In a cohort of up to 81 these are all honest devices of S. In a larger one they are at least
t + 1, less those of a device's neighbours that work for the server, since each device has t neighbours in S
(`are_joined`).

Nor can the server isolate one update by asking all other devices to learn nothing (Pasquini et al., "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", CCS 2022). The seed s_ij depends on what a device was asked
to learn, so the masks of two devices with different requests do not cancel, and the sum is noise.

More than two thirds of S confirm, too. Two sessions may have different cohorts, and only devices in both sums surely
hear of both sums. If m devices are in both sums and d in only one of them, more than (m - d) / 3 confirm both, or
refuse because d is too small (`Sums.explain_too_close`).

Departures from the papers: the graph is drawn from the hash of all advertised keys, not by the server; each device
commits to b_i, so that a false share is noticed; the whole cohort agrees on U2 and S (Bonawitz et al., "consistency
check"), not each neighbourhood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta, Struct
from msgspec.structs import replace

from fedge.errors import MALFORMED, ProtocolError, raise_as
from fedge.membership.signed_messages import Plain, Signed
from fedge.steps.masked.mask_keys import KeysMade, Proof, PublicKey, Signature
from fedge.steps.masked.mask_shares import MAX_COHORT, Position
from fedge.system.files import compute_digest
from fedge.tensors import fixed_point
from fedge.tensors.fixed_point import Summand
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, Id, Order

T = TypeVar("T")

DEGREE: Final = 80
"""k, the number of a device's neighbours in a cohort of more than 81. Suppose that a tenth of a cohort of 1,000
(10,000) conspires with the server and a fifth drops out. Then some mask is revealed with probability 2^-66 (2^-53), and
a round's sum is lost with probability 2^-22 (2^-15)."""
MAX_REMEMBERED: Final = 2**24
"""Approximate limit on the bytes of a run's sums: 13,000 different sums of 10,000 devices, or 100,000 of 1,000."""


class Member(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of the cohort: its public keys for shares, masks and statements, and a proof that they are its own."""

    id: Id
    encryption: PublicKey
    masking: PublicKey
    signing: PublicKey
    proof: Proof = b""

    @property
    def keys(self) -> tuple[bytes, bytes, bytes]:
        """All three public keys."""
        return self.encryption, self.masking, self.signing


def make_member(device_id: str, keys: KeysMade) -> Member:
    """Return a device of the cohort with the keys that it advertised."""
    return Member(
        id=device_id, encryption=keys.encryption, masking=keys.masking, signing=keys.signing, proof=keys.proof
    )


@dataclass(frozen=True)
class Roster:
    """The cohort, by ascending id; a position is an index into it."""

    members: tuple[Member, ...]
    digest: str

    @property
    def degree(self) -> int:
        """k, the number of neighbours of each device."""
        return min(len(self.members) - 1, DEGREE)

    @property
    def threshold(self) -> int:
        """t, the number of shares that open a secret: over half of the neighbours, who thus cannot open two secrets."""
        return self.degree // 2 + 1

    @cached_property
    def _circle(self) -> list[int]:
        """All positions, in an order drawn from the digest."""
        drawn = [hashlib.sha256(f"{self.digest}.{k}".encode()).digest() for k in range(len(self.members))]
        return sorted(range(len(drawn)), key=drawn.__getitem__)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {position: place for place, position in enumerate(self._circle)}

    def find_position(self, device_id: str) -> int | None:
        """Return the position of a device, or None if it is not in the cohort."""
        return next((k for k, member in enumerate(self.members) if member.id == device_id), None)

    def get_neighbours(self, position: int) -> tuple[int, ...]:
        """Return the positions of a device's neighbours, ascending: k / 2 on either side, or all."""
        n, place = len(self.members), self._place[position]
        if self.degree == n - 1:
            return tuple(k for k in range(n) if k != position)
        near = (*range(-self.degree // 2, 0), *range(1, self.degree // 2 + 1))
        return tuple(sorted(self._circle[(place + step) % n] for step in near))

    def are_joined(self, positions: Collection[int]) -> bool:
        """Return whether each of these devices shares masks with at least t others of them.

        With fewer, the masks of a part of the devices might cancel separately. With t they cannot, because a device
        beside a gap that no mask crosses would have at most half of its neighbours, fewer than t.
        """
        there = set(positions)
        return self.degree == len(self.members) - 1 or all(
            len(there.intersection(self.get_neighbours(k))) >= self.threshold for k in there
        )

    def get_ids(self, positions: Iterable[int]) -> tuple[str, ...]:
        """Return the ids of the devices at these positions."""
        return tuple(self.members[k].id for k in positions)

    # ----------------------------------------------------------------------------------------------- statements

    def make_mask_statement(self, sharers: BlobRef) -> bytes:
        """Return the statement that a device has masked with all its neighbours among `sharers`."""
        return f"fedge masked {self.digest} {sharers.digest}".encode()

    def make_sum_statement(self, sharers: BlobRef, summed: BlobRef) -> bytes:
        """Return the statement by which a device confirms this sum of the cohort and no other."""
        return f"fedge sum {self.digest} {sharers.digest} {summed.digest}".encode()

    def find_signers(self, statement: bytes, signatures: Mapping[int, bytes]) -> set[int]:
        """Return the positions of the devices that have signed the statement."""
        there = {k: signature for k, signature in signatures.items() if k < len(self.members)}
        return {k for k, signature in there.items() if _is_signed(self.members[k].signing, statement, signature)}

    def explain_dispute(self, summed: Collection[int], confirmed: Collection[int]) -> str:
        """Return why too few devices have confirmed a sum for it to be opened, or "" if enough have."""
        for among, words in ((range(len(self.members)), "the cohort"), (summed, "the sum")):
            there, needed = len(set(among).intersection(confirmed)), 2 * len(among) // 3 + 1
            if there < needed:
                return f"{there} of {len(among)} devices of {words} have confirmed the sum, {needed} are needed"
        return ""

    # -------------------------------------------------------------------------------------------------- secrets

    def derive_secret(self, own: X25519PrivateKey, peer: bytes, purpose: str) -> bytes:
        """Derive the 32-byte secret that two devices share for one purpose in this cohort.

        Raises:
            ValueError: the peer's key is invalid.
        """
        shared = own.exchange(X25519PublicKey.from_public_bytes(peer))
        return HKDF(SHA256(), 32, salt=bytes.fromhex(self.digest), info=purpose.encode()).derive(shared)

    def derive_pair_seed(self, key: X25519PrivateKey, own: int, peer: int, training: str) -> bytes:
        """Derive the seed s_ij of the key's owner, at position `own`, and the device at `peer`.

        The seed depends on both positions. Several X25519 keys make the same secrets, so a device could otherwise take
        a key with the secrets of another device, whose masks would then cancel. The seed also depends on what both were
        asked to learn (`fedge.steps.masked.train_masked.compute_common_digest`), so that different requests leave masks
        that do not cancel.
        """
        return self.derive_secret(key, self.members[peer].masking, f"mask {min(own, peer)} {max(own, peer)} {training}")

    def _make_cipher(self, own: X25519PrivateKey, peer: int, sender: int, receiver: int) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self.derive_secret(own, self.members[peer].encryption, f"shares {sender} {receiver}"))

    def seal(self, own: X25519PrivateKey, sender: int, receiver: int, data: bytes) -> bytes:
        """Encrypt a message from one position to another, with a key for this cohort and direction only."""
        return self._make_cipher(own, receiver, sender, receiver).encrypt(_NONCE, data, None)

    def unseal(self, own: X25519PrivateKey, sender: int, receiver: int, data: bytes) -> bytes | None:
        """Decrypt the output of `seal` for the same positions; return None if the data is anything else."""
        try:
            return self._make_cipher(own, sender, sender, receiver).decrypt(_NONCE, data, None)
        except (InvalidTag, ValueError):
            return None


@lru_cache(MAX_COHORT)
def _is_signed(key: bytes, statement: bytes, signature: bytes) -> bool:
    """Return whether the key signed the statement. Cached, since all devices of a simulation check the same ones."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


_NONCE: Final = bytes(12)
_members: Final = msgspec.msgpack.Decoder(Annotated[tuple[Member, ...], Meta(min_length=2, max_length=MAX_COHORT)])
_positions: Final = msgspec.msgpack.Decoder(Annotated[tuple[Position, ...], Meta(max_length=MAX_COHORT)])
_signatures: Final = msgspec.msgpack.Decoder(Annotated[dict[Position, Signature], Meta(max_length=MAX_COHORT)])


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    with raise_as(partial(ProtocolError, "malformed"), f"no {what}", on=MALFORMED):
        return decoder.decode(data)


def write_roster(members: Iterable[Member]) -> bytes:
    """Serialise the roster."""
    return msgspec.msgpack.encode(sorted(members, key=lambda member: member.id))


def read_roster(data: bytes) -> Roster:
    """Parse the output of `write_roster`.

    Raises:
        ProtocolError: `malformed` if the bytes are no roster, or the roster names a device or a key twice.
    """
    members = _decode(_members, data, "roster")
    ids = [member.id for member in members]
    if ids != sorted(set(ids)) or len({key for member in members for key in member.keys}) != 3 * len(members):
        raise ProtocolError("malformed", "the roster names a device or a key twice, or is not sorted")
    return Roster(members, compute_digest(data))


def write_positions(positions: Iterable[int]) -> bytes:
    """Serialise a set of a roster's devices, given by their positions."""
    return msgspec.msgpack.encode(sorted(positions))


def read_positions(data: bytes, roster: Roster) -> tuple[int, ...]:
    """Parse the output of `write_positions`; equal sets have equal bytes.

    Raises:
        ProtocolError: `malformed` if the bytes are no positions, not in the roster, or not written that way.
    """
    found: tuple[int, ...] = _decode(_positions, data, "positions")
    if data != write_positions(set(found)) or found[-1:] > (len(roster.members) - 1,):
        raise ProtocolError("malformed", "the positions are not in the roster, or not ascending")
    return found


def write_signatures(signatures: Mapping[int, bytes]) -> bytes:
    """Serialise signatures by position."""
    return msgspec.msgpack.encode(dict(sorted(signatures.items())))


def read_signatures(data: bytes) -> dict[int, bytes]:
    """Parse the output of `write_signatures`, without checking the signatures (`Roster.find_signers` does).

    Raises:
        ProtocolError: `malformed`.
    """
    return _decode(_signatures, data, "signatures")


def _make_proof_context(order: Order, session: str) -> str:
    """Return the context that ties a proof to one sum."""
    return f"masking {order.run} {order.round} {session}"


def prove_keys(keys: KeysMade, order: Order, session: str, signed: Plain | Signed) -> KeysMade:
    """Add a proof of ownership to a device's keys, if messages are signed."""
    return replace(
        keys, proof=signed.sign(_make_proof_context(order, session), b"".join(make_member(order.device_id, keys).keys))
    )


def require_genuine(members: Iterable[Member], order: Order, session: str, signed: Plain | Signed) -> None:
    """Check that all keys belong to devices of the federation, since a coordinator could invent all devices but one.

    Without signed messages this cannot be checked.

    Raises:
        ProtocolError: `certificate` if a proof does not hold; the text names the device.
    """
    for member in members:
        try:
            signed.verify(_make_proof_context(order, session), b"".join(member.keys), member.proof, member.id)
        except ProtocolError as error:
            raise ProtocolError("certificate", f"nobody vouches for the keys of {member.id} ({error})") from None


def expand_seed(seed: bytes, layout: Layout) -> Summand:
    """Expand a seed by ChaCha20 (RFC 8439) into a mask that looks uniform in the rings to all who lack the seed."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return fixed_point.from_bytes(stream.update(bytes(fixed_point.count_bytes(layout))), layout)


def add_pair_mask(total: Summand, own: int, peer: int, seed: bytes, layout: Layout) -> None:
    """Add the mask of the device at position `own` for its pair with `peer`, in place; `peer` adds the opposite."""
    (total.add if own < peer else total.subtract)(expand_seed(seed, layout))


def make_commitment(seed: bytes) -> bytes:
    """Return a commitment to a device's own mask seed b (256 random bits), made before the seed is shared."""
    return hashlib.sha256(b"fedge own mask" + seed).digest()


class Sums(Struct, frozen=True, array_like=True):
    """The sums of a run, each as a set of devices with one bit per device; a sum of 10,000 devices takes 1,250 bytes.

    `devices` holds the devices of all sums, in the order of their first sum. Bit k of a sum, from the lowest, stands
    for `devices[k]`; zero bytes at the end are left out.
    """

    sums: tuple[bytes, ...] = ()
    devices: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """Yield the devices of each sum, ascending."""
        for each in self.sums:
            bits = np.unpackbits(np.frombuffer(each, np.uint8), bitorder="little")
            yield tuple(sorted(self.devices[k] for k in np.flatnonzero(bits)))

    def with_sum(self, summed: Iterable[str]) -> Sums:
        """Return these sums with one more, unless it is among them already."""
        devices = frozenset(summed)
        known = (*self.devices, *sorted(devices.difference(self.devices)))
        bits = _encode_bits(devices, known)
        return self if bits in self.sums else Sums((*self.sums, bits), known)

    def explain_too_close(self, summed: Iterable[str], fewest: int) -> str:
        """Return why these devices may not be summed, given the sums so far, or "" if they may.

        A sum must cover at least `fewest` devices. Two sums must cover the same devices or differ by at least `fewest`,
        since the difference of two sums is a sum, too. And all sums must fit into `MAX_REMEMBERED`.
        """
        devices = frozenset(summed)
        if len(devices) < fewest:
            return f"a sum of {len(devices)} devices, {fewest} are the fewest"
        bits, n_new = _encode_bits(devices, self.devices), len(devices.difference(self.devices))
        own = int.from_bytes(bits, "little")
        apart = {(own ^ int.from_bytes(each, "little")).bit_count() + n_new for each in self.sums}
        if (nearest := min(apart - {0}, default=fewest)) < fewest:
            return f"a sum that differs by {nearest} devices from an earlier one, {fewest} are the fewest"
        if 0 not in apart and sum(map(len, (*self.sums, *self.devices))) > MAX_REMEMBERED:
            return f"{len(self.sums)} different sums in this run, no more can be remembered"
        return ""


def _encode_bits(devices: Collection[str], known: Sequence[str]) -> bytes:
    """Return one bit for each known device, set if it is among `devices`; zero bytes at the end are left out."""
    return np.packbits(np.array([i in devices for i in known], bool), bitorder="little").tobytes().rstrip(b"\0")
