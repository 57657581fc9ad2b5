"""Collects the messages that a broker retains of each device, for commands that ask once and end."""

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
"""Time limit for connecting, after which the broker counts as absent; one without MQTT 5 takes 2 s more than others."""
QUIET_S: Final = 1.0
"""Time without a message after which all retained messages count as received."""


@contextlib.asynccontextmanager
async def collect_retained(transport: Transport, topics: Topics, leaf: str) -> AsyncIterator[dict[str, bytes]]:
    """Connect, and collect the devices' retained messages on a topic; inside the block the transport is connected.

    `transport` must not be entered yet. `leaf` is the last level of the topic (`Topics.make_agent_topic`).

    Returns:
        The payload by device, without cleared messages.

    Raises:
        TransportError: the broker refused us for good, or cannot be reached.
    """
    said: dict[str, bytes] = {}
    news = asyncio.Event()

    async def record(inbound: Inbound) -> None:
        device = topics.split(inbound.topic)[1]
        if inbound.payload and device not in said:  # a device that keeps publishing does not prolong the wait
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
    """Return why we are not let in; a broker that rejects our certificate closes without a reason."""
    broker = transport.settings
    where = f"the broker at {broker.host}:{broker.port} cannot be reached"
    return where if broker.ca_file is None else f"{where}, or it does not accept our certificate (cert_file)"
