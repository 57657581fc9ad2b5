"""Names and extensions of the certificates and lists that an authority signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from contextlib import suppress
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedge.errors import ConfigError

CA_DAYS: Final = 30 * 365
"""Life of the authority. It outlives the fleet, since a new authority means a new start-up kit for each device."""
BACKDATED: Final = dt.timedelta(days=1)
"""How long before now a certificate begins, so that a device whose clock is a little behind can use it at once."""
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"
"""Pattern of a host name that a certificate can have; letters beyond ASCII only as xn--..."""


def sign_authority(federation: str, key: ec.EllipticCurvePrivateKey, at: dt.datetime) -> x509.Certificate:
    """Sign a new authority's own certificate."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedge {federation}")])
    end = at + dt.timedelta(days=CA_DAYS)
    builder = start_certificate(name, name, key.public_key(), at - BACKDATED, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(make_key_usage(signs=False), critical=True).sign(key, hashes.SHA256())


def start_certificate(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    """Start a certificate with the fields that all certificates have."""
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, name, key, number, begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def make_authority_identifier(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Make the extension that identifies the signer."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def make_key_usage(*, signs: bool) -> x509.KeyUsage:
    """Make the key usage: members sign messages and handshakes; an authority signs certificates and lists."""
    return x509.KeyUsage(
        digital_signature=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=not signs,
        crl_sign=not signs,
        encipher_only=False,
        decipher_only=False,
    )


def require_host(host: str) -> None:
    """Refuse a text that is neither a name nor an address, since it goes into certificates, kits and configurations.

    Raises:
        ConfigError: the text is neither.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not re.fullmatch(HOST, host) or len(host) > 253:
        raise ConfigError(
            f"{host!r} is no host: give the broker's name, such as edge-server.local, or its address, such as "
            "192.168.1.5 or fd00::5; its port is --port"
        )


def list_host_names(host: str) -> list[x509.GeneralName]:
    """List the names in the broker's certificate: the host, and the machine's own names for itself."""
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    try:
        return [*names, x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    except ValueError:
        return [*names, *(x509.DNSName(name) for name in dict.fromkeys((host, "localhost")))]
