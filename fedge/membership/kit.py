"""A device's start-up kit: one file, signed by the authority, with all that the device needs to join.

A kit holds names, certificates, perhaps a key, and perhaps the description of the task, but no code. A kit without a
key answers a certificate request of the device, which keeps its key to itself. Anyone who reads a kit with a key can
impersonate the device, so delete such a kit after use.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta, Struct

from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED, ConfigError
from fedge.identity import certificates
from fedge.identity.authority import explain_out_of_date
from fedge.identity.names import find_subject
from fedge.settings import ClientPrefix, Name, TopicPrefix
from fedge.wire.connection.route import parse_address

SUFFIX: Final = ".kit"
MAX_BYTES: Final = 1 << 20
Pem = Annotated[str, Meta(max_length=10_000)]


class Kit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a kit. Fields with default values are left out, so that an earlier fedge can read the kit.

    `ca` and `certificate` are the certificates of the authority and of the device, in PEM. `key` is the private key in
    PEM, or None if the device made its key itself. `task` describes the task and names no code.
    """

    federation: Name
    id: Name
    broker: str
    ca: Pem
    certificate: Pem
    key: Pem | None = None
    task: TaskSpec | None = None
    topic_prefix: TopicPrefix | None = None
    client_prefix: ClientPrefix | None = None


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a kit: the kit as JSON, and the authority's signature over that JSON."""

    kit: str
    signature: bytes


def seal_kit(kit: Kit, authority: ec.EllipticCurvePrivateKey) -> bytes:
    """Serialise and sign a kit as a file.

    Raises:
        ConfigError: the kit's task names code.
    """
    refuse_code(kit.task)
    text = msgspec.json.encode(kit)
    signature = authority.sign(text, ec.ECDSA(hashes.SHA256()))
    return msgspec.json.format(msgspec.json.encode(_Sealed(text.decode(), signature)), indent=1)


def unseal_kit(data: bytes) -> Kit:
    """Read a kit. Check its signature, that its certificate is the device's and in date, and that it names no code.

    Raises:
        ConfigError: a check fails; the text says what to do.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        kit = msgspec.json.decode(sealed.kit, type=Kit)
        ca = x509.load_pem_x509_certificate(kit.ca.encode())
        certificate = x509.load_pem_x509_certificate(kit.certificate.encode())
        key = ca.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(sealed.signature, sealed.kit.encode(), ec.ECDSA(hashes.SHA256()))
        parse_address(kit.broker)
    except (*MALFORMED, *certificates.UNREADABLE, AssertionError, InvalidSignature) as error:
        raise ConfigError("it is not a start-up kit, or is damaged: copy it once more from the server") from error
    if find_subject(certificate) != certificates.make_device_subject(kit.federation, kit.id):
        raise ConfigError(f"its certificate is not that of the device {kit.id} of {kit.federation}")
    if not certificates.is_issued_by(certificate, ca):
        raise ConfigError("its certificate is not by the authority that made the kit")
    if trouble := explain_out_of_date(certificate):
        raise ConfigError(f"its certificate {trouble}: if that clock is right, have a new kit made on the server")
    refuse_code(kit.task)
    return kit


def refuse_code(task: TaskSpec | None) -> None:
    """Refuse a task that names code, since only the device's owner decides what may be imported.

    Raises:
        ConfigError: the task names code.
    """
    if task and task.code:
        raise ConfigError(f"no kit may name code, and its task names {task.code[0]}: give --task on the device")
