"""The way to a broker: its address, a proxy, and a diagnosis if something else than a broker answers there."""

from __future__ import annotations

import base64
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from fedge.errors import ConfigError
from fedge.system.text import format_address

PORTS: Final = {"": 1883, "ws": 80, "wss": 443}
"""Default port by scheme, for addresses without a port."""
PATH: Final = "/mqtt"
"""Default path of MQTT over WebSockets, used by nearly all brokers."""
PROBE_S: Final = 3.0
HEADER_BYTES: Final = 16 * 1024
"""Most bytes of the header of a proxy's answer."""

_ADDRESS: Final = re.compile(
    r"((?P<scheme>wss?)://)?"
    r"(\[(?P<v6>[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?)\]|(?P<host>[^:\[\]\s/%@?#]+))"
    r"(:(?P<port>[0-9]{1,5}))?(?P<path>/[!-~]*)?"
)


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's address. `path` is for WebSockets, None for plain MQTT; `secure` is True for wss, always over TLS."""

    host: str
    port: int
    path: str | None = None
    secure: bool = False

    @property
    def name(self) -> str:
        """The host's name or address as certificates have it, without the zone of a link-local address."""
        return self.host.partition("%")[0]


def parse_address(text: str) -> Address:
    """Parse "host:port", "host" (port 1883), "[IPv6 address]:port" or "ws://...", "wss://..." with or without a path.

    Raises:
        ConfigError: the text is none of these.
    """
    found = _ADDRESS.fullmatch(text)
    scheme = (found["scheme"] or "") if found else ""
    port = int(found["port"] or PORTS[scheme]) if found else 0
    fits = found is not None and 0 < port < 2**16 and not (found["path"] and not scheme)
    if found is None or not fits or not (found["v6"] or _is_name(found["host"])):
        raise ConfigError(
            f"{text!r} is not an address of a broker; write HOST:PORT, such as localhost:1883, or for MQTT over "
            "WebSockets ws://HOST:PORT/PATH or wss://HOST:PORT/PATH"
        )
    return Address(found["v6"] or found["host"], port, (found["path"] or PATH) if scheme else None, scheme == "wss")


def _is_name(host: str) -> bool:
    """Return whether a host's name can be looked up; sockets raise various errors for an empty or too long part."""
    with suppress(UnicodeError):
        host.encode("idna")
        return True
    return False


# ------------------------------------------------------------------------------------------------------------ proxies


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy of a company's network, HTTP (CONNECT) or SOCKS 5. The proxy itself looks up the broker's name."""

    socks: bool
    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)


class ProxyError(OSError):
    """The proxy did not let us through. `final` is True if it never will with this login."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def parse_proxy(url: str) -> Proxy:
    """Parse http://HOST:PORT or socks5://HOST:PORT, perhaps with USER:PASSWORD@ (percent-encoded).

    Raises:
        ConfigError: the URL is neither; the error text holds no password.
    """
    try:
        found = urlsplit(url)
        plain = found.scheme in {"http", "socks5"} and not found.path.strip("/")
        if plain and found.hostname and _is_name(found.hostname) and found.port:
            user, password = (None if word is None else unquote(word) for word in (found.username, found.password))
            if all(word is None or 0 < len(word.encode()) < 256 for word in (user, password)):
                return Proxy(found.scheme == "socks5", found.hostname, found.port, user, password)
    except ValueError:
        pass
    raise ConfigError("proxy: write http://HOST:PORT or socks5://HOST:PORT, perhaps with USER:PASSWORD@ before HOST")


def open_socket(host: str, port: int, proxy: Proxy | None, timeout_s: float) -> socket.socket:
    """Open a TCP connection, through the proxy if there is one. Blocks.

    Raises:
        OSError: nobody listens there.
        ProxyError: the proxy did not let us through.
    """
    if proxy is None:
        sock = socket.create_connection((host, port), timeout_s)
    else:
        sock = _connect_through(proxy, host, port, timeout_s)
    # Otherwise the tail of a packet waits for the peer's delayed ACK: 40 ms per publish.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _connect_through(proxy: Proxy, host: str, port: int, timeout_s: float) -> socket.socket:
    where = f"the proxy at {proxy.host}:{proxy.port}"
    try:
        sock = socket.create_connection((proxy.host, proxy.port), timeout_s)
    except OSError as error:
        raise ProxyError(f"{where} cannot be reached: {error.strerror or error}") from error
    try:
        (_request_socks if proxy.socks else _request_http)(sock, proxy, host, port)
    except ProxyError as error:
        sock.close()
        raise ProxyError(f"{where} {error}", final=error.final) from error
    except OSError as error:
        sock.close()
        raise ProxyError(f"{where} does not answer: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _request_http(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Request a tunnel by HTTP CONNECT (RFC 9110, 9.3.6), with Basic authentication (RFC 7617)."""
    target = format_address(host, port)
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:
        login = base64.b64encode(f"{proxy.username}:{proxy.password or ''}".encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {login}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    header = b""
    while not header.endswith(b"\r\n\r\n"):
        header += (byte := sock.recv(1))  # one byte at a time, since what follows the header is the broker's
        if not byte or len(header) > HEADER_BYTES:
            raise ProxyError(f"is no HTTP proxy: it answered {header[:40]!r}")
    status = header.partition(b"\r\n")[0].decode("latin-1")
    found = re.match(r"HTTP/1\.[01] ([0-9]{3})", status)
    if found is None:
        raise ProxyError(f"is no HTTP proxy: it answered {status[:40]!r}")
    if found[1] == "407":
        raise ProxyError("wants a user name and a password: write http://USER:PASSWORD@HOST:PORT", final=True)
    if found[1][0] != "2":
        raise ProxyError(f"does not connect us with {target}: {status[:80]!r}")


SOCKS_REPLIES: Final = {
    1: "it failed",
    2: "its rules forbid it",
    3: "the network cannot be reached",
    4: "the host cannot be reached, or its name is not known there",
    5: "nobody listens there",
    6: "it took too long",
    7: "it knows no such command",
    8: "it knows no such kind of address",
}


def _request_socks(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Request a connection by SOCKS 5 (RFC 1928), with user name and password (RFC 1929)."""
    sock.sendall(b"\x05\x01\x00" if proxy.username is None else b"\x05\x02\x00\x02")
    version, method = _receive_exactly(sock, 2)
    if version != 5:
        raise ProxyError("is no SOCKS 5 proxy")
    if method == 2 and proxy.username is not None:
        words = [proxy.username.encode(), (proxy.password or "").encode()]
        sock.sendall(b"\x01" + b"".join(bytes([len(word)]) + word for word in words))
        if _receive_exactly(sock, 2)[1] != 0:
            raise ProxyError("refuses this user name and password", final=True)
    elif method != 0:
        raise ProxyError("wants a user name and a password: write socks5://USER:PASSWORD@HOST:PORT", final=True)
    sock.sendall(b"\x05\x01\x00" + _encode_socks_address(host) + port.to_bytes(2, "big"))
    _, reply, _, kind = _receive_exactly(sock, 4)
    if reply != 0:
        raise ProxyError(f"does not connect us with {format_address(host, port)}: {SOCKS_REPLIES.get(reply, reply)}")
    _receive_exactly(sock, {1: 4, 4: 16}.get(kind) or _receive_exactly(sock, 1)[0])
    _receive_exactly(sock, 2)


def _encode_socks_address(host: str) -> bytes:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("idna")
        return bytes([3, len(name)]) + name
    return bytes([1 if ip.version == 4 else 4]) + ip.packed


def _receive_exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        if not (more := sock.recv(n_bytes - len(data))):
            raise ProxyError("hung up")
        data += more
    return data


def read_peer_certificate(address: Address, proxy: Proxy | None, tls: ssl.SSLContext) -> bytes | None:
    """Return the certificate (DER) that a broker shows now, after a handshake alone. Blocks.

    Raises:
        OSError: the broker cannot be reached, or the handshake fails.
    """
    with (
        open_socket(address.host, address.port, proxy, PROBE_S) as tcp,
        tls.wrap_socket(tcp, server_hostname=address.name) as sock,
    ):
        return sock.getpeercert(binary_form=True)


# ---------------------------------------------------------------------------------------------- what answers there


def explain_other_protocol(address: Address, proxy: Proxy | None, tls: Callable[[], ssl.SSLContext | None]) -> str:
    """Return which other protocol answers at a broker's address, with advice, or "" if none is recognised. Blocks.

    The function requests a WebSocket, as a browser does.
    """
    where = format_address(address.host, address.port)
    answer, scheme = b"", "ws"
    with suppress(OSError, ConfigError):
        context = tls()
        scheme = "ws" if context is None else "wss"
        answer = _read_first_line(address, proxy, context)
    if answer.startswith(b"HTTP/"):
        status, at = answer.decode("latin-1")[:60], f"{scheme}://{where}"
        if address.path is None and status[9:12] == "101":
            return f"this port speaks MQTT over WebSockets: give the address {at}"
        if address.path is None:
            return f"a web server answers at this port ({status}): give the broker's port for MQTT"
        return f"its web server has no WebSocket for MQTT at {address.path} ({status}): give the path, as in {at}{PATH}"
    if answer.startswith(b"\x15\x03"):
        return "this port speaks TLS: give --identity or --ca-file"
    if answer[:1].isalnum():  # a broker may say in MQTT that it does not understand us
        return f"what answers at this port is no broker: it says {answer[:40]!r}"
    return ""


def _read_first_line(address: Address, proxy: Proxy | None, tls: ssl.SSLContext | None) -> bytes:
    request = [
        f"GET {address.path or PATH} HTTP/1.1",
        f"Host: {format_address(address.name, address.port)}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: " + base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: mqtt",
    ]
    answer = b""
    with open_socket(address.host, address.port, proxy, PROBE_S) as tcp:
        sock = tcp if tls is None else tls.wrap_socket(tcp, server_hostname=address.name)
        with sock:
            sock.sendall("\r\n".join([*request, "", ""]).encode())
            while b"\n" not in answer and len(answer) < HEADER_BYTES and (more := sock.recv(200)):
                answer += more
    return answer.partition(b"\r\n")[0]


def explain_outage(error: OSError, host: str) -> str:
    """Return why a broker cannot be reached, and what to do."""
    if isinstance(error, ConnectionRefusedError):
        return "no broker listens there: start it, or give --broker its address"
    if isinstance(error, socket.gaierror):
        return f"the name {host} is not known here ({error.strerror}): see --broker, and this machine's name server"
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | ConnectionAbortedError):
        return (
            "it hung up before a word, as does a broker whose connections are all taken (max_connections), "
            "or a firewall"
        )
    if isinstance(error, ssl.SSLError):
        return (
            f"it does not speak TLS with us ({error.reason or error}): is it the port for TLS (8883)? Without "
            "certificates take 1883, and neither --identity nor --ca-file"
        )
    if isinstance(error, TimeoutError):
        return "it does not answer: is the address right, does a firewall stand between?"
    return str(error) or type(error).__name__
