"""Logins at the page with a certificate of the federation's authority, in place of the token."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web

from coordinator.provision.members import WatchedMembers
from fedge.errors import ProtocolError
from fedge.identity.authority import Authority
from fedge.identity.names import Role
from fedge.membership.credentials import CA
from fedge.system.logs import Lines

log = logging.getLogger("fedge.ui")

MAY_ACT: Final = {Role.OPERATOR: True, Role.STATUS: False}
"""Roles that may view the page, and whether they may act. Devices and other parts of the server may do neither."""


class Login(NamedTuple):
    """A logged-in user. word: a secret against forged requests, known only to our own page."""

    word: str
    may_act: bool
    name: str


class Certificates:
    """The members of a federation, whom the page identifies by their certificates and the current list.

    Args:
        folder: the folder with ca.crt, crl.pem and members.json, which are read again when they change.
        federation: the federation's name.

    Raises:
        ConfigError: the files cannot be read, or are another federation's.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self._authority = Authority(folder / CA)
        self._members = WatchedMembers(folder, federation)
        self._federation = federation
        self._secret = secrets.token_bytes(32)
        self._lines = Lines()

    def find_login(self, request: web.Request) -> Login | None:
        """Return the login of the connection's peer; None if the peer has no access."""
        tls = request.get_extra_info("ssl_object")
        shown = None if tls is None else tls.getpeercert(binary_form=True)
        if shown is None:
            return None
        self._members.update_authority(self._authority)
        try:
            subject, _ = self._authority.identify(shown)
            self._members.admit(subject)
        except ProtocolError as error:
            self._lines.warning(log, "event=login_refused address=%s reason=%r", request.remote, str(error))
            return None
        if subject.role not in MAY_ACT or subject.federation != self._federation:
            return None
        word = hmac.new(self._secret, shown, hashlib.sha256).hexdigest()
        return Login(word, MAY_ACT[subject.role], subject.name)
