"""A port whose clients mean no good; tests/deploy/serving/test_server.py has what a model server adds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from fedge.errors import TransportError
from fedge.system.logs import LINES_PER_MINUTE
from fedge.wire.port import MAX_CONNECTIONS, MAX_HEALTH_CONNECTIONS, SILENT_S, TOO_MANY, Port
from fedge.wire.streams import open_connection
from tests.deploy.tcp import connections
from tests.support.waiting import until

trustme = pytest.importorskip("trustme")
HEALTH = {"/live": {"live": True}}


async def answer(_: web.Request) -> web.Response:
    return web.json_response({"fine": True})


async def live(_: web.Request) -> web.Response:
    return web.json_response(HEALTH["/live"])


async def fail(_: web.Request) -> web.Response:
    raise ZeroDivisionError


@contextlib.asynccontextmanager
async def listening(port: Port) -> AsyncIterator[tuple[str, int]]:
    app = web.Application(middlewares=[port.watch_request])
    app.add_routes([web.get("/", answer), web.post("/", answer), web.get("/live", live), web.get("/bug", fail)])
    await port.open(app, drain_s=1.0)
    try:
        yield "127.0.0.1", port.number
    finally:
        await port.close()


@contextlib.asynccontextmanager
async def silent(address: tuple[str, int], n: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Writers of connections that say nothing."""
    async with connections(*address, n) as found:
        yield [writer for _, writer in found]


@pytest.fixture
def tls() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server, and of a client that trusts it."""
    authority = trustme.CA()
    here, there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(here)
    authority.configure_trust(there)
    return here, there


async def test_who_does_not_even_begin_with_tls_holds_a_place_and_no_more(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tls
    port = Port("127.0.0.1", 0, tls=here, health=HEALTH)
    async with asyncio.timeout(300), listening(port) as address, silent(address, 400):
        assert 0 < len(port.connections) <= MAX_CONNECTIONS
        assert len(port._health_alone) <= MAX_HEALTH_CONNECTIONS
        async with aiohttp.ClientSession(port.url, connector=aiohttp.TCPConnector(ssl=there)) as session:
            assert await (await session.get("/live")).json() == {"live": True}
            await asyncio.sleep(SILENT_S)
            assert await (await session.get("/")).json() == {"fine": True}
    assert not caplog.records


async def test_places_come_back_when_tls_fails_is_cut_off_or_is_never_finished(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedge.wire.port.HEAD_TIMEOUT_S", 0.2)
    here, there = tls
    port = Port("127.0.0.1", 0, tls=here)
    async with asyncio.timeout(300), listening(port) as address:
        async with silent(address, 3) as (noise, gone, _):
            noise.write(b"GET / HTTP/1.1\r\n\r\n")
            gone.transport.abort()
            await until(lambda: port.connections)
            await until(lambda: not port.connections)
        async with aiohttp.ClientSession(port.url, connector=aiohttp.TCPConnector(ssl=there)) as session:
            assert await (await session.post("/", data=b"x" * 10**6)).json() == {"fine": True}
            assert len(port.connections) == 1
        await until(lambda: not port.connections)
    assert not caplog.records


async def test_whoever_finds_no_place_is_told_so() -> None:
    port = Port("127.0.0.1", 0, places=2)
    async with (
        asyncio.timeout(300),
        listening(port) as address,
        silent(address, 2),
        open_connection(*address) as (reader, _),
    ):
        assert await reader.read() == TOO_MANY


async def test_bytes_that_are_not_http_are_few_lines_and_a_bug_of_ours_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(300), listening(port := Port("127.0.0.1", 0)) as address:
        for _ in range(3 * LINES_PER_MINUTE):
            async with open_connection(*address) as (reader, writer):
                writer.write(b"GET / HTTP/9.9\r\n\r\n")
                assert b" 400 " in await reader.read()
        assert {record.message.partition(" ")[0] for record in caplog.records} == {"event=malformed_request"}
        assert LINES_PER_MINUTE <= len(caplog.records) <= 2 * LINES_PER_MINUTE
        assert 'address=127.0.0.1 reason="400, message: Bad status line: Invalid HTTP version' in caplog.text
        assert not any(record.exc_info for record in caplog.records)
        async with aiohttp.ClientSession(port.url) as session:
            assert (await session.get("/bug")).status == 500
    assert "ZeroDivisionError" in caplog.text


async def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    async with listening(Port("127.0.0.1", 0)) as (_, taken):
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{taken}: .*; choose another port"):
            await Port("127.0.0.1", taken).open(web.Application(), drain_s=1.0)
