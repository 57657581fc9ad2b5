"""The Open Inference Protocol over HTTP, with aiohttp. Any input gets a JSON answer; none brings the server down.

When places run short, idle or slow clients lose theirs, and some places are reserved for health. No client can lock
others out for long, however often it connects.

Worst case per process: `MAX_CONNECTIONS` bodies of `max_body_bytes` being received, the queue of each model
(`deploy.batching`), and one JSON request being parsed (about ten times its size).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from typing import Any, Final, Self

import msgspec
from aiohttp import web

import fedge
from deploy import protocol
from deploy.batching import BusyError
from deploy.serving import Served
from fedge.errors import ConfigError, TransportError

log = logging.getLogger("fedge.deploy")

MAX_BODY_BYTES: Final = 8 << 20
"""A batch of 13 pictures of 224 x 224 in colour as FP32."""
MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 128
"""Connections that wait to be accepted, and that are accepted at a time before any of them is read."""
MAX_HEALTH_CONNECTIONS: Final = BACKLOG
"""Additional places for health checks when all others are taken; the oldest makes way for a new one. With fewer, those
that come at the same time as a check would push it out."""
HEAD_TIMEOUT_S: Final = 5.0
"""Time limit for the head of the first request."""
HEALTH_TIMEOUT_S: Final = 1.0
"""Time limit for a request on a place for health checks."""
SILENT_S: Final = 0.5
"""When all places are taken, a client that has been idle for this long makes way for a new one."""
SLOW_S: Final = 5.0
"""When all places are taken, a client that has been sending a body for this long makes way, too."""
BODY_TIMEOUT_S: Final = 30.0
"""Time limit for a body, so that a slow client cannot hold its connection."""
IDLE_TIMEOUT_S: Final = 30.0
"""Time limit between two requests."""
LINGER_S: Final = 1.0
"""Time to read the rest of a refused body: if closed at once, many clients would not see the reason."""
DRAIN_S: Final = 10.0
"""Time for pending requests when the server is stopped."""
HEALTH: Final = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
HEADER_LENGTH: Final = "Inference-Header-Content-Length"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serve models on a port. An async context manager: it listens inside and answers pending requests on exit."""

    def __init__(
        self,
        models: Iterable[Served],
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        tls: ssl.SSLContext | None = None,
        token: str | None = None,
    ) -> None:
        """`port` 0: a free one, see `url`. `token`: required for everything but health."""
        self._models = {model.name: model for model in models}
        self._address = (host, port)
        self._tls = tls
        self._token = token
        self._connections: dict[asyncio.BaseTransport, _Connection] = {}
        self._health_alone: dict[_Connection, _HealthAlone] = {}  # the oldest first
        self._turned_away = 0
        app = web.Application(middlewares=[self._watched, _errors, self._allowed], client_max_size=max_body_bytes)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGER_S,
            shutdown_timeout=DRAIN_S,
        )
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The URL of the server."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            TransportError: the port is taken, or the host is not an address of this machine.
        """
        await self._runner.setup()
        host, port = self._address
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self),
                host,
                port,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HEAD_TIMEOUT_S,
            )
        except OSError as error:
            await self._runner.cleanup()
            raise TransportError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._runner.cleanup()

    # --------------------------------------------------------------------------------------------- connections

    def admit(self, connection: _Connection) -> asyncio.Protocol:
        """The protocol for a new client: aiohttp if there is a place, else health only."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._make_room()
        if len(self._connections) < MAX_CONNECTIONS:
            server = self._runner.server
            assert server is not None
            self._connections[connection.transport] = connection
            connection.limit(HEAD_TIMEOUT_S, connection.transport.abort)
            return server()
        self._turned_away += 1
        if len(self._health_alone) >= MAX_HEALTH_CONNECTIONS:
            oldest = next(iter(self._health_alone))
            self._health_alone.pop(oldest).turn_away()
        talker = self._health_alone[connection] = _HealthAlone(connection.transport)
        connection.limit(HEALTH_TIMEOUT_S, talker.turn_away)
        return talker

    def forget(self, connection: _Connection) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(connection.transport, None)
        self._health_alone.pop(connection, None)

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, else the one with the slowest body, if it is overdue."""
        now = asyncio.get_running_loop().time()
        for phase, patience_s in ((_Phase.WAITING, SILENT_S), (_Phase.BODY, SLOW_S)):
            those = [one for one in self._connections.values() if one.phase is phase and now - one.since >= patience_s]
            if those:
                last = min(those, key=lambda one: one.since)
                self.forget(last)
                last.transport.abort()
                return

    @web.middleware
    async def _watched(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = None if request.transport is None else self._connections.get(request.transport)
        if connection is None:
            return await handler(request)
        connection.enter(_Phase.BODY)
        try:
            return await handler(request)
        finally:
            connection.enter(_Phase.WAITING)

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Health is open to everybody; anything else needs the token, if one is set."""
        if self._token is not None and request.path not in HEALTH:
            shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(shown, f"Bearer {self._token}".encode(errors="surrogateescape")):
                raise web.HTTPUnauthorized(text="this server wants a token: Authorization: Bearer TOKEN")
        return await handler(request)

    # --------------------------------------------------------------------------------------------- the protocol

    def _routes(self) -> list[web.RouteDef]:
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        return [
            web.get("/v2", self._server_metadata),
            web.get("/metrics", self._metrics),
            web.post("/v2/repository/index", self._index),
            *(web.post(f"/v2/repository/models/{{model}}/{what}", self._fixed) for what in ("load", "unload")),
            web.get("/v2/models/stats", self._statistics),
            *(web.get(f"{model}/stats", self._statistics) for model in models),
            *(web.get(path, self._health) for path in HEALTH),
            *(web.get(model, self._model_metadata) for model in models),
            *(web.get(f"{model}/ready", self._model_ready) for model in models),
            *(web.get(f"{model}/config", self._model_config) for model in models),
            *(web.post(f"{model}/infer", self._infer) for model in models),
        ]

    async def _server_metadata(self, _: web.Request) -> web.Response:
        extensions = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
        return _json({"name": "fedge", "version": fedge.__version__, "extensions": extensions})

    async def _health(self, request: web.Request) -> web.Response:
        return _json(dict(HEALTH[request.path]))

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            from deploy.metrics import metrics
            from fedge.openmetrics import exposition
        except ModuleNotFoundError as error:
            raise web.HTTPNotImplemented(
                text="/metrics needs prometheus-client: pip install 'fedge[metrics]'"
            ) from error
        known = metrics(list(self._models.values()), len(self._connections), self._turned_away)
        text, content_type = exposition(known, request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _index(self, _: web.Request) -> web.Response:
        return _json(
            [
                {"name": name, "version": protocol.version(model.manifest), "state": "READY", "reason": ""}
                for name, model in self._models.items()
            ]
        )

    async def _fixed(self, request: web.Request) -> web.Response:
        name = self._model(request).name
        raise ConfigError(f"{name} is served as long as the server runs; another bundle comes by `fedge install`")

    async def _statistics(self, request: web.Request) -> web.Response:
        models = [self._model(request)] if "model" in request.match_info else list(self._models.values())
        told = [
            {"name": model.name, "version": protocol.version(model.manifest), **model.statistics.told()}
            for model in models
        ]
        return _json({"model_stats": told})

    async def _model_metadata(self, request: web.Request) -> web.Response:
        model = self._model(request)
        return _json(protocol.metadata(model.name, model.manifest))

    async def _model_config(self, request: web.Request) -> web.Response:
        model = self._model(request)
        return _json(protocol.configuration(model.name, model.manifest))

    async def _model_ready(self, request: web.Request) -> web.Response:
        return _json({"name": self._model(request).name, "ready": True})

    async def _infer(self, request: web.Request) -> web.Response:
        model = self._model(request)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body took longer than {BODY_TIMEOUT_S:g} s") from error
        if request.transport in self._connections:
            self._connections[request.transport].enter(_Phase.WORK)
        response = await model.infer(body, _header_length(request))
        if response.header_bytes is None:
            return web.Response(body=response.body, content_type="application/json")
        return web.Response(
            body=response.body,
            content_type="application/octet-stream",
            headers={HEADER_LENGTH: str(response.header_bytes)},
        )

    def _model(self, request: web.Request) -> Served:
        """The model that the path names, in its serving version."""
        name, version = request.match_info["model"], request.match_info.get("version")
        model = self._models.get(name)
        if model is None:
            raise web.HTTPNotFound(text=f"there is no model {name[:100]}; there are {', '.join(self._models)}")
        now = protocol.version(model.manifest)
        if version not in {None, now}:
            raise web.HTTPNotFound(text=f"model {name} has the version {now} alone, not {version}"[:200])
        return model


def _header_length(request: web.Request) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"the header {HEADER_LENGTH} must be the number of bytes of the JSON object")
    return int(text)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def _errors(  # noqa: PLR0911 - one for each kind
    request: web.Request, handler: Handler
) -> web.StreamResponse:
    """Answer errors with {"error": ...}."""
    try:
        return await handler(request)
    except ConfigError as error:
        return _json({"error": str(error)}, 400)
    except web.RequestPayloadError as error:
        response = _json({"error": f"the body cannot be read: {' '.join(str(error).split())}"}, 400)
        response.force_close()
        return response
    except BusyError as error:
        return _json({"error": str(error)}, 503, {"Retry-After": "1"})
    except web.HTTPException as error:
        response = _json({"error": _text(error, request)}, error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        if error.status == web.HTTPUnauthorized.status_code:
            response.headers["WWW-Authenticate"] = "Bearer"
        if error.status in {401, 408, 413}:
            response.force_close()  # the rest of the body is not needed
        return response
    except ConnectionError as error:
        log.info("event=client_gone path=%r reason=%r", request.path, str(error))
        return web.Response(status=400)  # aiohttp notices that the client is gone
    except Exception:
        log.exception("event=request_failed path=%r", request.path)
        return _json({"error": "the model failed; the server's log says why"}, 500)


def _text(error: web.HTTPException, request: web.Request) -> str:
    match error:
        case web.HTTPMethodNotAllowed():
            return f"{error.method} is not for {request.path}; use {' or '.join(sorted(error.allowed_methods))}"
        case web.HTTPRequestEntityTooLarge():
            return f"the body is too large: {error.text}; send fewer samples in a request"
        case web.HTTPNotFound() if error.text == f"{error.status}: {error.reason}":
            return f"there is nothing at {request.path}; models are below /v2/models/"[:300]
        case _:
            return error.text or error.reason


class _Phase(Enum):
    WAITING = auto()  # for a request
    BODY = auto()  # receiving the body
    WORK = auto()  # computing the answer


class _Connection(asyncio.Protocol):
    """A client's connection, handed to the protocol that serves it.

    Places are counted on connect: several connections are accepted at once, before any of them is known.
    """

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.phase, self.since = _Phase.WAITING, self._loop.time()
        self._deadline: asyncio.TimerHandle | None = None

    def limit(self, seconds: float, then: Callable[[], None]) -> None:
        """Set the time limit for a first request, and what happens when it expires."""
        self._deadline = self._loop.call_later(seconds, then)

    def enter(self, phase: _Phase) -> None:
        """Enter a phase: request received, body received, or answered."""
        self.phase, self.since = phase, self._loop.time()
        self._no_deadline()

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._talker = self._server.admit(self)
        self._talker.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_deadline()
        self._server.forget(self)
        self._talker.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._talker.data_received(data)

    def eof_received(self) -> bool | None:
        return self._talker.eof_received()

    def pause_writing(self) -> None:
        self._talker.pause_writing()

    def resume_writing(self) -> None:
        self._talker.resume_writing()


def _last_words(status: bytes, content: dict[str, Any]) -> bytes:
    """A final response, after which the connection closes."""
    body = msgspec.json.encode(content)
    return (
        b"HTTP/1.1 %b\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (status, len(body), body)
    )


TOO_MANY: Final = _last_words(b"503 Service Unavailable", {"error": "too many connections; try again in a second"})


class _HealthAlone(asyncio.Protocol):
    """On a place reserved for health: answers one request, by its first line."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._line = b""

    def data_received(self, data: bytes) -> None:
        self._line += data[:200]
        if b"\n" not in self._line and len(self._line) < 200:
            return
        method, _, rest = self._line.partition(b" ")
        health = HEALTH.get(rest.partition(b" ")[0].decode("latin-1")) if method == b"GET" else None
        self._end(TOO_MANY if health is None else _last_words(b"200 OK", dict(health)))

    def turn_away(self) -> None:
        self._end(TOO_MANY)

    def _end(self, words: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(words)
            self._transport.close()
