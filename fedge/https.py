"""HTTPS for our small servers, and the format of their tokens."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from fedge.credentials import no_passphrase
from fedge.errors import ConfigError


def server_tls(
    token: str | None, cert_file: str | None, key_file: str | None, ca_file: Path | None = None
) -> ssl.SSLContext | None:
    """The TLS context; None: plain HTTP. `ca_file`: clients may present a certificate of this authority.

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
    try:
        context.load_cert_chain(cert_file, key_file, password=no_passphrase)
    except OSError as error:
        pair = f"http_cert_file {cert_file} and its key {key_file or 'in the same file'}"
        raise ConfigError(f"{pair} are not a certificate with its private key: {error}") from error
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise ConfigError(f"{ca_file} holds no certificates: {error}") from error
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
