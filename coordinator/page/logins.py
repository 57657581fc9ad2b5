"""Who may read the page, and who may act: the token, logins by it, and certificates."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from aiohttp import web

from coordinator.page.certificates import Certificates, Login
from fedge.system.files import write_atomically
from fedge.system.logs import Lines

log = logging.getLogger("fedge.ui")

COOKIE: Final = "fedge"
SESSION_S: Final = 12 * 3600.0
"""How long somebody who has logged in may act."""
MAX_SESSIONS: Final = 100
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
WRONG_S: Final = 1.0
"""Delay of the answer to a wrong token."""
MAX_WRONG: Final = 10
"""Most wrong tokens whose answers are delayed at a time. Further ones are refused at once, so that they hold no places.
"""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The token in a login."""

    token: str


def read_token(home: Path, given: str | None) -> str:
    """Return the given token, or else that in HOME/ui-token, which is created if missing."""
    if given is not None:
        return given
    file = home / "ui-token"
    if not file.exists():
        write_atomically(file, secrets.token_hex(16).encode())
    return file.read_text().strip()


class Logins:
    """The logins to the page: who asks, and what they may do.

    Args:
        host: the address on which the page listens; on this machine's own address, reading needs no login.
        token: required to act.
        secure: whether connections are encrypted.
        certificates: the certificates by which the federation's members log in.
    """

    def __init__(self, host: str, token: str, *, secure: bool, certificates: Certificates | None) -> None:
        self._host = host.lower()
        self._token = token
        self._secure = secure
        self._certificates = certificates
        self.reading_is_free = _is_local(host)
        self._sessions: dict[str, tuple[str, float]] = {}  # cookie -> secret against forged requests, expiry
        self._n_wrong = 0  # logins with a wrong token that wait for their answer
        self._lines = Lines()

    def may_read(self, request: web.Request) -> bool:
        """Return whether the request may be answered at all."""
        return self._is_free(request) or self.knows(request)

    def _is_free(self, request: web.Request) -> bool:
        """Return whether reading takes no login, because the page is on this machine and asked for by its own name."""
        name = re.sub(r":\d*\Z", "", request.host.lower()).strip("[]")
        return self.reading_is_free and name in {*LOOPBACK, self._host}

    def knows(self, request: web.Request) -> bool:
        """Return whether the request is from somebody who has logged in, or has the token."""
        return self.find_login(request) is not None or self._has_token(request)

    def find_login(self, request: web.Request) -> Login | None:
        """Return the login of the request; None if there is none, or from too long ago."""
        word, until = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        if time.monotonic() < until:
            return Login(word, may_act=True, name="token")
        return None if self._certificates is None else self._certificates.find_login(request)

    def _has_token(self, request: web.Request) -> bool:
        """Return whether the request has the token itself, as programs such as Prometheus send it."""
        return is_same(request.headers.get("Authorization", ""), f"Bearer {self._token}")

    async def answer_session(self, request: web.Request) -> web.Response:
        """Answer who asks, and what they may do."""
        login = self.find_login(request)
        may_act = login is not None and login.may_act
        fields = {"may_act": may_act, "may_read": self._is_free(request) or login is not None, "login": not may_act}
        who = {"csrf": login.word, "name": login.name} if login else {"csrf": "", "name": ""}
        return web.json_response(fields | who | {"logout": login is not None and self._has_session(request)})

    def _has_session(self, request: web.Request) -> bool:
        """Return whether the login is one by the token, which can be ended."""
        return request.cookies.get(COOKIE, "") in self._sessions

    async def log_in(self, request: web.Request) -> web.Response:
        """Log in whoever shows the token."""
        given = msgspec.json.decode(await request.read(), type=Token)
        if not is_same(given.token, self._token):
            await self._refuse_login(request)
        now = time.monotonic()
        self._sessions = {k: v for k, v in self._sessions.items() if v[1] > now}
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = (secrets.token_urlsafe(32), now + SESSION_S)
        answer = web.json_response({})
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="Strict", secure=self._secure, max_age=int(SESSION_S))
        return answer

    async def log_out(self, request: web.Request) -> web.Response:
        """End the login of the request; only our own page knows the word for that.

        Raises:
            web.HTTPForbidden: the request is from another page.
        """
        word, _ = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        if word:
            if not is_same(request.headers.get("X-Fedge-Token", ""), word):
                raise web.HTTPForbidden(text="this request does not come from the fleet's page")
            del self._sessions[request.cookies[COOKIE]]
        answer = web.json_response({})
        answer.del_cookie(COOKIE, httponly=True, samesite="Strict", secure=self._secure)
        return answer

    async def _refuse_login(self, request: web.Request) -> NoReturn:
        """Refuse a login after a delay; logins with the right token are not delayed."""
        self._lines.warning(log, "event=login_refused address=%s", request.remote)
        if self._n_wrong >= MAX_WRONG:
            raise web.HTTPTooManyRequests(text="too many wrong tokens come in; try again in a second")
        self._n_wrong += 1
        try:
            await asyncio.sleep(WRONG_S)
        finally:
            self._n_wrong -= 1
        raise web.HTTPForbidden(text="this is not the token")


def is_same(shown: str, secret: str) -> bool:
    """Return whether two texts are equal, in a time that does not tell how much is; a header may hold any bytes."""
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), secret.encode(errors="surrogateescape"))


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
