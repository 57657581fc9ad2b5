"""Signed messages, which a hostile broker can withhold but neither forge nor replay.

A process with a certificate of its federation's authority (`fedge.identity`) signs all its messages and accepts only
those signed by a member in the right role. On the wire, the bytes of a message are then in an envelope:

    [bytes, number, to, certificate, signature]

The signature covers the topic, `number`, `to` and the bytes. So a message is valid only on its own topic, and thus in
one federation and for one device. `number` increases with every message of a sender; a message older than the last one
on a topic by the same key is refused. `to` is the incarnation of the receiving agent, which therefore refuses messages
from before its last start, whatever the clocks say. Within one incarnation, each life of the sender is counted
separately, since a coordinator that lost its home after its clock was ahead starts with lower numbers. A last will,
made before everything else, has number 0.

Without such a certificate messages travel unsigned (`Plain`); the broker and its rules must then be trusted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fedge.errors import ConfigError, ProtocolError, StoreError, TransportError
from fedge.identity.authority import Authority, Key, explain_out_of_date, verify_signature
from fedge.identity.names import CRL, URN, Role, Subject
from fedge.system.files import get_version, read_kept, write_atomically
from fedge.wire.messages import MAX_MESSAGE_BYTES
from fedge.wire.topics import Topics

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from fedge.wire.connection.broker import BrokerSettings, Inbound
    from fedge.wire.transport import Transport

log = logging.getLogger("fedge.identity")

MAX_ENVELOPE_BYTES: Final = 3 * 1024
"""Most bytes that an envelope adds to its message: certificate, signature and the rest."""
BEGINS: Final = b"\x95"
"""First byte of an envelope, which is an array of five in MessagePack; a plain message is an array of two."""
WITHOUT_CERTIFICATE: Final = "/context"
"""End of the topics of context messages, the most frequent ones. They carry no certificate, since receivers know it
from the status."""


MAX_LIFE: Final = (1 << 32) - 1
"""Largest life, a time in seconds; together with the message's number, a life fits into 64 bits."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signed message as it is on the wire."""

    payload: bytes
    number: int
    to: str
    certificate: bytes
    signature: bytes

    def make_context(self, topic: str) -> str:
        """Return the text that is signed together with the payload."""
        return f"{topic} {self.number} {self.to}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class Plain:
    """Messages without signatures, with the interface of `Signed`."""

    def seal(self, topic: str, payload: bytes, *, to: str = "", will: bool = False) -> bytes:
        """Return the payload as it is."""
        return payload

    def open(self, topic: str, data: bytes, *roles: Role, name: str = "", to: str = "") -> bytes:
        """Return the message unchanged.

        Raises:
            ProtocolError: `signed` if the message is an envelope.
        """
        if data.startswith(BEGINS):
            raise ProtocolError("signed", f"this {roles[0]} signs, but we have no certificate of its federation")
        return data

    is_behind = False

    def open_overheard(self, topic: str, data: bytes, name: str) -> bytes | None:
        """Return the message unchanged; raises the same errors as `open`."""
        return self.open(topic, data, Role.DEVICE, name=name)

    def start_new_life(self) -> None:
        """Do nothing, since nothing is numbered."""

    def sign(self, topic: str, data: bytes) -> bytes:
        """Return no proof."""
        return b""

    def verify(self, topic: str, data: bytes, proof: bytes, name: str) -> None:
        """Accept, since nothing can be checked."""

    def list_certificates(self) -> dict[str, bytes]:
        """List nothing, since nobody shows a certificate."""
        return {}

    async def follow_revocations(self, transport: Transport, topics: Topics) -> None:
        """Do nothing, since nobody is revoked."""


class Signed:
    """Signs all messages of this process and verifies those of others.

    Args:
        broker: settings with certificate, key and authority; the certificate is read again when it changes.
        home: folder of the process, for lasting state; None if the process only listens.

    Raises:
        ConfigError: certificate or key cannot be used.
        TransportError: the certificate is not valid by this machine's clock.
    """

    def __init__(self, broker: BrokerSettings, home: Path | None) -> None:
        assert broker.ca_file is not None
        assert broker.cert_file is not None
        self._files = broker.cert_file, broker.key_file
        self._key = Key(*self._files)
        self._read_at = get_version(Path(broker.cert_file))
        self.subject = self._key.subject
        self.authority = Authority(broker.ca_file, None if home is None else home / CRL)
        self._require_usable(broker.cert_file)
        self.admit: Callable[[Subject], None] = lambda _: None
        """Raises a ProtocolError for a subject who is not on the member list, if there is such a list."""
        self._home = home
        self._life = self._overheard = 0
        self.start_new_life()
        self._said = 0
        self._certificates: dict[str, bytes] = {}  # certificates of the latest senders, by name
        self.heard: dict[str, int] = {}
        """The highest number by topic and key; it may be stored and given to the next process."""

    def _require_usable(self, cert_file: str) -> None:
        if trouble := explain_out_of_date(self._key.certificate):  # the clock may not be set yet
            raise TransportError(f"cert_file {cert_file} {trouble}: nobody would accept it")
        if trouble := self.authority.explain_invalid(self._key.certificate):
            raise ConfigError(f"cert_file {cert_file}: {trouble}; nobody would accept it")

    def start_new_life(self) -> None:
        """Begin another life, with numbers above those of any process that has signed with our key meanwhile.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self._home is not None:
            self._life = _start_next_life(self._home / "life", self._overheard)

    # ---------------------------------------------------------------------------------------------- outwards

    def seal(self, topic: str, payload: bytes, *, to: str = "", will: bool = False) -> bytes:
        """Seal a payload with our signature. `to` is the receiving agent's incarnation; `will` marks a last will."""
        self._renew()
        self._said += 1
        certificate = b"" if topic.endswith(WITHOUT_CERTIFICATE) else self._key.der
        number = 0 if will else (self._life << 32) + self._said
        unsigned = Envelope(payload, number, to, certificate, b"")
        signature = self._key.sign(unsigned.make_context(topic), payload)
        return _encoder.encode(msgspec.structs.replace(unsigned, signature=signature))

    def _renew(self) -> None:
        """Switch to a renewed certificate; keep the old one while the new one is unusable."""
        if (now := get_version(Path(self._files[0]))) != self._read_at:
            try:
                self._key, self._read_at = Key(*self._files), now
            except ConfigError as error:
                log.error("event=not_renewed reason=%r", str(error))  # noqa: TRY400 - the text is all

    # ----------------------------------------------------------------------------------------------- inwards

    def open(self, topic: str, data: bytes, *roles: Role, name: str = "", to: str = "") -> bytes:
        """Return the bytes of a message that a member in one of these roles signed for this topic.

        Args:
            topic: the topic on which the message came.
            data: the bytes as received.
            roles: roles of permitted senders.
            name: name of the required sender; empty for any sender in these roles.
            to: our incarnation, if the message must be addressed to it.

        Raises:
            ProtocolError: `unsigned`, `oversized`, `malformed`, `certificate`, `revoked`, `not-a-member`, `forged` or
                `replayed`.
        """
        envelope, subject, key = self._verify_envelope(topic, data, roles, name)
        if envelope.to != to:
            raise ProtocolError("replayed", "the message was for this device before its last start")
        life = f" {envelope.number >> 32}" if to else ""
        self._require_newest(f"{topic} {_format_key(key)}{life}", envelope.number)
        if subject.role.effective_role is Role.DEVICE and envelope.certificate:
            self._certificates[subject.name] = envelope.certificate
        return envelope.payload

    def _verify_envelope(
        self, topic: str, data: bytes, roles: Sequence[Role], name: str
    ) -> tuple[Envelope, Subject, EllipticCurvePublicKey]:
        """Verify an envelope's signature, topic and sender, but not its number; return it with its signer and key."""
        if not data.startswith(BEGINS):
            raise ProtocolError("unsigned", f"a {roles[0]} of {self.subject.federation} must sign its messages")
        if len(data) > MAX_MESSAGE_BYTES + MAX_ENVELOPE_BYTES:
            raise ProtocolError("oversized", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} allowed in an envelope")
        envelope = _decode_envelope(data)
        certificate = envelope.certificate or self._certificates.get(name, b"")
        if not certificate:
            raise ProtocolError("unknown-device", f"{name} has sent no certificate yet")
        subject, key = self.authority.identify(certificate)
        ours = subject.federation == self.subject.federation and subject.role.effective_role in roles
        if not ours or (name and subject.name != name):
            raise ProtocolError("certificate", f"{subject} may not say this")
        self.admit(subject)
        verify_signature(key, envelope.make_context(topic), envelope.payload, envelope.signature)
        return envelope, subject, key

    @property
    def is_behind(self) -> bool:
        """Whether another process with our key has used higher numbers, so that receivers would refuse our messages."""
        return self._overheard >= self._life

    def open_overheard(self, topic: str, data: bytes, name: str) -> bytes | None:
        """Return a message that another process sent in our own name, or None if it is older than our life.

        If that process has our key, our next life (`start_new_life`) has higher numbers. Raises the same errors as
        `open`.
        """
        envelope, _, key = self._verify_envelope(topic, data, [Role.DEVICE], name)
        if envelope.number and _format_key(key) == _format_key(self._key.public):
            if envelope.number < self._life << 32:
                return None
            self._overheard = max(self._overheard, min(envelope.number >> 32, MAX_LIFE - 2))
        return envelope.payload

    def sign(self, topic: str, data: bytes) -> bytes:
        """Sign data that other members may receive through a third party at any later time."""
        return self.seal(topic, data)

    def verify(self, topic: str, data: bytes, proof: bytes, name: str) -> None:
        """Check that a device vouched for these bytes.

        Raises:
            ProtocolError: as for `open`; `forged` also if the proof is for other bytes.
        """
        envelope, _, _ = self._verify_envelope(topic, proof, [Role.DEVICE], name)
        if envelope.payload != data:
            raise ProtocolError("forged", f"{name} has vouched for something else")

    def _require_newest(self, source: str, number: int) -> None:
        if number == 0:  # a last will: receivers go by the incarnation in it
            return
        if number < self.heard.get(source, 0):
            raise ProtocolError(
                "replayed",
                f"message {number} came after {self.heard[source]}; the sender's clock was ahead and its home was "
                "lost, or another process speaks with its key: revoke it, and enrol it again",
            )
        self.heard[source] = number

    def list_certificates(self) -> dict[str, bytes]:
        """List the certificates (DER) with which devices signed last, by name."""
        return dict(self._certificates)

    async def follow_revocations(self, transport: Transport, topics: Topics) -> None:
        """Subscribe to revocations; call before the transport is entered."""
        await transport.subscribe(topics.revocations, self._on_revocations)

    async def _on_revocations(self, inbound: Inbound) -> None:
        if not inbound.payload:
            return
        try:
            if self.authority.accept_revocations(inbound.payload):
                log.info("event=revocations bytes=%d", len(inbound.payload))
        except StoreError as error:  # the list is in force until this process ends, and received again after that
            log.error("event=revocations_not_kept reason=%r", str(error))  # noqa: TRY400 - the text is all


def open_unverified(data: bytes) -> bytes:
    """Return a message's bytes without checking any signature, to inspect our own messages.

    Raises:
        ProtocolError: `malformed`.
    """
    return _decode_envelope(data).payload if data.startswith(BEGINS) else data


def _format_key(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()


def _decode_envelope(data: bytes) -> Envelope:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"no envelope: {error}") from error


def make_speaker(broker: BrokerSettings, subject: Subject, home: Path | None) -> Plain | Signed:
    """Return `Signed` if a federation's authority made our certificate, else `Plain`.

    Raises:
        ConfigError: the certificate is somebody else's, revoked, or not by the authority in ca_file.
        TransportError: the certificate is not valid by this machine's clock.
    """
    if broker.cert_file is None:
        return Plain()
    from cryptography.hazmat.primitives.serialization import Encoding

    from fedge.identity.certificates import load_certificate

    der = load_certificate(Path(broker.cert_file)).public_bytes(Encoding.DER)
    if URN.encode() not in der:  # another authority made the certificate
        if subject.role is Role.DEVICE and subject.name.encode() not in der:
            log.warning(
                "event=other_name cert_file=%s detail=%r",
                broker.cert_file,
                f"it does not name {subject.name}: a broker that goes by its name will not let this device speak",
            )
        return Plain()
    signed = Signed(broker, home)
    if signed.subject != subject:
        raise ConfigError(
            f"cert_file {broker.cert_file} is of {signed.subject}, and this is {subject}: give its own certificate, or "
            "the name and federation that stand in it"
        )
    return signed


def _decode_life(data: bytes) -> int:
    if not 0 <= (life := int(data)) < MAX_LIFE:
        raise ValueError(f"{life} is not a time in seconds")
    return life


def _start_next_life(file: Path, overheard: int = 0) -> int:
    """Store and return a life above that of any earlier process, even if the clock or the file was reset.

    `overheard` is the highest life heard of another process with our key.
    """
    before = max(read_kept(file, _decode_life) or 0, overheard)
    life = max(before + 1, int(time.time()))
    write_atomically(file, str(life).encode())
    return life
