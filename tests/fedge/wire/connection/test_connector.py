"""The way in: what refuses us, what is said then, and when it is tried again."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fedge.errors import TransportError
from fedge.wire.connection.broker import BrokerSettings, Will
from fedge.wire.connection.connector import BACKOFF_CAP_S, SLOW_AFTER, compute_backoff_s
from fedge.wire.connection.refusals import CHECK_PLAIN
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer, answering
from tests.support.broker import OwnBroker, open_broker, transport
from tests.support.waiting import WAIT_S, until


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_to_its_cap_and_uses_all_the_range_below(attempt, draw):
    most = compute_backoff_s(attempt, 1.0)
    assert compute_backoff_s(attempt, draw) == draw * most
    assert 0 < most <= compute_backoff_s(attempt + 1, 1.0) <= compute_backoff_s(50, 1.0) == BACKOFF_CAP_S


@pytest.mark.parametrize(
    ("code", "reason"), [(0x86, "Bad user name or password"), (0x87, "Not authorized"), (0x85, "Client identifier")]
)
async def test_final_refusal_is_raised_with_its_reason(code, reason):
    async with answering(bytes([0x20, 3, 0, code, 0])) as server:
        with pytest.raises(TransportError, match=reason):
            await transport(server, "one").__aenter__()


async def test_refused_by_a_broker_of_3_1_1():
    """It does not know MQTT 5 (code 1), and then not our password (code 4)."""
    codes = iter([1, 4])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes([0x20, 2, 0, next(codes)]))
        await reader.read()

    async with TcpServer(serve) as server:
        with pytest.raises(TransportError, match="Bad user name or password"):
            await asyncio.wait_for(transport(server, "one").__aenter__(), WAIT_S)


async def test_a_broker_that_closes_on_us_is_explained_once_and_then_left_in_peace(no_back_off, caplog):
    """As Mosquitto does to a client without a certificate: the TLS handshake succeeds, then it hangs up."""
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1)

    async with TcpServer(hang_up) as server:
        trying = asyncio.create_task(transport(server, "one").__aenter__())
        await until(lambda: connections >= 2 * SLOW_AFTER)
        await asyncio.sleep(0.5)
        assert not trying.done()
        trying.cancel()
    assert connections == 2 * SLOW_AFTER + 1  # MQTT 5 and 3.1.1 each, and once to see what else it may be
    assert caplog.text.count("event=connect_failed") == SLOW_AFTER
    assert caplog.text.count(CHECK_PLAIN) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("retain_available false", r"Retain not supported \(0x9a\): it keeps no retained messages"),
        ("max_qos 0", r"QoS not supported \(0x9b\): it knows QoS 0 alone"),
        ("max_packet_size 1024", "it takes packets of 1,024 bytes at most, and fedge needs 4,096: raise its limit"),
    ],
)
@pytest.mark.parametrize("will", [None, Will("will", b"")])
async def test_a_broker_that_cannot_do_what_fedge_needs_is_refused(mosquitto_program, tmp_path, line, told, will):
    async with open_broker(tmp_path, line) as broker, asyncio.timeout(WAIT_S):
        if will is None and "packet" not in line:
            told = told.partition(": ")[2]  # by what it announces; its own reason comes with a will
        with pytest.raises(TransportError, match=f"refused one: {told}"):
            await transport(broker, "one", will=will).__aenter__()


async def test_a_port_for_websockets_is_named_as_such(mosquitto_program, tmp_path):
    lines = "listener {other} 127.0.0.1", "allow_anonymous true", "listener {port}", "protocol websockets"
    async with OwnBroker(tmp_path, *lines) as broker, asyncio.timeout(WAIT_S):
        with pytest.raises(
            TransportError, match=f"MQTT over WebSockets: give the address ws://127.0.0.1:{broker.port}"
        ):
            await transport(broker, "one").__aenter__()


async def test_a_web_server_is_named_as_such():
    server = web.AppRunner(web.Application())
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        settings = BrokerSettings("127.0.0.1", server.addresses[0][1])
        with pytest.raises(TransportError, match=r"a web server answers at this port \(HTTP/1.1 404 Not Found\)"):
            await asyncio.wait_for(Transport(settings, "one").__aenter__(), WAIT_S)
    finally:
        await server.cleanup()


async def test_a_broker_that_is_full_says_nothing_and_the_log_does(mosquitto_program, tmp_path, no_back_off, caplog):
    async def stay(name: str) -> None:
        async with transport(broker, name):
            await asyncio.Event().wait()

    async with open_broker(tmp_path, "max_connections 1") as broker:
        clients = [asyncio.create_task(stay(f"client{i}")) for i in range(4)]  # this Mosquitto miscounts by one or two
        await until(lambda: "event=closed_early" in caplog.text)
        assert not any(client.done() for client in clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert "max_connections" in caplog.text
