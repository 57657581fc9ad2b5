"""TCP connections of asyncio, whose sockets are closed when the `with` block ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def open_connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection for the `with` block.

    Raises:
        OSError: nobody listens there.
    """
    reader, writer = await asyncio.open_connection(host, port)  # noqa: TID251 - its one place
    try:
        yield reader, writer
    finally:
        await close_writer(writer)


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a connection and wait until it is closed, since a loop that ends earlier would leave the socket open."""
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:  # the other side was quicker
        pass
    except asyncio.CancelledError:
        writer.transport.abort()  # the peer is slow to read the rest
        raise
