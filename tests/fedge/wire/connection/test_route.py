"""Addresses of brokers, the way there through real proxies, and what answers there."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fedge.errors import ConfigError
from fedge.wire.connection.route import (
    Address,
    Proxy,
    ProxyError,
    explain_other_protocol,
    explain_outage,
    open_socket,
    parse_address,
    parse_proxy,
)
from tests.deploy.tcp import TcpServer
from tests.support.proxies import ProxyServer
from tests.support.waiting import WAIT_S


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("pi", Address("pi", 1883)),
        ("10.0.0.7:99", Address("10.0.0.7", 99)),
        ("[::1]:8883", Address("::1", 8883)),
        ("[::1]", Address("::1", 1883)),
        ("[fe80::1%eth0]:1883", Address("fe80::1%eth0", 1883)),
        ("ws://pi", Address("pi", 80, "/mqtt")),
        ("ws://pi:8083/", Address("pi", 8083, "/")),
        ("wss://pi", Address("pi", 443, "/mqtt", secure=True)),
        ("wss://[::1]:8084/a/b?c=d", Address("::1", 8084, "/a/b?c=d", secure=True)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1883", "pi:", "pi:0", "pi:65536", "pi:x", "::1", "mqtt://pi", "pi 1", "pi/mqtt", "pi:1883/mqtt"),
        *("http://pi", "ws://", "ws://me@pi", "ws://pi:0", "ws://pi/a b", "[fe80::1%]:1", "[::1%e/0]", "pi%eth0"),
        *("a..b", "ws://a..b", f"{'x' * 64}.lan:1883"),  # names that nobody can look up
    ],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)


def test_the_zone_of_an_address_is_no_part_of_its_name() -> None:
    assert parse_address("[fe80::1%eth0]:1883").name == "fe80::1"


# ------------------------------------------------------------------------------------------------------------ proxies


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://proxy:3128", Proxy(False, "proxy", 3128)),
        ("http://proxy:3128/", Proxy(False, "proxy", 3128)),
        ("socks5://[::1]:1080", Proxy(True, "::1", 1080)),
        ("socks5://me:p%40ss%3A@proxy:1080", Proxy(True, "proxy", 1080, "me", "p@ss:")),
    ],
)
def test_addresses_of_proxies(url: str, proxy: Proxy) -> None:
    assert parse_proxy(url) == proxy


@pytest.mark.parametrize(
    "url",
    [
        *("", "proxy:3128", "http://proxy", "https://proxy:1", "socks4://proxy:1", "http://proxy:x", "http://p:1/a"),
        *("http://:secret@proxy:1", f"socks5://me:{'secret' * 50}@proxy:1"),
        "http://me:secret@proxy..lan:1",
    ],
)
def test_wrong_addresses_of_proxies_are_told_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy: write http://HOST:PORT or socks5://HOST:PORT") as error:
        parse_proxy(url)
    assert "secret" not in str(error.value)


def test_the_password_of_a_proxy_is_not_shown() -> None:
    assert "secret" not in repr(parse_proxy("http://me:secret@proxy:3128"))


@pytest.fixture
async def greeter() -> AsyncIterator[int]:
    """A server that says hello, on IPv4 and IPv6; its port."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")

    async with TcpServer(greet, "localhost") as server:
        yield server.port


async def hear(url: str, host: str, port: int) -> bytes:
    """What somebody behind the proxy says first."""

    def listen() -> bytes:
        with open_socket(host, port, parse_proxy(url), WAIT_S) as sock:
            return sock.recv(100)

    return await asyncio.to_thread(listen)


@pytest.mark.parametrize("kind", ["http", "socks5"])
@pytest.mark.parametrize("login", ["", "me:pass"])
async def test_through_a_proxy_which_looks_up_names(greeter: int, kind: str, login: str) -> None:
    async with ProxyServer(kind, login=login) as proxy:
        for host in ("127.0.0.1", "localhost"):
            assert await hear(proxy.url, host, greeter) == b"hello"
        assert proxy.targets == [("127.0.0.1", greeter), ("localhost", greeter)]


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_an_address_of_ipv6_through_a_proxy(kind: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")

    async with TcpServer(greet, "::1") as server, ProxyServer(kind) as proxy:
        assert await hear(proxy.url, "::1", server.port) == b"hello"


@pytest.mark.parametrize(
    ("kind", "how", "url", "told", "final"),
    [
        ("http", {"login": "me:pass"}, "http://", "wants a user name and a password", True),
        ("http", {"login": "me:pass"}, "http://me:wrong@", "wants a user name and a password", True),
        ("http", {"forbids": 1}, "http://", "does not connect us with localhost:1: 'HTTP/1.1 403 Forbidden'", False),
        ("http", {"answers": b"SSH-2.0-x\r\n"}, "http://", "is no HTTP proxy: it answered b'SSH-2.0-x", False),
        ("http", {"answers": b"SSH-2.0-x\r\n\r\n"}, "http://", "is no HTTP proxy: it answered 'SSH-2.0-x'", False),
        ("socks5", {"login": "me:pass"}, "socks5://", "wants a user name and a password", True),
        ("socks5", {"login": "me:pass"}, "socks5://me:wrong@", "refuses this user name and password", True),
        ("socks5", {"forbids": 1}, "socks5://", "does not connect us with localhost:1: its rules forbid it", False),
        ("socks5", {}, "socks5://", "does not connect us with localhost:1: nobody listens there", False),
        ("socks5", {"answers": b"HTTP/1.1 400"}, "socks5://", "is no SOCKS 5 proxy", False),
        ("socks5", {"answers": b"\5"}, "socks5://", "hung up", False),
    ],
)
async def test_a_proxy_that_does_not_let_us_through(
    kind: str, how: dict[str, Any], url: str, told: str, final: bool
) -> None:
    async with ProxyServer(kind, **how) as proxy:
        where = proxy.url.rpartition("/")[2].rpartition("@")[2]
        with pytest.raises(ProxyError) as error:
            await hear(url + where, "localhost", 1)
    assert str(error.value).startswith(f"the proxy at {where} {told}")
    assert error.value.final == final


def test_a_proxy_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ProxyError, match=f"the proxy at 127.0.0.1:{port} cannot be reached: Connection refused"):
        open_socket("localhost", 1, parse_proxy(f"http://127.0.0.1:{port}"), WAIT_S)


# ---------------------------------------------------------------------------------------------------- what answers


@pytest.mark.parametrize(
    ("answer", "path", "told"),
    [
        (
            b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
            None,
            "this port speaks MQTT over WebSockets: give the address ws",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None, "a web server answers at this port (HTTP/1.1 400 Bad Request)"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "/x", "its web server has no WebSocket for MQTT at /x (HTTP/1.1 404 Not"),
        (b"\x15\x03\x01\x00\x02\x02\x46", None, "this port speaks TLS: give --identity or --ca-file"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", None, "what answers at this port is no broker: it says b'SSH-2.0-OpenSSH_9.2'"),
        (b"", None, ""),
        (b"\x20\x03\x00\x81\x00", None, ""),  # CONNACK of MQTT 5: malformed packet
        (b"\xe0\x01\x81", "/mqtt", ""),  # DISCONNECT
    ],
)
async def test_what_speaks_in_place_of_a_broker(answer: bytes, path: str | None, told: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(f"GET {path or '/mqtt'} HTTP/1.1\r\n".encode())
        writer.write(answer)

    async with TcpServer(serve) as server:
        address = Address("127.0.0.1", server.port, path)
        found = await asyncio.to_thread(explain_other_protocol, address, None, lambda: None)
    assert found.startswith(told)
    assert bool(found) == bool(told)


def no_tls() -> ssl.SSLError:
    error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    error.reason = "WRONG_VERSION_NUMBER"
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(), "no broker listens there"),
        (socket.gaierror(-2, "Name or service not known"), "the name pi is not known here (Name or service not known)"),
        (TimeoutError("timed out"), "it does not answer: is the address right"),
        (ConnectionResetError(), "it hung up before a word"),
        (ssl.SSLEOFError(), "it hung up before a word"),
        (no_tls(), "it does not speak TLS with us (WRONG_VERSION_NUMBER)"),
        (OSError(113, "No route to host"), "[Errno 113] No route to host"),
        (ProxyError("the proxy is ill"), "the proxy is ill"),
    ],
)
def test_why_a_broker_cannot_be_reached(error: OSError, told: str) -> None:
    assert explain_outage(error, "pi").startswith(told)
