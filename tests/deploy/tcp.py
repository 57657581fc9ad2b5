"""TCP servers and many connections at once, of which nothing is left open after their block."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from fedge.wire.streams import close_writer, open_connection

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class TcpServer:
    """A server whose connections end with their call of `serve`. Async context manager: all of them end with it.

    What `serve` raises comes at the end of the block, unless it is that its client has gone.
    """

    def __init__(self, serve: Serve, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.host = host
        self._serve_one, self._tls = serve, tls
        self._open: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def port(self) -> int:
        """Given by the system when the server begins."""
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, 0, ssl=self._tls)  # noqa: TID251 - its one place
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()
        if self._errors:
            raise self._errors[0]

    def cut(self) -> None:
        """Break all connections."""
        for one in self._open:
            one.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: one that is cancelled before it begins would close nothing, and asyncio complains of it."""
        one = asyncio.get_running_loop().create_task(self._serve_and_close(reader, writer))
        self._open.add(one)
        one.add_done_callback(lambda _: self._forget(one, writer))

    async def _serve_and_close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve_one(reader, writer)
        except (OSError, EOFError):  # the client has gone
            pass
        finally:
            await close_writer(writer)

    def _forget(self, one: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._open.discard(one)
        if not one.cancelled() and (error := one.exception()) is not None:
            self._errors.append(error)


@asynccontextmanager
async def connections(
    host: str, port: int, n: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Many connections for the block."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_connection(host, port)) for _ in range(n)]


def answering(connack: bytes):
    """A server that answers each CONNECT with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(connack)
        await reader.read()

    return TcpServer(serve)


async def read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Kind and body of an MQTT packet."""
    kind, size, shift = (await reader.readexactly(1))[0] >> 4, 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return kind, await reader.readexactly(size)
