"""A process's identity at the broker: the settings of all commands that connect to a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta, Struct

from fedge.errors import ConfigError
from fedge.settings import ClientPrefix, Name, Secret, TopicPrefix
from fedge.system.text import Heading
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.route import Proxy, parse_address, parse_proxy

CA: Final = "ca.crt"
CERTIFICATE: Final = "own.crt"
KEY: Final = "own.key"
"""Names of the files of an identity, the folder that `fedge provision` and `fedge enrol` write."""
Broker = Annotated[
    str,
    Heading.BROKER,
    "The MQTT broker is at HOST:PORT, or over WebSockets at ws://HOST:PORT/PATH or wss://HOST:PORT/PATH.",
]
FederationName = Annotated[Name, Heading.BROKER, "This is the name of the federation."]
DeviceName = Annotated[
    Name,
    Heading.BROKER,
    "This is the name of the device, unique in the federation: letters, digits, dot, dash, underscore.",
]
KeepAlive = Annotated[
    int,
    Meta(ge=1, le=3600, extra={"unit": "s"}),
    Heading.BROKER,
    "The connection has this keep-alive; after 1.5 times this we count as gone.",
]


class Credentials(Struct, frozen=True, kw_only=True):
    """Settings common to commands that log in: a password, certificates, or neither."""

    username: Annotated[str | None, Heading.IDENTITY, "The command has this user name at the broker."] = None
    password: Annotated[
        Secret | None, Heading.IDENTITY, "This password belongs to the user name; it is best set in the environment."
    ] = None
    identity: Annotated[
        Path | None,
        Heading.IDENTITY,
        "This folder of `fedge enrol` or `fedge provision` replaces --ca-file, --cert-file and --key-file.",
    ] = None
    ca_file: Annotated[
        str | None, Heading.IDENTITY, "This file is the certificate authority of the broker; it turns TLS on."
    ] = None
    cert_file: Annotated[
        str | None, Heading.IDENTITY, "This file is our own certificate, if the broker demands one."
    ] = None
    key_file: Annotated[str | None, Heading.IDENTITY, "This file is the private key of --cert-file."] = None
    proxy: Annotated[
        Secret | None,
        Heading.IDENTITY,
        "This proxy leads to the broker: http://HOST:PORT or socks5://HOST:PORT, with USER:PASSWORD@ if it asks.",
    ] = None
    topic_prefix: Annotated[
        TopicPrefix | None,
        Heading.IDENTITY,
        "This text stands before all topics, the same in the whole federation, where the broker demands one.",
    ] = None
    client_prefix: Annotated[
        ClientPrefix | None, Heading.IDENTITY, "This text stands before our client id, where the broker demands one."
    ] = None

    def make_broker_settings(self, address: str, *, keepalive_s: int = 30) -> BrokerSettings:
        """Return the settings for connecting to the broker at this address.

        Raises:
            ConfigError: the address or the proxy is malformed, or the certificates cannot be used.
        """
        at = parse_address(address)
        files = self.with_files()
        if at.path is not None and not at.secure and files.ca_file is not None:
            raise ConfigError(f"{address} is without TLS: with certificates it is wss://")
        broker = BrokerSettings(
            at.host,
            at.port,
            self.username,
            self.password,
            files.ca_file,
            files.cert_file,
            files.key_file,
            keepalive_s,
            at.path,
            at.secure,
            self.find_proxy(),
            self.topic_prefix or "",
            self.client_prefix or "",
        )
        broker.make_tls()  # check the files now, since at a connection a missing file would look like an outage
        return broker

    def find_proxy(self) -> Proxy | None:
        """Return the proxy, or None.

        Raises:
            ConfigError: its address is wrong.
        """
        return None if self.proxy is None else parse_proxy(self.proxy)

    def with_files(self) -> Self:
        """Return the same settings with the identity replaced by its three files.

        Raises:
            ConfigError: both the identity and files are given, or one of the files is missing.
        """
        if self.identity is not None:
            if self.ca_file or self.cert_file or self.key_file:
                raise ConfigError("identity holds ca_file, cert_file and key_file: give it, or them")
            ca, certificate, key = (str(self.identity / name) for name in (CA, CERTIFICATE, KEY))
            return msgspec.structs.replace(self, identity=None, ca_file=ca, cert_file=certificate, key_file=key)
        if self.ca_file is None and (self.cert_file or self.key_file):
            raise ConfigError("cert_file and key_file need ca_file, the authority of the broker's certificate")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file needs cert_file, the certificate that it belongs to")
        return self
