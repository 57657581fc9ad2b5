"""TLS contexts of a broker's clients and of our small servers, and the format of the servers' tokens."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fedge.errors import ConfigError, raise_as
from fedge.system.text import Heading

ListenHost = Annotated[
    str, Heading.SERVER, "The server listens on this address; with 0.0.0.0 everybody in the network may ask."
]
ListenPort = Annotated[int, Meta(ge=0, le=65535), Heading.SERVER, "The server listens on this port; 0 is a free one."]
HttpCertificate = Annotated[str | None, Heading.SERVER, "This certificate of the server turns HTTPS on."]
HttpKey = Annotated[str | None, Heading.SERVER, "This file is the private key of --http-cert-file."]
"""These types are the settings of our small servers."""


def make_client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """Return the context of a client that trusts only this authority and may show a certificate.

    If `ca_file` is None, the client trusts the authorities that the system trusts.

    Raises:
        ConfigError: a file is unusable; the text names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is None:
        context.load_default_certs()
    else:
        _trust_authority(context, ca_file)
    if cert_file is not None:
        _present_certificate(context, cert_file, key_file)
    return context


def make_server_tls(
    token: str | None, cert_file: str | None, key_file: str | None, ca_file: Path | None = None
) -> ssl.SSLContext | None:
    """Return a server's context, or None for plain HTTP. `ca_file` is the authority of certificates of clients.

    Raises:
        ConfigError: the certificate, the key or the token is unusable.
    """
    if token is not None and re.fullmatch(r"[A-Za-z0-9._~+/=-]{16,}", token) is None:
        raise ConfigError("token: at least 16 letters, digits and any of ._~+/=-, such as `openssl rand -hex 16` gives")
    if cert_file is None:
        if key_file is not None:
            raise ConfigError("http_key_file needs http_cert_file, the certificate that it belongs to")
        if ca_file is not None:
            raise ConfigError("a login by certificate needs http_cert_file, the certificate of this server")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _present_certificate(context, cert_file, key_file, "http_")
    if ca_file is not None:
        _trust_authority(context, ca_file)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _trust_authority(context: ssl.SSLContext, ca_file: str | Path) -> None:
    with raise_as(ConfigError, f"ca_file {ca_file} holds no certificates"):
        context.load_verify_locations(ca_file)


def _present_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None, prefix: str = "") -> None:
    try:
        context.load_cert_chain(cert_file, key_file, password=_refuse_passphrase)
    except OSError as error:
        pair = f"{prefix}cert_file {cert_file} and {prefix}key_file {key_file or cert_file}"
        raise ConfigError(f"{pair} are not a certificate with its private key: {error}") from error


def _refuse_passphrase() -> str:
    """Refuse a key with a passphrase, since nobody is present to type it."""
    raise ConfigError("the private key of the certificate is encrypted; give one that is not")
