"""The Open Inference Protocol over HTTP, by aiohttp. Whatever comes in, it answers with JSON and stays up.

Limits, worst case per process: `MAX_CONNECTIONS` bodies of `max_body_bytes` that are being received, the queue of each
model (`deploy.batching`), and one request in JSON that is being parsed (about ten times its size).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
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
BODY_TIMEOUT_S: Final = 30.0
"""For a body to come in whole; a client that trickles holds a connection no longer."""
IDLE_TIMEOUT_S: Final = 30.0
"""For the head of a request, and between requests."""
LINGER_S: Final = 1.0
"""For the rest of a body that was refused: closed at once, many a client would not see why."""
DRAIN_S: Final = 10.0
"""For what has been asked when the server is stopped."""
HEADER_LENGTH: Final = "Inference-Header-Content-Length"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Models behind a port. Async context manager: it listens inside, and answers what was asked before it leaves."""

    def __init__(
        self,
        models: Iterable[Served],
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        body_timeout_s: float = BODY_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`port` 0: a free one; `url` says which."""
        self._models = {model.name: model for model in models}
        self._address = (host, port)
        self._max_connections = max_connections
        self._body_timeout_s = body_timeout_s
        app = web.Application(middlewares=[_errors], client_max_size=max_body_bytes)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=idle_timeout_s,
            lingering_time=LINGER_S,
            shutdown_timeout=DRAIN_S,
        )
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            TransportError: the port is taken, or the host is none of this machine.
        """
        await self._runner.setup()
        host, port = self._address
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._connection, host, port, backlog=128)
        except OSError as error:
            await self._runner.cleanup()
            raise TransportError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        """What talks to a new client."""
        server = self._runner.server
        assert server is not None
        return _TurnedAway() if len(server.connections) >= self._max_connections else server()

    # --------------------------------------------------------------------------------------------- the protocol

    def _routes(self) -> list[web.RouteDef]:
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        return [
            web.get("/v2", self._server_metadata),
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
            *(web.get(model, self._model_metadata) for model in models),
            *(web.get(f"{model}/ready", self._model_ready) for model in models),
            *(web.get(f"{model}/config", self._model_config) for model in models),
            *(web.post(f"{model}/infer", self._infer) for model in models),
        ]

    async def _server_metadata(self, _: web.Request) -> web.Response:
        extensions = ["binary_tensor_data", "model_configuration"]
        return _json({"name": "fedge", "version": fedge.__version__, "extensions": extensions})

    async def _live(self, _: web.Request) -> web.Response:
        return _json({"live": True})

    async def _ready(self, _: web.Request) -> web.Response:
        return _json({"ready": True})

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
            async with asyncio.timeout(self._body_timeout_s):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body took longer than {self._body_timeout_s:g} s") from error
        response = await model.infer(body, _header_length(request))
        if response.header_bytes is None:
            return web.Response(body=response.body, content_type="application/json")
        return web.Response(
            body=response.body,
            content_type="application/octet-stream",
            headers={HEADER_LENGTH: str(response.header_bytes)},
        )

    def _model(self, request: web.Request) -> Served:
        """The model that the path names, in the version that answers."""
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


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What went wrong, as {"error": ...}."""
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
        if error.status in {408, 413}:
            response.force_close()  # the rest of the body is not wanted
        return response
    except ConnectionError:
        raise
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


class _TurnedAway(asyncio.Protocol):
    """A client too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = b'{"error":"too many connections; try again in a second"}'
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        transport.close()
