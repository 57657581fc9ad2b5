"""A network between programs and their broker that can be cut, slowed and silenced."""

from __future__ import annotations

import asyncio
from typing import Final

from fedge.wire.streams import open_connection
from tests.deploy.tcp import TcpServer

PIECE: Final = 16 * 1024


class Network(TcpServer):
    """A TCP port that leads to a broker's. Async context manager.

    Set `delay_s` and `bytes_per_s` to slow what passes. `silent`: it is taken and never delivered, and nobody is told.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(self._join)
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.silent = False
        self.refusing = False
        self._to = (host, port)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.refusing:
                async with open_connection(*self._to) as (far_reader, far_writer):
                    await self._pass_both_ways((reader, far_writer), (far_reader, writer))
        finally:
            writer.transport.abort()

    async def _pass_both_ways(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Until one side is gone, or we cut it: both are told."""
        try:
            async with asyncio.TaskGroup() as both:
                for way in ways:
                    both.create_task(self._pass(*way))
        except* (OSError, EOFError):
            pass
        finally:
            for _, writer in ways:
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE):
            if self.delay_s or self.bytes_per_s:
                await asyncio.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0))
            if self.silent:
                continue
            writer.write(data)
            await writer.drain()
        raise EOFError
