"""The broker as its users see it: where it is, what comes from it, and what it says when we vanish."""

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
    """The broker's address and credentials: TLS with `ca_file`; `cert` and `key` identify this client.

    path, secure: as of `Address`. A `secure` broker is over TLS without `ca_file`, too; it is trusted as the system
    trusts web servers.
    topic_prefix: levels before all our topics at this broker. Nobody but the transport sees it.
    client_prefix: before our client id.
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
        """Return the TLS context that the files make, or None without TLS.

        Raises:
            ConfigError: one of them is unusable.
        """
        if self.ca_file is None and not self.secure:
            return None
        return make_client_tls(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message from the broker. `retained`: it was there before we subscribed.

    A request names a topic for its answer, and data to return with it (MQTT 5 only). One that is not below our topic
    prefix begins with `OUTSIDE`.
    """

    topic: str
    payload: bytes
    retained: bool
    response_topic: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes for us (QoS 1, retained) once we are gone for `delay_s` (MQTT 3.1.1: at once)."""

    topic: str
    payload: bytes
    delay_s: int = 10


@dataclass(slots=True)
class Caller:
    """The client and where it connects; `door` gets topic and payload of the will, and may hold it back."""

    settings: BrokerSettings
    client_id: str
    will: Will | None
    session_expiry_s: int
    door: Callable[[str, bytes], None] | None
    alert: str = ""
    """Why the broker last ended TLS before it let us in; it is lost if the connection is reset."""

    @property
    def broker(self) -> str:
        """The broker's host and port."""
        return format_address(self.settings.host, self.settings.port)
