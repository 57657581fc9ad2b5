"""Certificates and keys as files: a machine's identity is a folder.

    ca.crt    certificate of the federation's authority, the only one trusted
    own.crt   certificate of this machine
    own.key   its private key, on the curve P-256

`fedge provision` writes the folders of the server, `fedge enrol` the folder of a device. `fedge.identity` defines what
a certificate says. Importing this module loads `cryptography`.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedge.errors import ConfigError, raise_as
from fedge.identity.names import CRL, Role, Subject
from fedge.settings import NAME

UNREADABLE: Final = (
    *(ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""Errors that `cryptography` raises for malformed certificates, requests and lists."""
RENEW_AT: Final = 2 / 3
"""Share of its validity period after which a certificate or a revocation list is renewed."""
WARN_AT: Final = 3 / 4
"""Share of the validity period after which a warning says that the renewal did not happen."""
Dated = x509.Certificate | x509.CertificateRevocationList


def get_time() -> dt.datetime:
    """Return the time by which certificates are made and checked."""
    return dt.datetime.now(dt.UTC)


def make_device_subject(federation: str, device_id: str) -> Subject:
    """Return the subject of a device's certificate.

    Raises:
        ConfigError: the device name is not valid.
    """
    if re.match(NAME, device_id) is None:
        words = "1 to 63 letters, digits, dots, dashes, underscores, the first no sign"
        raise ConfigError(f"{device_id!r} is not a name of a device: {words}")
    if device_id in set(Role) - {Role.DEVICE}:
        raise ConfigError(f"no device can be called {device_id}: at the broker a part of the server has that name")
    return Subject(federation, Role.DEVICE, device_id)


def load_certificate(path: Path) -> x509.Certificate:
    """Load the certificate in a PEM file.

    Raises:
        ConfigError: the file holds no certificate.
    """
    with raise_as(ConfigError, f"{path} holds no certificate", on=(OSError, *UNREADABLE)):
        return x509.load_pem_x509_certificate(path.read_bytes())


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Load the private key in a PEM file.

    Raises:
        ConfigError: the file holds no key, or the key is encrypted or of an unsupported kind.
    """
    with raise_as(ConfigError, f"{path} holds no private key that can be read", on=(OSError, ValueError, TypeError)):
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds a key that is not on an elliptic curve")
    return key


def load_crl(path: Path) -> x509.CertificateRevocationList:
    """Load the list of revoked certificates in a PEM file.

    Raises:
        ConfigError: the file holds no such list.
    """
    with raise_as(ConfigError, f"{path} holds no list of revoked certificates", on=(OSError, *UNREADABLE)):
        return x509.load_pem_x509_crl(path.read_bytes())


def make_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def encode_pem(item: Dated | x509.CertificateSigningRequest) -> bytes:
    """Serialise a certificate, a list or a request as PEM."""
    return item.public_bytes(serialization.Encoding.PEM)


def encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Serialise a private key as PEM."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make_x509_name(subject: Subject) -> x509.Name:
    """Return a subject as the X.509 name that brokers show."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject.name)])


def make_certificate_request(device_id: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateSigningRequest:
    """Make a device's request for a certificate for this key, and sign it with the key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device_id)])
    return x509.CertificateSigningRequestBuilder(name).sign(key, hashes.SHA256())


def read_request(data: bytes) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the device that requests a certificate, and the key for which it requests one.

    Raises:
        ConfigError: the data is not such a request, or is not signed with that key.
    """
    with raise_as(ConfigError, "that is not a request for a certificate", on=UNREADABLE):
        request = x509.load_pem_x509_csr(data)
        key, valid = request.public_key(), request.is_signature_valid
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not valid or len(names) != 1 or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError("that is not a request for a certificate that `fedge enrol` or an agent has made")
    return str(names[0].value), key


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority's key signed the certificate. Dates are ignored."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


def get_validity(item: Dated) -> tuple[dt.datetime, dt.datetime]:
    """Return the validity period of a certificate or a revocation list."""
    if isinstance(item, x509.Certificate):
        return item.not_valid_before_utc, item.not_valid_after_utc
    return item.last_update_utc, item.next_update_utc or item.last_update_utc


def is_past(share: float, item: Dated, at: dt.datetime) -> bool:
    """Return whether this share of the item's validity period has passed."""
    begin, end = get_validity(item)
    return at >= begin + share * (end - begin)


def explain_overdue(what: str, item: Dated, at: dt.datetime) -> str:
    """Return a warning that the item's renewal is overdue, or ""."""
    if not is_past(WARN_AT, item, at):
        return ""
    end = get_validity(item)[1]
    state = f"expired on {end:%Y-%m-%d}" if at >= end else f"expires in {(end - at).days} days, on {end:%Y-%m-%d}"
    return f"{what} {state}: run `fedge provision renew` on the server"


def list_overdue(ca_file: Path, cert_file: Path, at: dt.datetime) -> list[str]:
    """Return warnings of the overdue renewals of an identity's certificate and of its revocation list, if any.

    Raises:
        ConfigError: the certificate or the list cannot be read.
    """
    crl = ca_file.with_name(CRL)
    found = [explain_overdue(f"the certificate {cert_file}", load_certificate(cert_file), at)]
    if crl.exists():
        found.append(explain_overdue(f"the list of revoked certificates {crl}", load_crl(crl), at))
    return [text for text in found if text]
