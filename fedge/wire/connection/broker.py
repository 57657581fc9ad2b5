"""The broker's settings, its inbound messages, and the last will that it publishes for us."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fedge.identity.tls import make_client_tls
from fedge.system.text import format_address
from fedge.wire.connection.route import Address, Proxy

Handler = Callable[["Inbound"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The broker's address and our credentials. `ca_file` turns on TLS; `cert_file` and `key_file` identify us.

    `path` and `secure` are as in `Address`. A `secure` broker uses TLS even without `ca_file`; it is then trusted as
    the system trusts web servers. `topic_prefix` holds the levels before all our topics at this broker; only the
    transport sees it. `client_prefix` stands before our client id.
    """

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: int = 30
    path: str | None = None
    secure: bool = False
    proxy: Proxy | None = None
    topic_prefix: str = ""
    client_prefix: str = ""

    @property
    def address(self) -> Address:
        """The address that the broker listens at."""
        return Address(self.host, self.port, self.path, self.secure)

    def make_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context with these files, or None without TLS.

        Raises:
            ConfigError: one of the files is unusable.
        """
        if self.ca_file is None and not self.secure:
            return None
        return make_client_tls(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message from the broker. `retained` is True if the broker had it before we subscribed.

    A request names a topic for its answer, and data to return with the answer (MQTT 5 only). An answer topic that is
    not below our topic prefix begins with `OUTSIDE`.
    """

    topic: str
    payload: bytes
    retained: bool
    response_topic: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the broker publishes (QoS 1, retained) `delay_s` after we vanish (at once in MQTT 3.1.1)."""

    topic: str
    payload: bytes
    delay_s: int = 10


@dataclass(slots=True)
class Caller:
    """The client and its broker. `door` is called with topic and payload of the will, and may hold the will back."""

    settings: BrokerSettings
    client_id: str
    will: Will | None
    session_expiry_s: int
    door: Callable[[str, bytes], None] | None
    alert: str = ""
    """Why the broker last ended TLS before it let us in; unknown if the connection was reset."""

    @property
    def broker(self) -> str:
        """The broker's host and port."""
        return format_address(self.settings.host, self.settings.port)
