"""Logins by certificate, over real TLS, with an authority as `fedge provision` makes it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession, TCPConnector

from coordinator.page.cli import UiSettings, make_page
from coordinator.provision.issuer import Federation, Issuer
from coordinator.store.requests import read_requests
from coordinator.store.store import Store
from fedge.errors import ConfigError
from fedge.identity.names import Role
from tests.support.identities import Authority
from tests.support.shop import make_shop


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    issuer = Issuer.make(tmp_path / "fed", Federation(federation="shop", host="127.0.0.1", port=8883, days=9))
    issuer.equip(Role.OPERATOR)
    return issuer


@pytest.fixture
async def url(issuer: Issuer, tmp_path: Path) -> AsyncIterator[str]:
    broker = issuer.folder / "broker"  # a server's certificate
    settings = UiSettings(
        home=tmp_path / "home",
        host="127.0.0.1",
        port=0,
        http_cert_file=str(broker / "own.crt"),
        http_key_file=str(broker / "own.key"),
        members=issuer.folder / "coordinator",
    )
    with contextlib.closing(make_shop(tmp_path / "home")):
        async with make_page(settings, "shop", None) as shown:
            shown._logins.reading_is_free = False  # as on another address than this machine's own
            yield shown.url


def as_whom(issuer: Issuer, folder: Path | None) -> ClientSession:
    context = ssl.create_default_context(cafile=str(issuer.folder / "ca.crt"))
    if folder is not None:
        context.load_cert_chain(folder / "own.crt", folder / "own.key")
    return ClientSession(connector=TCPConnector(ssl=context))


async def asked(http: ClientSession, url: str, word: str | None = None) -> tuple[int, int]:
    """How looking and acting are answered."""
    given = (await (await http.get(f"{url}api/session")).json())["csrf"] if word is None else word
    looked = await http.get(f"{url}api/state")
    acted = await http.post(f"{url}api/actions/pause", json={}, headers={"X-Fedge-Token": given})
    return looked.status, acted.status


async def test_an_operator_acts_and_status_looks_and_nobody_else_does_either(
    issuer: Issuer, url: str, tmp_path: Path
) -> None:
    expected = {"operator": (200, 200), "status": (200, 403), "coordinator": (401, 401), "rollout": (401, 401)}
    for name, answers in expected.items():
        async with as_whom(issuer, issuer.folder / name) as http:
            assert await asked(http, url) == answers, name
    async with as_whom(issuer, None) as http:
        assert await asked(http, url) == (401, 401)
    async with as_whom(issuer, issuer.folder / "operator") as http:  # what another page could have sent
        assert await asked(http, url, word="") == (200, 403)
    with contextlib.closing(Store(tmp_path / "home", intake=True)) as store:
        assert read_requests(store).paused


async def test_who_was_revoked_is_refused_at_once_and_who_was_equipped_again_let_in(issuer: Issuer, url: str) -> None:
    async with as_whom(issuer, issuer.folder / "operator") as http:
        assert (await asked(http, url))[0] == 200
        issuer.revoke("operator")
        assert await asked(http, url) == (401, 401)
    issuer.equip(Role.OPERATOR)
    async with as_whom(issuer, issuer.folder / "operator") as http:
        assert await asked(http, url) == (200, 200)


async def test_another_authoritys_certificate_is_no_login(issuer: Issuer, url: str, tmp_path: Path) -> None:
    files = Authority(tmp_path / "other", "shop").issue("operator", Role.OPERATOR)
    context = ssl.create_default_context(cafile=str(issuer.folder / "ca.crt"))
    context.load_cert_chain(files["cert_file"], files["key_file"])
    async with ClientSession(connector=TCPConnector(ssl=context)) as http:
        with pytest.raises((ClientConnectorError, ClientError)):
            await http.get(f"{url}api/session")


def test_certificates_need_https_and_the_federations_own_list(issuer: Issuer, tmp_path: Path) -> None:
    settings = UiSettings(home=tmp_path, members=issuer.folder / "coordinator")
    with pytest.raises(ConfigError, match="needs http_cert_file"):
        make_page(settings, "shop", None)
