"""Small proxies as of company networks: HTTP with CONNECT, and SOCKS 5, both with a login if asked."""

from __future__ import annotations

import asyncio
import base64
import socket
from contextlib import AsyncExitStack

from fedge.wire.streams import open_connection
from tests.deploy.tcp import TcpServer

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProxyServer(TcpServer):
    """A proxy on this machine. Async context manager. `targets`: to whom it has connected somebody.

    login: USER:PASSWORD that it wants. forbids: a port that it connects nobody with. answers: what it says in place of
    all that.
    """

    def __init__(self, kind: str, *, login: str = "", forbids: int = 0, answers: bytes = b"") -> None:
        super().__init__(self._serve)
        self.kind, self.login, self.forbids, self.answers = kind, login, forbids, answers
        self.targets: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        """As `--proxy` has it."""
        return f"{self.kind}://{self.login + '@' if self.login else ''}127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.answers:
            await reader.read(1)
            writer.write(self.answers)
            return
        serve = self._http if self.kind == "http" else self._socks
        async with AsyncExitStack() as stack:
            if (target := await serve(reader, writer, stack)) is not None:
                await _relay(reader, writer, *target)

    async def _connect(self, host: str, port: int, stack: AsyncExitStack) -> Ends | None:
        if port == self.forbids:
            return None
        try:
            target = await stack.enter_async_context(open_connection(host, port))
        except OSError:
            return None
        self.targets.append((host, port))
        return target

    async def _http(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stack: AsyncExitStack
    ) -> Ends | None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, where, _ = first.split(" ")
        assert method == "CONNECT"
        assert f"Host: {where}" in lines
        login = f"Proxy-Authorization: Basic {base64.b64encode(self.login.encode()).decode()}"
        if self.login and login not in lines:
            writer.write(b'HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="x"\r\n\r\n')
            return None
        host, _, port = where.rpartition(":")
        target = await self._connect(host.strip("[]"), int(port), stack)
        said = b"HTTP/1.1 403 Forbidden" if target is None else b"HTTP/1.1 200 Connection established\r\nVia: it"
        writer.write(said + b"\r\n\r\n")
        return target

    async def _socks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stack: AsyncExitStack
    ) -> Ends | None:
        _, n = await reader.readexactly(2)
        wanted = 2 if self.login else 0
        method = wanted if wanted in await reader.readexactly(n) else 255
        writer.write(bytes([5, method]))
        if method == 255:
            return None
        if self.login:
            await reader.readexactly(1)
            user, password = [await reader.readexactly((await reader.readexactly(1))[0]) for _ in range(2)]
            right = f"{user.decode()}:{password.decode()}" == self.login
            writer.write(bytes([1, not right]))
            if not right:
                return None
        version, command, _, kind = await reader.readexactly(4)
        assert (version, command) == (5, 1)
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("idna")
        else:
            family = socket.AF_INET if kind == 1 else socket.AF_INET6
            host = socket.inet_ntop(family, await reader.readexactly(4 if kind == 1 else 16))
        port = int.from_bytes(await reader.readexactly(2))
        target = await self._connect(host, port, stack)
        if target is None:
            writer.write(bytes([5, 2 if port == self.forbids else 5, 0, 1, 0, 0, 0, 0, 0, 0]))
        else:
            writer.write(bytes([5, 0, 0, 3, 2]) + b"it" + bytes(2))
        return target


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_read: asyncio.StreamReader, to: asyncio.StreamWriter
) -> None:
    """Pass on bytes both ways until one side ends."""

    async def one_way(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    ways = [asyncio.ensure_future(one_way(reader, to)), asyncio.ensure_future(one_way(to_read, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
