"""A port on which aiohttp serves, with limits that protect it from every client that can connect. Needs aiohttp.

A place is a connection that is served. When places run short, idle or slow clients lose theirs, and some places are
reserved for health checks. A place is taken when a connection is accepted, before TLS and before the first byte. So no
client can lock others out for long, however often it connects. Bytes that are not HTTP give one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fedge.errors import TransportError
from fedge.system.logs import Lines
from fedge.system.text import format_address

log = logging.getLogger("fedge.port")

MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 128
"""Most connections that wait to be accepted."""
ACCEPTED_AT_ONCE: Final = 8
"""Most connections that are accepted before the places of those accepted before are counted, so that many connections
at once need few files."""
MAX_HEALTH_CONNECTIONS: Final = BACKLOG
"""Additional places for health checks when all others are taken; the oldest makes way for a new one. With fewer places,
other connections that arrive together with a check would push the check out."""
HEAD_TIMEOUT_S: Final = 5.0
"""Time limit for TLS, and for the head of the first request."""
HEALTH_TIMEOUT_S: Final = 1.0
"""Time limit for a request on a place for health checks."""
SILENT_S: Final = 0.5
"""Idle time after which a client makes way for a new one when all places are taken."""
SLOW_S: Final = 5.0
"""Time of sending a body after which a client makes way for a new one when all places are taken."""
IDLE_TIMEOUT_S: Final = 30.0
"""Time limit between two requests of a connection."""
LINGER_S: Final = 1.0
"""Time to read the rest of a refused body, since many clients would not see the reason if we closed at once."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Health = Mapping[str, Mapping[str, Any]]
"""The JSON object that answers a GET of each path while all places are taken."""


class Port:
    """A listening port with a limited number of places for clients.

    Args:
        host, port: where to listen; with port 0 the system chooses a free one (`number`).
        tls: TLS context for HTTPS, or None for HTTP.
        places: most clients at a time.
        health: answers to health checks, given even when all places are taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        places: int = MAX_CONNECTIONS,
        health: Health | None = None,
    ) -> None:
        self._address, self.tls, self._places = (host, port), tls, places
        self.health: Health = health or {}
        self.connections: set[_Connection] = set()
        self.turned_away = 0
        self._health_alone: dict[_Connection, _HealthAlone] = {}  # the oldest first
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def open(self, app: web.Application, *, drain_s: float) -> None:
        """Serve an application whose first middleware is `watch_request`.

        `close` gives pending requests `drain_s` seconds.

        Raises:
            TransportError: the port is taken, or the host is not an address of this machine.
        """
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_Told(),
            handle_signals=False,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGER_S,
            shutdown_timeout=drain_s,
        )
        await self._runner.setup()
        host, port = self._address
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self), host, port, backlog=ACCEPTED_AT_ONCE
            )
            for accepting in self._listener.sockets:
                with accepting.dup() as same:
                    same.listen(BACKLOG)  # asyncio takes one number for the queue and for what it accepts at once
        except OSError as error:
            await self._runner.cleanup()
            raise TransportError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error

    async def close(self) -> None:
        """Stop listening, answer pending requests, and close all connections."""
        assert self._listener is not None
        assert self._runner is not None
        self._listener.close()
        await self._runner.cleanup()
        for connection in [*self.connections, *self._health_alone]:
            connection.abort()

    @property
    def number(self) -> int:
        """The number of the port."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the port, by the address that it listens on."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{format_address(host, port)}"

    def admit(self, connection: _Connection) -> asyncio.Protocol:
        """Return the protocol for a new client: aiohttp's if a place is free, else one for health checks only."""
        if len(self.connections) >= self._places:
            self._make_room()
        if len(self.connections) < self._places:
            assert self._runner is not None
            server = self._runner.server
            assert server is not None
            self.connections.add(connection)
            connection.set_limit(HEAD_TIMEOUT_S, connection.abort)
            return server()
        self.turned_away += 1
        if len(self._health_alone) >= MAX_HEALTH_CONNECTIONS:
            oldest = next(iter(self._health_alone))
            self._health_alone.pop(oldest).turn_away()
        talker = self._health_alone[connection] = _HealthAlone(connection, self.health)
        connection.set_limit(HEALTH_TIMEOUT_S, talker.turn_away)
        return talker

    def forget(self, connection: _Connection) -> None:
        """Remove a connection that has ended."""
        self.connections.discard(connection)
        self._health_alone.pop(connection, None)

    def _make_room(self) -> None:
        """Close the connection that has been idle longest or, if none is overdue, the one whose body takes longest."""
        now = asyncio.get_running_loop().time()
        for phase, patience_s in ((_Phase.WAITING, SILENT_S), (_Phase.BODY, SLOW_S)):
            those = [one for one in self.connections if one.phase is phase and now - one.since >= patience_s]
            if those:
                min(those, key=lambda one: one.since).abort()
                return

    @web.middleware
    async def watch_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record the phase of each connection, as the outermost middleware."""
        self._enter_phase(_Phase.BODY if request.can_read_body else _Phase.WORK, request)
        try:
            return await handler(request)
        finally:
            self._enter_phase(_Phase.WAITING, request)

    def record_body(self, request: web.Request) -> None:
        """Record that the body has been received, so that the client no longer counts as slow."""
        self._enter_phase(_Phase.WORK, request)

    def _enter_phase(self, phase: _Phase, request: web.Request) -> None:
        known = None if request.transport is None else request.transport.get_protocol()
        if isinstance(known, _Connection):
            known.enter(phase)


class _Phase(Enum):
    """The phase of a connection."""

    WAITING = auto()  # waiting for a request
    BODY = auto()  # receiving the body
    WORK = auto()  # computing the answer


class _Connection(asyncio.Protocol):
    """A client's connection, whose events go to the protocol that serves the client.

    Places are counted on connect, since several connections are accepted at once before any of them is read.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self.phase, self.since = _Phase.WAITING, self._loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._securing: asyncio.Task[None] | None = None
        self._early: list[bytes] | None = []  # data from before the talker was connected; None once it is

    def set_limit(self, seconds: float, then: Callable[[], None]) -> None:
        """Set the time limit for the first request, and the callback for when it expires."""
        self._deadline = self._loop.call_later(seconds, then)

    def enter(self, phase: _Phase) -> None:
        """Enter a phase, and lift the time limit for the first request."""
        self.phase, self.since = phase, self._loop.time()
        self._clear_deadline()

    def abort(self) -> None:
        """End the connection at once."""
        self._release()
        self._tcp.abort()

    def send_last_words(self, words: bytes) -> None:
        """Send these bytes and end the connection; before TLS is set up, end it without them."""
        if self._early is not None:
            self.abort()
        elif not self._transport.is_closing():
            self._transport.write(words)
            self._transport.close()

    def _release(self) -> None:
        self._clear_deadline()
        self._port.forget(self)
        if self._securing is not None:
            self._securing.cancel()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._tcp = transport
        self._talker = self._port.admit(self)
        if self._port.tls is None:
            self._connect(transport)
        else:
            transport.pause_reading()  # the first bytes belong to TLS
            self._securing = self._loop.create_task(self._secure(self._port.tls))

    async def _secure(self, tls: ssl.SSLContext) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                secured = await self._loop.start_tls(
                    self._tcp, self, tls, server_side=True, ssl_handshake_timeout=HEAD_TIMEOUT_S
                )
        except OSError:  # also ssl.SSLError and TimeoutError
            self._securing = None
            self.abort()
            return
        self._securing = None
        if secured is None:  # the connection ended meanwhile
            self.abort()
        else:
            self._connect(secured)

    def _connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._talker.connection_made(transport)
        early, self._early = self._early or [], None
        for data in early:
            self._talker.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        if self._early is None:
            self._talker.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            self._talker.data_received(data)
        else:
            self._early.append(data)

    def eof_received(self) -> bool | None:
        return self._talker.eof_received() if self._early is None else None

    def pause_writing(self) -> None:
        if self._early is None:
            self._talker.pause_writing()

    def resume_writing(self) -> None:
        if self._early is None:
            self._talker.resume_writing()


def _encode_last_words(status: bytes, content: Mapping[str, Any]) -> bytes:
    """Return a final response, after which the connection closes."""
    body = msgspec.json.encode(content)
    return (
        b"HTTP/1.1 %b\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (status, len(body), body)
    )


TOO_MANY: Final = _encode_last_words(
    b"503 Service Unavailable", {"error": "too many connections; try again in a second"}
)


class _HealthAlone(asyncio.Protocol):
    """The protocol on a place reserved for health checks, which answers one request by its first line."""

    def __init__(self, connection: _Connection, health: Health) -> None:
        self._connection, self._health = connection, health
        self._line = b""

    def data_received(self, data: bytes) -> None:
        self._line += data[:200]
        if b"\n" not in self._line and len(self._line) < 200:
            return
        method, _, rest = self._line.partition(b" ")
        health = self._health.get(rest.partition(b" ")[0].decode("latin-1")) if method == b"GET" else None
        self._connection.send_last_words(TOO_MANY if health is None else _encode_last_words(b"200 OK", health))

    def turn_away(self) -> None:
        self._connection.send_last_words(TOO_MANY)


# --------------------------------------------------------------------------------------------------- what is no HTTP


class _Told(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes one line, and few of many, in place of aiohttp's traceback for bytes that are not HTTP."""

    def __init__(self) -> None:
        super().__init__(log)
        self._lines = Lines()

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log an error of a handler or of a client."""
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            address, reason = args[0] if args else "", " ".join(str(exc_info).split())[:200]
            self._lines.warning(log, "event=malformed_request address=%s reason=%r", address, reason)
        elif isinstance(exc_info, ConnectionError):  # the client left while we read its request or wrote the answer
            self._lines.log(log, logging.INFO, "event=client_gone address=%s reason=%r", args[0], str(exc_info))
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
