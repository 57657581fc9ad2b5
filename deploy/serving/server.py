"""The Open Inference Protocol over HTTP, with aiohttp. Any input gets a JSON answer, and none brings the server down.

Memory in the worst case, per process: `fedge.wire.port.MAX_CONNECTIONS` bodies of `max_body_bytes` being received, the
queue of each model (`deploy.serving.batching`), and one JSON request being parsed, which takes about ten times its
size.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Iterable
from typing import Final, Self

import msgspec
from aiohttp import web

import fedge
from deploy.serving import protocol
from deploy.serving.batching import BusyError
from deploy.serving.endpoints import ServedModel
from fedge.errors import ConfigError, StoreError
from fedge.system.logs import Lines
from fedge.wire.port import Handler, Port

log = logging.getLogger("fedge.deploy")

MAX_BODY_BYTES: Final = 8 << 20
"""Default limit on a body; it fits a batch of 13 colour pictures of 224 x 224 as FP32."""
BODY_TIMEOUT_S: Final = 30.0
"""Time limit for a body, so that a slow client cannot hold its connection."""
DRAIN_S: Final = 10.0
"""Time limit for pending requests when the server is stopped."""
HEALTH: Final = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
HEADER_LENGTH: Final = "Inference-Header-Content-Length"


class Server:
    """A server of models on a port. Async context manager: it listens inside, and answers pending requests on exit."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        tls: ssl.SSLContext | None = None,
        token: str | None = None,
    ) -> None:
        """Make a server. With port 0 the system chooses a free one (`url`). All but health checks need the token."""
        self._models = {model.name: model for model in models}
        self._port = Port(host, port, tls=tls, health=HEALTH)
        self._token = token
        self._lines = Lines()
        self._app = web.Application(
            middlewares=[self._port.watch_request, self._handle_errors, self._require_token],
            client_max_size=max_body_bytes,
        )
        self._app.add_routes(self._make_routes())

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self._port.url

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            TransportError: the port is taken, or the host is not an address of this machine.
        """
        await self._port.open(self._app, drain_s=DRAIN_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._port.close()

    @web.middleware
    async def _handle_errors(  # noqa: PLR0911 - one for each kind
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Turn exceptions into responses {"error": ...}."""
        try:
            return await handler(request)
        except ConfigError as error:
            return _make_json({"error": str(error)}, 400)
        except web.RequestPayloadError as error:
            response = _make_json({"error": f"the body cannot be read: {' '.join(str(error).split())}"}, 400)
            response.force_close()
            return response
        except StoreError as error:
            self._lines.log(log, logging.ERROR, "event=not_stored path=%r reason=%r", request.path, str(error))
            return _make_json({"error": f"nothing is stored: {error}"}, 507)
        except BusyError as error:
            return _make_json({"error": str(error)}, 503, {"Retry-After": "1"})
        except web.HTTPException as error:
            response = _make_json({"error": _describe_error(error, request)}, error.status)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
            if error.status == web.HTTPUnauthorized.status_code:
                response.headers["WWW-Authenticate"] = "Bearer"
            if error.status in {401, 408, 413}:
                response.force_close()  # the rest of the body is not needed
            return response
        except ConnectionError as error:
            self._lines.log(log, logging.INFO, "event=client_gone path=%r reason=%r", request.path, str(error))
            return web.Response(status=400)  # aiohttp notices that the client is gone
        except Exception:  # noqa: BLE001 - it is logged
            self._lines.log(log, logging.ERROR, "event=request_failed path=%r", request.path, traceback=True)
            return _make_json({"error": "the model failed; the server's log says why"}, 500)

    @web.middleware
    async def _require_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the token, if one is set; health checks need none."""
        if self._token is not None and request.path not in HEALTH:
            shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(shown, f"Bearer {self._token}".encode(errors="surrogateescape")):
                raise web.HTTPUnauthorized(text="this server wants a token: Authorization: Bearer TOKEN")
        return await handler(request)

    # --------------------------------------------------------------------------------------------- the protocol

    def _make_routes(self) -> list[web.RouteDef]:
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        return [
            web.get("/v2", self._answer_metadata),
            web.get("/metrics", self._answer_metrics),
            web.post("/v2/repository/index", self._answer_index),
            *(web.post(f"/v2/repository/models/{{model}}/{what}", self._refuse_change) for what in ("load", "unload")),
            web.get("/v2/models/stats", self._answer_statistics),
            *(web.get(f"{model}/stats", self._answer_statistics) for model in models),
            *(web.get(path, self._answer_health) for path in HEALTH),
            *(web.get(model, self._answer_model_metadata) for model in models),
            *(web.get(f"{model}/ready", self._answer_model_ready) for model in models),
            *(web.get(f"{model}/config", self._answer_model_config) for model in models),
            *(web.post(f"{model}/infer", self._infer) for model in models),
            *(web.post(f"{model}/feedback", self._take_feedback) for model in models),
        ]

    async def _answer_metadata(self, _: web.Request) -> web.Response:
        extensions = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
        return _make_json({"name": "fedge", "version": fedge.__version__, "extensions": extensions})

    async def _answer_health(self, request: web.Request) -> web.Response:
        return _make_json(dict(HEALTH[request.path]))

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        try:
            from deploy.serving.metrics import collect_metrics
            from fedge.wire.openmetrics import format_metrics
        except ModuleNotFoundError as error:
            raise web.HTTPNotImplemented(
                text="/metrics needs prometheus-client: pip install 'fedge[metrics]'"
            ) from error
        labelled = {name: await model.count_answers() for name, model in self._models.items()}
        known = collect_metrics(
            list(self._models.values()), labelled, len(self._port.connections), self._port.turned_away
        )
        text, content_type = format_metrics(known, request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _answer_index(self, _: web.Request) -> web.Response:
        return _make_json(
            [
                {"name": name, "version": protocol.get_version(model.manifest), "state": "READY", "reason": ""}
                for name, model in self._models.items()
            ]
        )

    async def _refuse_change(self, request: web.Request) -> web.Response:
        name = self._find_model(request).name
        raise ConfigError(f"{name} is served as long as the server runs; another bundle comes by `fedge install`")

    async def _answer_statistics(self, request: web.Request) -> web.Response:
        models = [self._find_model(request)] if "model" in request.match_info else list(self._models.values())
        statistics = [
            {"name": model.name, "version": protocol.get_version(model.manifest), **model.statistics.to_triton()}
            for model in models
        ]
        return _make_json({"model_stats": statistics})

    async def _answer_model_metadata(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        return _make_json(protocol.make_metadata(model.name, model.manifest, sets=model.has_sets))

    async def _answer_model_config(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        return _make_json(protocol.make_configuration(model.name, model.manifest, sets=model.has_sets))

    async def _answer_model_ready(self, request: web.Request) -> web.Response:
        return _make_json({"name": self._find_model(request).name, "ready": True})

    async def _read_body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body took longer than {BODY_TIMEOUT_S:g} s") from error
        self._port.record_body(request)
        return body

    async def _take_feedback(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        response = await model.learn(await self._read_body(request), _parse_header_length(request))
        return web.Response(body=response.body, content_type="application/json")

    async def _infer(self, request: web.Request) -> web.Response:
        model = self._find_model(request)
        response = await model.infer(await self._read_body(request), _parse_header_length(request))
        if response.header_bytes is None:
            return web.Response(body=response.body, content_type="application/json")
        return web.Response(
            body=response.body,
            content_type="application/octet-stream",
            headers={HEADER_LENGTH: str(response.header_bytes)},
        )

    def _find_model(self, request: web.Request) -> ServedModel:
        """Return the model that the path names, after a check of the version."""
        name, version = request.match_info["model"], request.match_info.get("version")
        model = self._models.get(name)
        if model is None:
            raise web.HTTPNotFound(text=f"there is no model {name[:100]}; there are {', '.join(self._models)}")
        now = protocol.get_version(model.manifest)
        if version not in {None, now}:
            raise web.HTTPNotFound(text=f"model {name} has the version {now} alone, not {version}"[:200])
        return model


def _parse_header_length(request: web.Request) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"the header {HEADER_LENGTH} must be the number of bytes of the JSON object")
    return int(text)


def _make_json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


def _describe_error(error: web.HTTPException, request: web.Request) -> str:
    match error:
        case web.HTTPMethodNotAllowed():
            return f"{error.method} is not for {request.path}; use {' or '.join(sorted(error.allowed_methods))}"
        case web.HTTPRequestEntityTooLarge():
            return f"the body is too large: {error.text}; send fewer samples in a request"
        case web.HTTPNotFound() if error.text == f"{error.status}: {error.reason}":
            return f"there is nothing at {request.path}; models are below /v2/models/"[:300]
        case _:
            return error.text or error.reason
