"""A process's identity at the broker: settings of every command that connects to one."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta, Struct

from fedge.config import Secret
from fedge.errors import ConfigError
from fedge.transport import BrokerSettings, parse_address

CA: Final = "ca.crt"
CERTIFICATE: Final = "own.crt"
KEY: Final = "own.key"
"""Files of an identity, the folder that `fedge provision` and `fedge enrol` write."""


class Credentials(Struct, frozen=True, kw_only=True):
    """Base of the settings of such a command: password, certificates, or neither."""

    username: Annotated[str, Meta(description="User name at the broker.")] | None = None
    password: Annotated[Secret, Meta(description="Password at the broker; best set in the environment.")] | None = None
    identity: (
        Annotated[Path, Meta(description="Folder of `fedge enrol` or `fedge provision`, instead of the three files.")]
        | None
    ) = None
    ca_file: Annotated[str, Meta(description="Certificate authority of the broker; turns TLS on.")] | None = None
    cert_file: Annotated[str, Meta(description="Our own certificate, if the broker demands one.")] | None = None
    key_file: Annotated[str, Meta(description="Its private key.")] | None = None

    def at(self, address: str, *, keepalive_s: int = 30) -> BrokerSettings:
        """How to reach the broker at HOST:PORT.

        Raises:
            ConfigError: not an address, or the certificates cannot be used.
        """
        host, port = parse_address(address)
        named = self.by_files()
        named.check()
        return BrokerSettings(
            host, port, self.username, self.password, named.ca_file, named.cert_file, named.key_file, keepalive_s
        )

    def by_files(self) -> Self:
        """The same settings, with the identity replaced by its three files.

        Raises:
            ConfigError: the files are given as well.
        """
        if self.identity is None:
            return self
        if self.ca_file or self.cert_file or self.key_file:
            raise ConfigError("identity holds ca_file, cert_file and key_file: give it, or them")
        ca, certificate, key = (str(self.identity / name) for name in (CA, CERTIFICATE, KEY))
        return msgspec.structs.replace(self, identity=None, ca_file=ca, cert_file=certificate, key_file=key)

    def check(self) -> None:
        """Read the files once at start: at a connection, a missing one would look like an outage.

        Raises:
            ConfigError: they cannot be used.
        """
        if self.ca_file is None:
            if self.cert_file or self.key_file:
                raise ConfigError("cert_file and key_file need ca_file, the authority of the broker's certificate")
            return
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file needs cert_file, the certificate that it belongs to")
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(self.ca_file)
        except OSError as error:
            raise ConfigError(f"ca_file {self.ca_file} holds no certificates: {error}") from error
        if self.cert_file is None:
            return
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=no_passphrase)
        except OSError as error:
            pair = f"cert_file {self.cert_file} and key_file {self.key_file or self.cert_file}"
            raise ConfigError(f"{pair} are not a certificate with its private key: {error}") from error


def no_passphrase() -> str:
    """Nobody is there to type a passphrase."""
    raise ConfigError("the private key of the certificate is encrypted; give one that is not")
