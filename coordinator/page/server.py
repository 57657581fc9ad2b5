"""The fleet's page, with aiohttp: a live view of `coordinator.watch`, and requests to the coordinator.

Who may act shows the token once and is then known by a cookie, or has a certificate of the federation
(`coordinator.page.certificates`); each action also carries a word that only our own page has, so that no other page in
the same browser can have one done. On another address than this machine's own, or asked for by another name (a website
can have its own mean 127.0.0.1), reading takes the token, too. Reads happen in a thread with a connection of its own: a
round never waits for them. Open pages share what is read: the state is made once for all of them between two looks for
news, and so are the lines of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import secrets
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Self, TypeVar

import msgspec
from aiohttp import web

from coordinator.page.certificates import Certificates, Login
from coordinator.page.home_assistant import broker_of, tell
from coordinator.page.metrics import metrics
from coordinator.rollout.overview import Overview
from coordinator.store.requests import ACTIONS, act
from coordinator.store.store import Event, Store
from coordinator.watch.state import Watch, told
from fedge.errors import ConfigError, StoreError, TransportError
from fedge.system.files import write_atomically
from fedge.system.logs import Lines
from fedge.system.text import host_and_port
from fedge.wire.openmetrics import exposition
from fedge.wire.port import MAX_CONNECTIONS, Handler, Port

log = logging.getLogger("fedge.ui")

HERE: Final = Path(__file__).parent
FILES: Final = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
COOKIE: Final = "fedge"
ROLLOUT: Final = "rollout-"
"""Begins the names of actions on a rollout."""
LOOK_S: Final = 0.5
"""Pause between two looks for news."""
SESSION_S: Final = 12 * 3600.0
"""Who has logged in may act so long."""
MAX_SESSIONS: Final = 100
MAX_STREAMS: Final = 50
"""Pages that are told of news at the same time."""
HEARTBEAT_S: Final = 10.0
"""A page that listens hears something at least so often."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES: Final = 4096
WRONG_S: Final = 1.0
"""A wrong token is answered so late."""
MAX_WRONG: Final = 10
"""Wrong tokens that wait for that at a time; more are refused at once, so that they hold no places."""
DRAIN_S: Final = 1.0
"""Time for pending requests when the page ends."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MAX_NEWS: Final = 1000
"""Events that a page is told of at once; of more, the last ones."""
MAX_BEHIND: Final = 100
"""Looks with news that wait for a page; one that takes nothing for longer misses the next ones."""
T = TypeVar("T")
News = list[tuple[int, bytes]]
"""Events by number, as lines of the stream; empty: of a rollout, or of times."""


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target of an action: a device, or a rollout by the name of its repository (`Overview.ask`)."""

    device: str = ""
    rollout: str = ""
    target: str = ""
    stages: str = ""
    canary: str = ""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The token in a login."""

    token: str


def token_of(home: Path, given: str | None) -> str:
    """The given token, or that in HOME/ui-token, which is created if missing."""
    if given is not None:
        return given
    file = home / "ui-token"
    if not file.exists():
        write_atomically(file, secrets.token_hex(16).encode())
    return file.read_text().strip()


class Page:
    """The page on a port. Async context manager: it listens inside.

    Args:
        home: of the coordinator.
        opened: opens its store, for reading and for requests to the coordinator.
        host, port: where to listen; port 0: a free one.
        token: required to act.
        tls: for HTTPS.
        rollouts: shown, and open to actions.
        certificates: for logins of the federation's members.
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
        self._token = token
        self._certificates = certificates
        self._home_assistant = home_assistant
        if home_assistant is not None:
            broker_of(home_assistant)
        self._rollouts = rollouts or Overview([], None)
        self._reading_is_free = _is_local(host)
        self._sessions: dict[str, tuple[str, float]] = {}  # cookie -> secret against forged requests, expiry
        self._thread = ThreadPoolExecutor(1, "fedge-ui")
        self._n_wrong = 0  # logins with a wrong token that wait for their answer
        self._lines = Lines()
        self._streams: dict[asyncio.Queue[News | None], bool] = {}  # whether it has logged in; the oldest first
        self._seen: bytes | None = None  # the state since the last look, if somebody has asked for it
        self._sent = 0  # number of the last event that streams were told of
        self._tasks: list[asyncio.Task[None]] = []
        self._app = web.Application(middlewares=[self._port.watched, self._guarded], client_max_size=MAX_BODY_BYTES)
        self._app.add_routes(
            [
                *(web.get(f"/{name}", self._file) for name in FILES),
                web.get("/metrics", self._metrics),
                web.get("/api/session", self._session),
                web.post("/api/login", self._login),
                web.get("/api/state", self._state),
                web.get("/api/devices/{id}", self._device),
                web.get("/api/rounds/{round:\\d{1,9}}", self._round),
                web.get("/api/rollouts", self._rollouts_of),
                web.get("/api/events", self._events),
                web.get("/api/stream", self._stream),
                web.post("/api/actions/{name}", self._act),
            ]
        )

    async def __aenter__(self) -> Self:
        """Listen.

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
        if self._port.tls is None and not self._reading_is_free:
            reason = "the token goes over the network in clear: give a certificate (http_cert_file)"
            log.warning("event=page_in_clear url=%s reason=%r", self.url, reason)
        self._tasks = [asyncio.create_task(self._look())]
        if self._home_assistant is not None:
            state = await self._read(self._watch.state)
            told = tell(lambda: self._read(self._watch.state), self._home_assistant, state["federation"])
            self._tasks.append(asyncio.create_task(told))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._streams:
            queue.put_nowait(None)
        await self._port.close()
        await self._read(self._store.close)
        self._thread.shutdown()

    @property
    def url(self) -> str:
        """The URL of the page."""
        where = host_and_port(self._host, self._port.number)
        return f"{'http' if self._port.tls is None else 'https'}://{where}/"

    def _open(self) -> None:
        self._store = self._opened()
        self._watch = Watch(self._home, self._store)

    async def _read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _told(self, work: Callable[[], Any]) -> web.Response:
        """Answer with what is read, encoded in the reading thread."""
        return _json(await self._read(lambda: msgspec.json.encode(work())))

    # --------------------------------------------------------------------------------------------------- who may what

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Add headers, turn errors into JSON, and require logins."""
        try:
            public = request.path in {"/api/session", "/api/login", *(f"/{name}" for name in FILES)}
            if not (public or self._may_read(request)):
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

    def _may_read(self, request: web.Request) -> bool:
        return self._is_free(request) or self._login_of(request) is not None or self._bearer(request)

    def _is_free(self, request: web.Request) -> bool:
        """Whether reading takes no login: on this machine, asked for by its own name."""
        name = re.sub(r":\d*\Z", "", request.host.lower()).strip("[]")
        return self._reading_is_free and name in {*LOOPBACK, self._host.lower()}

    def _login_of(self, request: web.Request) -> Login | None:
        """Who asks; None: nobody who has logged in, or too long ago."""
        word, until = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        if time.monotonic() < until:
            return Login(word, may_act=True, name="token")
        return None if self._certificates is None else self._certificates.login_of(request)

    def _bearer(self, request: web.Request) -> bool:
        """Programs such as Prometheus send the token itself."""
        return _is(request.headers.get("Authorization", ""), f"Bearer {self._token}")

    async def _session(self, request: web.Request) -> web.Response:
        login = self._login_of(request)
        may_act = login is not None and login.may_act
        told = {"may_act": may_act, "may_read": self._is_free(request) or login is not None, "login": not may_act}
        return web.json_response(told | {"csrf": login.word if login else ""})

    async def _login(self, request: web.Request) -> web.Response:
        given = msgspec.json.decode(await request.read(), type=Token)
        if not _is(given.token, self._token):
            await self._refuse_login(request)
        now = time.monotonic()
        self._sessions = {k: v for k, v in self._sessions.items() if v[1] > now}
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = (secrets.token_urlsafe(32), now + SESSION_S)
        answer = web.json_response({})
        answer.set_cookie(
            COOKIE, cookie, httponly=True, samesite="Strict", secure=self._port.tls is not None, max_age=int(SESSION_S)
        )
        return answer

    async def _refuse_login(self, request: web.Request) -> NoReturn:
        """Late, but whoever has the token waits for nobody."""
        self._lines.warning(log, "event=login_refused address=%s", request.remote)
        if self._n_wrong >= MAX_WRONG:
            raise web.HTTPTooManyRequests(text="too many wrong tokens come in; try again in a second")
        self._n_wrong += 1
        try:
            await asyncio.sleep(WRONG_S)
        finally:
            self._n_wrong -= 1
        raise web.HTTPForbidden(text="this is not the token")

    # ---------------------------------------------------------------------------------------------------- what there is

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path[1:]]
        return web.Response(body=(HERE / name).read_bytes(), content_type=kind, charset="utf-8")

    async def _metrics(self, request: web.Request) -> web.Response:
        body, kind = await self._read(
            lambda: exposition(metrics(self._watch.state()), request.headers.get("Accept", ""))
        )
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _state(self, _request: web.Request) -> web.Response:
        return _json(await self._read(self._encoded_state))

    def _encoded_state(self) -> bytes:
        if self._seen is None or not self._streams:  # nobody would be told that there is something newer
            self._seen = msgspec.json.encode(self._watch.state())
        return self._seen

    async def _device(self, request: web.Request) -> web.Response:
        return await self._told(lambda: self._watch.device(request.match_info["id"]))

    async def _round(self, request: web.Request) -> web.Response:
        return await self._told(lambda: self._watch.round(int(request.match_info["round"])))

    async def _rollouts_of(self, _request: web.Request) -> web.Response:
        return web.json_response({"rollouts": await asyncio.to_thread(self._rollouts.shown)})

    async def _events(self, request: web.Request) -> web.Response:
        last = _number(request, "last", 300, 1000)
        return await self._told(lambda: {"events": [told(event) for event in self._store.events(last=last)]})

    async def _look(self) -> None:
        """Send news to all listeners."""
        rollouts = self._rollouts.version()
        while True:
            await asyncio.sleep(LOOK_S)
            if rollouts != (rollouts := await asyncio.to_thread(self._rollouts.version)):
                self._send([])
            try:
                new = await self._read(self._news)
            except StoreError as error:
                log.warning("event=cannot_read reason=%r", str(error))
                continue
            if new:
                self._send(new)

    def _news(self) -> News:
        """What has happened since the last look; nothing is read if no page is open."""
        self._seen = None
        new = self._store.events(after=self._sent, last=MAX_NEWS if self._streams else 1)
        self._sent = new[-1].number if new else self._sent
        return _lines(new)

    def _send(self, news: News) -> None:
        for queue in self._streams:
            if queue.qsize() < MAX_BEHIND:
                queue.put_nowait(news)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Stream events as they occur."""
        known = self._login_of(request) is not None or self._bearer(request)
        if len(self._streams) >= MAX_STREAMS:
            self._end_a_stream(known=known)
        last = request.headers.get("Last-Event-ID", "")
        follows = last.isdecimal() and len(last) < 19
        after = int(last) if follows else _number(request, "after", 0, 1 << 62)
        answer = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        queue: asyncio.Queue[News | None] = asyncio.Queue()
        self._streams[queue] = known
        try:
            await answer.prepare(request)
            if missed := await self._read(lambda: _lines(self._store.events(after=after, last=MAX_NEWS))):
                await answer.write(b"".join(line for _, line in missed))
                after, _ = missed[-1]
            while True:
                new: News | None = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        new = await queue.get()
                if new is None or not self._may_read(request):  # who was revoked meanwhile, or logged in too long ago
                    return answer
                if not new:
                    await answer.write(b"event: state\ndata: {}\n\n")
                elif lines := b"".join(line for number, line in new if number > after):
                    await answer.write(lines)
        except ConnectionError:
            return answer
        finally:
            self._streams.pop(queue, None)

    def _end_a_stream(self, *, known: bool) -> None:
        """Make room: the oldest stream of somebody who has not logged in ends, for one who has.

        Raises:
            web.HTTPServiceUnavailable: nobody makes way.
        """
        oldest = next((queue for queue, theirs in self._streams.items() if known and not theirs), None)
        if oldest is None:
            raise web.HTTPServiceUnavailable(text="too many pages are open; who logs in has a place before who has not")
        del self._streams[oldest]
        oldest.put_nowait(None)

    # ------------------------------------------------------------------------------------------------------- actions

    async def _act(self, request: web.Request) -> web.Response:
        login = self._login_of(request)
        if login is None:
            raise web.HTTPUnauthorized(text="log in first")
        if not login.may_act:
            raise web.HTTPForbidden(text=f"{login.name} may look, and not act")
        if not _is(request.headers.get("X-Fedge-Token", ""), login.word):
            raise web.HTTPForbidden(text="this request does not come from the fleet's page")
        name = request.match_info["name"]
        about = msgspec.json.decode(await request.read(), type=Act)
        if name.startswith(ROLLOUT):
            asked = partial(self._rollouts.ask, about.rollout, name.removeprefix(ROLLOUT))
            text = await asyncio.to_thread(asked, about.target, about.stages, about.canary)
        elif name in ACTIONS:
            text = await self._read(lambda: act(self._store, name, about.device))
            self._seen = None
        else:
            raise web.HTTPNotFound(text=f"there is no action {name!r}")
        about_what = about.device or about.rollout
        log.info("event=action name=%s about=%r by=%s address=%s", name, about_what, login.name, request.remote)
        return web.json_response({"text": text})


def _is(shown: str, secret: str) -> bool:
    """Compare without telling by the time how much was right; a header may hold any bytes."""
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), secret.encode(errors="surrogateescape"))


def _lines(events: list[Event]) -> News:
    return [(each.number, b"id: %d\ndata: %b\n\n" % (each.number, msgspec.json.encode(told(each)))) for each in events]


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 20:
        raise web.HTTPBadRequest(text=f"{name} is a number")
    return min(int(text), most)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
