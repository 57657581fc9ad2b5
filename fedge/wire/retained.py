"""What a broker retains of each device, for commands that ask once and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from fedge.errors import TransportError
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

REACH_S: Final = 15.0
"""A broker that has not let us in by then counts as absent; one without MQTT 5 takes 2 s longer than others."""
QUIET_S: Final = 1.0
"""After so long without a message, all retained ones have come."""


@contextlib.asynccontextmanager
async def collect_retained(transport: Transport, topics: Topics, leaf: str) -> AsyncIterator[dict[str, bytes]]:
    """Connect, and collect what the devices have left on a topic; the transport is connected inside.

    `transport`: not yet entered. `leaf`: last level of the topic (`Topics.make_agent_topic`).

    Returns:
        The payload by device, without cleared ones.

    Raises:
        TransportError: the broker refused us for good, or cannot be reached.
    """
    said: dict[str, bytes] = {}
    news = asyncio.Event()

    async def record(inbound: Inbound) -> None:
        device = topics.split(inbound.topic)[1]
        if inbound.payload and device not in said:  # one that speaks without end holds nobody up
            news.set()
        if inbound.payload:
            said[device] = inbound.payload

    await transport.subscribe(topics.make_agent_topic("+", leaf), record)
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(REACH_S):
                await stack.enter_async_context(transport)
        except TimeoutError:
            raise TransportError(_explain_unreachable(transport)) from None
        with contextlib.suppress(TimeoutError):
            while True:  # retained messages come at once after the subscription
                async with asyncio.timeout(QUIET_S):
                    await news.wait()
                news.clear()
        yield said


def _explain_unreachable(transport: Transport) -> str:
    """Return why we are not let in; a broker that rejects our certificate just closes."""
    broker = transport.settings
    where = f"the broker at {broker.host}:{broker.port} cannot be reached"
    return where if broker.ca_file is None else f"{where}, or it does not accept our certificate (cert_file)"
