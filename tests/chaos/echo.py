"""Somebody at the broker who writes down what is said, and says old messages again, in any order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from types import TracebackType
from typing import Final, Self

from fedge.errors import TransportError
from fedge.membership.signed_messages import open_unverified
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

LEAVES: Final = ("orders", "reports", "acks", "context", "wants", "status")
KEPT: Final = 2000
"""Messages to say again; all are written down."""


class Echo:
    """Async context manager. `said`: every distinct message by topic leaf, without its envelope."""

    def __init__(self, broker: BrokerSettings, federation: str, rng: random.Random) -> None:
        self.said: dict[str, set[bytes]] = defaultdict(set)
        self.n_repeated = 0
        self._topics = Topics(federation)
        self._transport = Transport(broker, f"echo:{federation}")
        self._rng = rng
        self._heard: set[bytes] = set()
        self._old: list[tuple[str, bytes]] = []
        self._repeating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        for leaf in LEAVES:
            await self._transport.subscribe(self._topics.make_agent_topic("+", leaf), self._hear)
        await self._transport.subscribe(self._topics.make_wants_topic("+"), self._hear)
        await self._transport.__aenter__()
        self._repeating = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._repeating is not None
        self._repeating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._repeating
        await self._transport.__aexit__(kind, error, trace)

    async def _hear(self, inbound: Inbound) -> None:
        if inbound.payload in self._heard:
            return
        self._heard.add(inbound.payload)
        self.said[inbound.topic.rpartition("/")[2]].add(open_unverified(inbound.payload))
        self._old = [*self._old[-KEPT:], (inbound.topic, inbound.payload)]

    async def _repeat(self) -> None:
        """Old messages again, mostly of a moment ago, in any order, many of them more than once."""
        while True:
            await asyncio.sleep(self._rng.expovariate(4.0))
            recent = self._old[-40:] if self._rng.random() < 0.8 else self._old
            for topic, payload in self._rng.sample(recent, min(len(recent), self._rng.randint(1, 5))):
                with contextlib.suppress(TransportError):
                    await self._transport.publish(topic, payload)
                    self.n_repeated += 1
