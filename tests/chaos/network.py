"""A network between programs and their broker that can be cut, slowed and silenced."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

PIECE: Final = 16 * 1024


class Network:
    """A TCP port that leads to a broker's. Async context manager.

    Set `delay_s` and `bytes_per_s` to slow what passes. `silent`: it is taken and never delivered, and nobody is told.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.silent = False
        self.refusing = False
        self._to = (host, port)
        self._lines: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        for line in self._lines:
            line.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
            ends.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, far_writer))
                both.create_task(self._pass(far_reader, writer))
        except* (OSError, EOFError, asyncio.CancelledError):  # one side is gone, or we cut it: both are told
            pass
        finally:
            self._lines.discard(line)
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE):
            if self.delay_s or self.bytes_per_s:
                await asyncio.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0))
            if self.silent:
                continue
            writer.write(data)
            await writer.drain()
        raise EOFError
