"""Our client in place of paho's: frames, and MQTT through a WebSocket of a real broker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import web

from fedge.errors import TransportError
from fedge.membership.credentials import CA, CERTIFICATE, KEY
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.connection.paho import _WebSocket
from fedge.wire.connection.route import parse_address, parse_proxy
from fedge.wire.transport import Transport
from tests.support.broker import OwnBroker, ask
from tests.support.identities import Authority
from tests.support.proxies import ProxyServer
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("mosquitto_program")


def unmasked(frame: bytes) -> tuple[int, bytes]:
    """Opcode and content, read as RFC 6455 (5.2) has it."""
    size, start = frame[1] & 127, 2
    if size > 125:
        start += 2 if size == 126 else 8
        size = int.from_bytes(frame[2:start])
    mask = frame[start : start + 4]
    assert frame[0] & 0x80
    assert frame[1] & 0x80
    assert len(frame) == start + 4 + size
    return frame[0] & 15, bytes(byte ^ mask[i % 4] for i, byte in enumerate(frame[start + 4 :]))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 127, 65535, 65536, 70001])
def test_a_frame_is_what_went_in(size: int) -> None:
    data = os.urandom(size)
    assert unmasked(_WebSocket._create_frame(None, 2, bytearray(data))) == (2, data)


def test_a_pong_is_masked_too() -> None:
    assert unmasked(_WebSocket._create_frame(None, 10, bytearray(b"ping"), 0)) == (10, b"ping")


PLAIN = "listener {port}", "allow_anonymous true"
WEB = "listener {other} 127.0.0.1", "allow_anonymous true", *PLAIN, "protocol websockets"
"""Mosquitto 2.0.11 does not start with a listener for WebSockets alone."""
SIZES = (0, 1, 100, 126, 20_000)
"""Mosquitto 2.0.11 takes 0.1 s for each 4 KiB through a WebSocket."""


def tls(authority: Authority) -> tuple[str, ...]:
    """Lines of a listener that asks for certificates of a federation."""
    identity = authority.folder / "broker"
    return (
        *(f"cafile {identity / CA}", f"certfile {identity / CERTIFICATE}", f"keyfile {identity / KEY}"),
        "require_certificate true",
    )


async def echo(settings: BrokerSettings) -> None:
    """Messages of all sizes come back unchanged through this connection."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message: Inbound) -> None:
        await heard.put(message.payload)

    async with Transport(settings, "one") as one, asyncio.timeout(WAIT_S):
        await one.subscribe("t", take)
        sent = [os.urandom(size) for size in SIZES]
        await asyncio.gather(*(one.publish("t", payload) for payload in sent))
        assert [await heard.get() for _ in sent] == sent
        assert one.protocol == "5"


async def test_websockets(tmp_path: Path) -> None:
    async with OwnBroker(tmp_path, *WEB) as broker:
        await echo(BrokerSettings(broker.host, broker.port, path="/mqtt"))


async def test_websockets_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    async with OwnBroker(tmp_path, *WEB, *tls(authority)) as broker:
        files = authority.issue("cam1")
        await echo(BrokerSettings(broker.host, broker.port, path="/mqtt", secure=True, **files))
        with pytest.raises(TransportError, match="certificate: self-signed certificate in certificate chain"):
            await echo(BrokerSettings(broker.host, broker.port, path="/mqtt", secure=True))  # whom the system trusts


@pytest.mark.parametrize("kind", ["http", "socks5"])
@pytest.mark.parametrize("lines", [PLAIN, WEB], ids=["mqtt", "websockets"])
@pytest.mark.parametrize("over_tls", [False, True], ids=["open", "tls"])
async def test_through_a_proxy(tmp_path: Path, kind: str, lines: tuple[str, ...], *, over_tls: bool) -> None:
    authority = Authority(tmp_path / "authority") if over_tls else None
    path = "/mqtt" if lines == WEB else None
    lines = (*lines, *tls(authority)) if authority else lines
    async with OwnBroker(tmp_path, *lines) as broker, ProxyServer(kind, login="me:pass") as proxy:
        files = authority.issue("cam1") if authority else {}
        way = parse_proxy(proxy.url)
        await echo(BrokerSettings("localhost", broker.port, path=path, secure=over_tls, proxy=way, **files))
        assert proxy.targets == [("localhost", broker.port)]


async def test_a_proxy_that_wants_another_login_ends_it_and_one_that_is_away_is_waited_for(caplog) -> None:
    async with ProxyServer("http", login="me:pass") as proxy:
        way = parse_proxy(proxy.url.replace("pass", "wrong"))
        with pytest.raises(TransportError, match="wants a user name and a password"):
            await Transport(BrokerSettings("localhost", proxy=way), "one").__aenter__()
    waiting = asyncio.create_task(Transport(BrokerSettings("localhost", proxy=way), "one").__aenter__())
    await until(lambda: "cannot be reached: Connection refused" in caplog.text)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("over_tls", [False, True])
async def test_an_address_with_a_zone(tmp_path: Path, *, over_tls: bool) -> None:
    """The certificate names the address without its zone."""
    authority = Authority(tmp_path / "authority", host="::1")
    lines = ("listener {port} ::1", "allow_anonymous true", *(tls(authority) if over_tls else ()))
    async with OwnBroker(tmp_path, *lines, host="::1") as broker:
        at = parse_address(f"[::1%1]:{broker.port}")
        await echo(BrokerSettings(at.host, at.port, **(authority.issue("cam1") if over_tls else {})))


async def test_a_wrong_path_is_named() -> None:
    server = web.AppRunner(web.Application())
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        settings = BrokerSettings("127.0.0.1", server.addresses[0][1], path="/mqtt")
        with pytest.raises(TransportError, match=r"no WebSocket for MQTT at /mqtt \(HTTP/1.1 404 Not Found\)"):
            await asyncio.wait_for(Transport(settings, "one").__aenter__(), WAIT_S)
    finally:
        await server.cleanup()


async def test_all_topics_and_the_client_id_get_their_prefixes(tmp_path: Path) -> None:
    """At a broker that allows nothing else; a shared group, a will and an answer are below the prefix, too."""
    (tmp_path / "acl").write_text("topic readwrite company/a/#\n")
    heard: asyncio.Queue[Inbound] = asyncio.Queue()

    async def next_one() -> tuple[str, bytes]:
        message = await heard.get()
        return message.topic, message.payload

    lines = (*PLAIN, f"acl_file {tmp_path / 'acl'}", "clientid_prefixes a-")
    async with OwnBroker(tmp_path, *lines) as broker, asyncio.timeout(WAIT_S):
        settings = BrokerSettings(broker.host, broker.port, topic_prefix="company/a", client_prefix="a-")
        two = Transport(settings, "two", will=Will("t/will", b"gone", delay_s=0))
        async with Transport(settings, "one") as one:
            await one.subscribe("$share/g/t/+", heard.put)
            async with two:
                assert two.client_id == "a-two"
                await two.publish("t/x", b"1")
                assert await next_one() == ("t/x", b"1")
                two._connection._client.socket().shutdown(2)
                assert await next_one() == ("t/will", b"gone")
            for answer, told in (("company/a/answers/x", "answers/x"), ("elsewhere", "$outside/elsewhere")):
                await ask(broker, "company/a/t/x", b"?", answer, client_id="a-sensor")
                assert (await heard.get()).response_topic == told
            await one.unsubscribe("$share/g/t/+")
            await one.subscribe("t/end", heard.put)
            await one.publish("t/x", b"nobody hears it")
            await one.publish("t/end", b"")
            assert await next_one() == ("t/end", b"")
        with pytest.raises(TransportError, match="Not authorized"):
            await Transport(BrokerSettings(broker.host, broker.port), "one").__aenter__()
