"""The authority of a federation, and signatures with the keys that it vouches for.

A signature covers a context and the bytes, so a signature for one kind of message is invalid for any other. The
authority's signed list (CRL) says who is revoked, whoever delivers the list. A list older than the known one, by its
CRL number, is refused.

`cryptography` is imported where needed and costs about 11 MB of memory (docs/protocol.md).
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedge.errors import ConfigError, ProtocolError, raise_as
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from fedge.identity.names import CRL, Subject, find_subject

log = logging.getLogger("fedge.identity")


MAX_KNOWN: Final = 20_000
"""Most certificates whose checked issuer is remembered, so that it need not be checked again."""


MAX_REVOCATIONS_BYTES: Final = 120 * 1024
"""Largest revocation list on the wire, in one message; it has some 3,000 entries."""


MAX_REVOCATIONS_FILE_BYTES: Final = 16 << 20
"""Largest revocation list in a file; it has some 300,000 entries."""


class Key:
    """Our own certificate and its private key."""

    def __init__(self, cert_file: str | Path, key_file: str | Path | None) -> None:
        """Read both files.

        Raises:
            ConfigError: the files cannot be read, or cannot sign messages.
        """
        from cryptography.hazmat.primitives.serialization import Encoding

        from fedge.identity.certificates import load_certificate, load_key

        self.certificate = load_certificate(Path(cert_file))
        self._key = load_key(Path(key_file or cert_file))
        subject = find_subject(self.certificate)
        if subject is None:
            raise ConfigError(f"cert_file {cert_file} names nobody of a federation: have it made anew")
        self.subject = subject
        self.der = self.certificate.public_bytes(Encoding.DER)

    @property
    def public(self) -> EllipticCurvePublicKey:
        """The public key by which others check our signatures."""
        return self._key.public_key()

    def sign(self, context: str, data: bytes) -> bytes:
        """Sign these bytes in this context (ECDSA with SHA-256, in DER)."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        return self._key.sign(_make_signed_bytes(context, data), ECDSA(SHA256()))


def _make_signed_bytes(context: str, data: bytes) -> bytes:
    return f"fedge signed {context}\n".encode() + data


def verify_signature(key: EllipticCurvePublicKey, context: str, data: bytes, signature: bytes) -> None:
    """Check that a key signed these bytes in this context.

    Raises:
        ProtocolError: `forged` if it did not.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        key.verify(signature, _make_signed_bytes(context, data), ECDSA(SHA256()))
    except InvalidSignature:
        raise ProtocolError(
            "forged", "its signature is not by the key of its certificate, or is for something else"
        ) from None


class Authority:
    """A federation's authority and its revocations.

    Args:
        ca_file: file with the authority's certificate, or with several during a changeover.
        kept: file in which the newest revocation list is stored; None to store none. A list beside ca_file counts, too.
            If the stored list is damaged and there is no other, no certificate is accepted until a list comes.

    Raises:
        ConfigError: one of the files cannot be used.
    """

    def __init__(self, ca_file: str | Path, kept: Path | None = None) -> None:
        from cryptography import x509

        self._file = ca_file
        with raise_as(ConfigError, f"ca_file {ca_file} holds no certificates", on=(OSError, ValueError)):
            self._certificates = x509.load_pem_x509_certificates(Path(ca_file).read_bytes())
        self._known: dict[bytes, tuple[Subject, x509.Certificate, EllipticCurvePublicKey]] = {}
        self._revoked: frozenset[int] = frozenset()
        self._number = -1
        self._kept: Path | None = None
        self.revocations = b""
        """The newest list of revoked certificates (DER); empty if none is known."""
        beside = Path(ca_file).with_name(CRL)
        if beside.exists():
            self.read_revocations(beside)
        self._lost = "" if kept is None else self._read_stored(kept)
        self._kept = kept

    # ------------------------------------------------------------------------------------------------- revocation

    def read_revocations(self, file: Path) -> bool:
        """Read the revocation list in a file; return False if that list or a newer one is known.

        Raises:
            ConfigError: the list cannot be read, or is not by this authority.
            StoreError: the list cannot be stored.
        """
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_REVOCATIONS_FILE_BYTES + 1)
            return self.accept_revocations(data, max_bytes=MAX_REVOCATIONS_FILE_BYTES)
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError) and error.name == "replayed":
                return False
            raise ConfigError(f"{file} is not a list of certificates that {self._file} revoked: {error}") from error

    def _read_stored(self, file: Path) -> str:
        """Read the stored list; return why no certificate can be accepted, or "". A damaged list is not deleted."""
        try:
            if file.exists():
                self.read_revocations(file)
        except ConfigError as error:
            log.error("event=revocations_unreadable reason=%r", str(error))  # noqa: TRY400 - the text is all
            return "" if self.revocations else str(error)
        return ""

    def accept_revocations(self, data: bytes, *, max_bytes: int = MAX_REVOCATIONS_BYTES) -> bool:
        """Accept a revocation list (PEM or DER); return False if it is the known one.

        The default of `max_bytes` is for lists from the wire.

        Raises:
            ProtocolError: `oversized`, `malformed`, `forged` (not by this authority) or `replayed` (a newer one is
                known); nothing changed.
            StoreError: the list cannot be stored; it takes effect all the same.
        """
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import Encoding

        if len(data) > max_bytes:
            raise ProtocolError(
                "oversized", f"the list of revoked certificates has {len(data)} bytes; at most {max_bytes} allowed"
            )
        try:
            load = x509.load_pem_x509_crl if data.startswith(b"-----") else x509.load_der_x509_crl
            crl = load(data)
            number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            revoked = frozenset(entry.serial_number for entry in crl)
            genuine = any(crl.is_signature_valid(ca.public_key()) for ca in self._certificates)  # type: ignore[arg-type]
        except (ValueError, TypeError, x509.ExtensionNotFound, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            raise ProtocolError("malformed", f"no list of revoked certificates: {error}") from error
        if not genuine:
            raise ProtocolError("forged", "the list of revoked certificates is not by our authority")
        if number < self._number:
            raise ProtocolError("replayed", f"the list of revoked certificates {number} is older than {self._number}")
        self._lost = ""
        der = crl.public_bytes(Encoding.DER)
        if der == self.revocations:
            return False
        self.revocations, self._revoked, self._number = der, revoked, number
        if self._kept is not None:
            write_atomically(self._kept, crl.public_bytes(Encoding.PEM))
        return True

    # ------------------------------------------------------------------------------------------------- certificates

    def identify(self, der: bytes) -> tuple[Subject, EllipticCurvePublicKey]:
        """Return the owner of a certificate, and its public key.

        Raises:
            ProtocolError: `certificate` (not by this authority, out of date, or without a name), `revoked`, or
                `unknown-revocations` (the stored list of these is damaged).
        """
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm

        if self._lost:
            raise ProtocolError(
                "unknown-revocations", f"no certificate is accepted until a revocation list comes: {self._lost}"
            )

        if der not in self._known:
            try:
                certificate = x509.load_der_x509_certificate(der)
            except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
                raise ProtocolError("certificate", f"it cannot be read: {error}") from error
            if trouble := self._explain_foreign(certificate):
                raise ProtocolError("certificate", trouble)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[der] = _identify(certificate)
        subject, certificate, key = self._known[der]
        if trouble := explain_out_of_date(certificate):
            raise ProtocolError("certificate", f"the certificate of {subject} {trouble}")
        if certificate.serial_number in self._revoked:
            raise ProtocolError("revoked", f"the certificate of {subject} ({certificate.serial_number:x}) was revoked")
        return subject, key

    def explain_invalid(self, certificate: x509.Certificate) -> str:
        """Return why nobody who trusts this authority accepts a certificate now, or ""."""
        if foreign := self._explain_foreign(certificate):
            return foreign
        if certificate.serial_number in self._revoked:
            return "it was revoked"
        return explain_out_of_date(certificate)

    def _explain_foreign(self, certificate: x509.Certificate) -> str:
        from fedge.identity.certificates import is_issued_by

        ours = any(is_issued_by(certificate, ca) for ca in self._certificates)
        return "" if ours else f"it was not issued by the authority in {self._file}"


def explain_certificate_fault(cert_file: str, ca_file: str) -> str:
    """Return what is visibly wrong with our own certificate, or ""."""
    from fedge.identity.certificates import load_certificate

    try:
        found = Authority(ca_file).explain_invalid(load_certificate(Path(cert_file)))
    except ConfigError as error:
        found = str(error)
    return found and f"cert_file {cert_file}: {found}"


def _identify(certificate: x509.Certificate) -> tuple[Subject, x509.Certificate, EllipticCurvePublicKey]:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    subject, key = find_subject(certificate), certificate.public_key()
    if subject is None or not isinstance(key, EllipticCurvePublicKey):
        raise ProtocolError("certificate", "it does not name a member of a federation, or its key is no EC key")
    return subject, certificate, key


def explain_out_of_date(certificate: x509.Certificate) -> str:
    """Return why a certificate is not valid now, or "" if it is."""
    now = datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if first <= now <= last:
        return ""
    said = f"expired on {last:%Y-%m-%d %H:%M}" if now > last else f"is not valid before {first:%Y-%m-%d %H:%M}"
    return f"{said} UTC, and the clock here shows {now:%Y-%m-%d %H:%M} UTC"
