"""The fleet's page, with aiohttp: a live view of `coordinator.watch`, and requests to the coordinator.

Users who may act show the token once and are then identified by a cookie, or have a certificate of the federation
(`coordinator.page.certificates`). Each action also carries a word that only our own page has, so that no other page in
the same browser can request an action. If the page listens on another address than this machine's own, or is asked for
by another name (a website can make its own name mean 127.0.0.1), reading needs the token, too. Reads happen in a thread
with a connection of its own, so a round never waits for them. Open pages share what is read: the state is made once for
all of them between two looks for news, and so are the lines of the stream.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec
from aiohttp import web

from coordinator.page.answers import HEADERS, answer_json, read_number
from coordinator.page.certificates import Certificates
from coordinator.page.differences import Differences
from coordinator.page.home_assistant import parse_broker, publish_devices
from coordinator.page.logins import Logins, is_same
from coordinator.page.metrics import iterate_metrics
from coordinator.page.news import MAX_STREAMS, NewsFeed
from coordinator.page.view import TABLES, make_series, make_tables
from coordinator.rollout.overview import Overview
from coordinator.store.requests import ACTIONS, request_action
from coordinator.store.store import Store
from coordinator.watch.state import Watch
from coordinator.watch.words import make_event_values
from fedge.errors import ConfigError, StoreError, TransportError
from fedge.system.text import format_address
from fedge.wire.openmetrics import format_metrics
from fedge.wire.port import MAX_CONNECTIONS, Handler, Port

log = logging.getLogger("fedge.ui")

BROWSER: Final = Path(__file__).parent / "browser"
KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES: Final = {file.name: file for file in sorted(BROWSER.iterdir()) if file.suffix in KINDS}
FILES[""] = FILES.pop("page.html")
EVENT_KINDS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "all": ((), ("answer",)),
    "problems": (("problem", "closed", "second_coordinator", "recluster_refused"), ()),
    "rounds": (("round_begun", "round_done", "waiting", "paused", "resumed", "recluster", "chosen", "asked"), ()),
    "devices": (("device", "problem", "closed"), ()),
    "answers": (("answer", "closed"), ()),
}
"""Kinds of events: names that belong to it, all if empty, and names that do not. A round's row counts its answers."""
MAX_LINES: Final = 60
"""Most devices whose accuracy over the rounds is sent at once."""
ROLLOUT: Final = "rollout-"
"""Prefix of the names of actions on a rollout."""
MAX_BODY_BYTES: Final = 4096
DRAIN_S: Final = 1.0
"""Time for pending requests when the page ends."""
T = TypeVar("T")


class ActionTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target of an action: a device, or a rollout by its repository's name (`Overview.request_action`)."""

    device: str = ""
    rollout: str = ""
    target: str = ""
    stages: str = ""
    canary: str = ""


class Page:
    """The page on a port. As an async context manager, it listens.

    Args:
        home: the coordinator's home.
        opened: opens the coordinator's store, for reading and for requests to the coordinator.
        host, port: address to listen on; port 0 is any free port.
        token: required to act.
        tls: context for HTTPS.
        rollouts: rollouts to show, which are open to actions.
        certificates: the certificates by which the federation's members log in.
        home_assistant: address of the broker that receives the devices' state.
    """

    def __init__(
        self,
        home: Path,
        opened: Callable[[], Store],
        *,
        host: str,
        port: int,
        token: str,
        tls: ssl.SSLContext | None = None,
        rollouts: Overview | None = None,
        certificates: Certificates | None = None,
        home_assistant: str | None = None,
    ) -> None:
        self._home, self._opened = home, opened
        self._host, self._port = host, Port(host, port, tls=tls, places=MAX_STREAMS + MAX_CONNECTIONS)
        self._logins = Logins(host, token, secure=tls is not None, certificates=certificates)
        self._home_assistant = home_assistant
        if home_assistant is not None:
            parse_broker(home_assistant)
        self._rollouts = rollouts or Overview([], None)
        self._news = NewsFeed(
            self._read, self._find_last_event, self._rollouts.get_version, self._forget_state, self._logins
        )
        self._thread = ThreadPoolExecutor(1, "fedge-ui")
        self._differences = Differences(*TABLES)
        self._devices: list[dict[str, Any]] = []  # of the last state
        self._is_fresh = False  # whether the state was read since the last look
        self._tasks: list[asyncio.Task[None]] = []
        self._app = web.Application(
            middlewares=[self._port.watch_request, self._guard_request], client_max_size=MAX_BODY_BYTES
        )
        self._app.add_routes(
            [
                *(web.get(f"/{name}", self._handle_file) for name in FILES),
                web.get("/metrics", self._handle_metrics),
                web.get("/api/session", self._logins.answer_session),
                web.post("/api/login", self._logins.log_in),
                web.post("/api/logout", self._logins.log_out),
                web.get("/api/state", self._handle_state),
                web.get("/api/accuracy", self._handle_accuracy),
                web.get("/api/devices/{id}", self._handle_device),
                web.get("/api/rounds/{round:\\d{1,9}}", self._handle_round),
                web.get("/api/rollouts", self._handle_rollouts),
                web.get("/api/events", self._handle_events),
                web.get("/api/stream", self._news.stream),
                web.post("/api/actions/{name}", self._handle_action),
            ]
        )

    async def __aenter__(self) -> Self:
        """Listen for requests.

        Raises:
            TransportError: the port is taken, or the host is not an address of this machine.
        """
        await self._read(self._open)
        try:
            await self._port.open(self._app, drain_s=DRAIN_S)
        except TransportError:
            await self._read(self._store.close)
            self._thread.shutdown()
            raise
        if self._port.tls is None and not self._logins.reading_is_free:
            reason = "the token goes over the network in clear: give a certificate (http_cert_file)"
            log.warning("event=page_in_clear url=%s reason=%r", self.url, reason)
        self._tasks = [asyncio.create_task(self._news.publish_new())]
        if self._home_assistant is not None:
            state = await self._read(self._watch.get_state)
            publishing = publish_devices(
                lambda: self._read(self._watch.get_state), self._home_assistant, state["federation"]
            )
            self._tasks.append(asyncio.create_task(publishing))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._news.close()
        await self._port.close()
        await self._read(self._store.close)
        self._thread.shutdown()

    @property
    def url(self) -> str:
        """The URL of the page."""
        where = format_address(self._host, self._port.number)
        return f"{'http' if self._port.tls is None else 'https'}://{where}/"

    def _open(self) -> None:
        self._store = self._opened()
        self._watch = Watch(self._home, self._store)

    async def _read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _answer_read(self, work: Callable[[], Any]) -> web.Response:
        """Read and encode in the reading thread, and answer with the result."""
        return answer_json(await self._read(lambda: msgspec.json.encode(work())))

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Add headers, turn errors into JSON, and require logins."""
        try:
            public = request.path in {"/api/session", "/api/login", *(f"/{name}" for name in FILES)}
            if not (public or self._logins.may_read(request)):
                raise web.HTTPUnauthorized(text="log in first")
            answer = await handler(request)
        except web.HTTPException as error:
            answer = web.json_response({"error": error.text or error.reason}, status=error.status)
        except web.RequestPayloadError as error:
            answer = web.json_response(
                {"error": f"the body cannot be read: {' '.join(str(error).split())}"}, status=400
            )
            answer.force_close()
        except (ConfigError, StoreError, msgspec.MsgspecError) as error:
            answer = web.json_response({"error": str(error)}, status=400)
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    # ---------------------------------------------------------------------------------------------------- what there is

    async def _handle_file(self, request: web.Request) -> web.Response:
        file = FILES[request.path[1:]]
        answer = web.Response(body=file.read_bytes(), content_type=KINDS[file.suffix], charset="utf-8")
        answer.enable_compression()
        return answer

    async def _handle_metrics(self, request: web.Request) -> web.Response:
        body, kind = await self._read(
            lambda: format_metrics(iterate_metrics(self._watch.get_state()), request.headers.get("Accept", ""))
        )
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _handle_state(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "")

        def encode() -> bytes:
            self._refresh_state()
            return self._differences.encode_since(since)

        return answer_json(await self._read(encode))

    async def _handle_accuracy(self, request: web.Request) -> web.Response:
        names = request.query.get("of", "").split(",")[:MAX_LINES]

        def describe() -> dict[str, Any]:
            self._refresh_state()
            return make_series(self._devices, names)

        return await self._answer_read(describe)

    def _refresh_state(self) -> None:
        """Read the state, unless that was done since the last look for news."""
        if self._is_fresh and self._news.heard:  # otherwise nobody would be told that there is something newer
            return
        state = self._watch.get_state()
        self._devices = state["devices"]
        self._differences.update(make_tables(state))
        self._is_fresh = True

    def _forget_state(self) -> None:
        self._is_fresh = False

    def _find_last_event(self) -> int:
        last = self._store.get_events(last=1)
        return last[0].number if last else 0

    async def _handle_device(self, request: web.Request) -> web.Response:
        i = request.match_info["id"]

        def describe() -> dict[str, Any]:
            self._refresh_state()
            points: Any = next((device["accuracy"] for device in self._devices if device["id"] == i), [])
            return self._watch.describe_device(i) | {"accuracy": points}

        return await self._answer_read(describe)

    async def _handle_round(self, request: web.Request) -> web.Response:
        return await self._answer_read(lambda: self._watch.describe_round(int(request.match_info["round"])))

    async def _handle_rollouts(self, _request: web.Request) -> web.Response:
        return web.json_response({"rollouts": await asyncio.to_thread(self._rollouts.list_states)})

    async def _handle_events(self, request: web.Request) -> web.Response:
        """Answer events by number: the last ones, the last ones before one, or all after one.

        Of a kind (`EVENT_KINDS`), a device, or a round.
        """
        last = read_number(request, "last", 300, 1000)
        after, before = (read_number(request, name, 0, 1 << 62) for name in ("after", "before"))
        device = request.query.get("device") or None
        number = read_number(request, "round", 0, 1 << 30) if request.query.get("round") else None
        names, but = EVENT_KINDS.get(request.query.get("kind", "all"), ((), ()))
        if device is not None or number is not None:
            but = ()  # few enough
        read = partial(self._store.get_events, device=device, round=number, names=names, but=but)
        return await self._answer_read(
            lambda: {
                "events": [make_event_values(event) for event in read(last=last, after=after, before=before or None)]
            }
        )

    # ------------------------------------------------------------------------------------------------------- actions

    async def _handle_action(self, request: web.Request) -> web.Response:
        login = self._logins.find_login(request)
        if login is None:
            raise web.HTTPUnauthorized(text="log in first")
        if not login.may_act:
            raise web.HTTPForbidden(text=f"{login.name} may look, and not act")
        if not is_same(request.headers.get("X-Fedge-Token", ""), login.word):
            raise web.HTTPForbidden(text="this request does not come from the fleet's page")
        name = request.match_info["name"]
        about = msgspec.json.decode(await request.read(), type=ActionTarget)
        if name.startswith(ROLLOUT):
            asked = partial(self._rollouts.request_action, about.rollout, name.removeprefix(ROLLOUT))
            text = await asyncio.to_thread(asked, about.target, about.stages, about.canary)
        elif name in ACTIONS:
            text = await self._read(lambda: request_action(self._store, name, about.device))
            self._forget_state()
        else:
            raise web.HTTPNotFound(text=f"there is no action {name!r}")
        about_what = about.device or about.rollout
        log.info("event=action name=%s about=%r by=%s address=%s", name, about_what, login.name, request.remote)
        return web.json_response({"text": text})
