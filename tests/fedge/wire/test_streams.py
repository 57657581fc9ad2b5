"""Connections and the servers of tests: no socket is left open, whenever somebody is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from fedge.wire.streams import open_connection
from tests.deploy.tcp import TcpServer, connections
from tests.support.proxies import ProxyServer
from tests.support.waiting import until

WAIT_S = 20
MUCH = 16 * 2**20
"""More bytes than the buffers of two sockets hold."""


async def wait_for_the_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_a_connection_is_closed_with_its_block() -> None:
    async with TcpServer(wait_for_the_end) as server:
        async with open_connection(server.host, server.port) as (_, writer):
            sock = writer.get_extra_info("socket")
        assert sock.fileno() == -1


async def test_nobody_listens() -> None:
    async with TcpServer(wait_for_the_end) as server:
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        await open_connection(server.host, port).__aenter__()


async def test_who_is_cancelled_while_the_other_side_reads_nothing_leaves_no_socket() -> None:
    sockets = []

    async def say_much(port: int) -> None:
        async with open_connection("127.0.0.1", port) as (_, writer):
            sockets.append(writer.get_extra_info("socket"))
            writer.write(bytes(MUCH))

    async def read_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with TcpServer(read_nothing) as server:
        saying = asyncio.create_task(say_much(server.port))
        await until(lambda: bool(sockets))
        await asyncio.sleep(0.05)
        assert not saying.done()
        saying.cancel()
        with suppress(asyncio.CancelledError):
            await saying
        assert sockets[0].fileno() == -1


async def test_a_server_closes_its_connections_and_tells_what_failed() -> None:
    sockets = []

    async def fail(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sockets.append(writer.get_extra_info("socket"))
        if len(sockets) == 2:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        async with TcpServer(fail) as server, connections(server.host, server.port, 3):
            await until(lambda: len(sockets) == 3)
    assert [sock.fileno() for sock in sockets] == [-1] * 3


@pytest.mark.parametrize("turns", range(10))
async def test_a_proxy_that_ends_while_its_client_leaves_closes_what_it_had_opened(turns: int) -> None:
    """`turns`: of the loop between the two ends."""
    closed = asyncio.Event()

    async def see_the_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()
        closed.set()

    async with asyncio.timeout(WAIT_S), TcpServer(see_the_end) as far:
        async with ProxyServer("http") as proxy:
            async with open_connection("127.0.0.1", proxy.port) as (reader, writer):
                where = f"{far.host}:{far.port}"
                writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            for _ in range(turns):
                await asyncio.sleep(0)
        await closed.wait()
