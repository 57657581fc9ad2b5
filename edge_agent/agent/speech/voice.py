"""Messages of an agent to its coordinator, queued until the broker takes them.

If another process that came later speaks as this device, this process is silent for a while.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edge_agent.agent.identity import Member
from fedge.errors import TransportError
from fedge.system.text import format_time
from fedge.wire.messages import Context, Report, Status, encode_message
from fedge.wire.transport import Transport

YIELD_BASE_S: Final = 30.0
YIELD_CAP_S: Final = 600.0
"""Longest silence of a process that hears another process speak as the same device. It is silent for 15 to 30 s, then
twice as long each time, at last 5 to 10 min, so that the other process can work."""
CHECK_TWIN: Final = (
    "another process speaks as this device: a second one of this --id, a copy of its card or container, or a stolen "
    "identity (fedge provision revoke). End one of the two; until then they take turns"
)


@dataclass(frozen=True, slots=True)
class Twin:
    """Another process that speaks as this device.

    since: when it was heard first, seconds since the epoch. heard_at: when it was heard last, by a monotonic clock.
    times: number of times in a row that we have given way.
    """

    incarnation: str
    since: float
    heard_at: float
    times: int


def compute_yield_s(times: int, draw: float) -> float:
    """Return how long to be silent for another process, for the 1st, 2nd, ... time in a row."""
    return min(YIELD_CAP_S, YIELD_BASE_S * 2.0 ** min(times - 1, 16)) * (1 + draw) / 2


@dataclass(eq=False)
class Publisher:
    """A publisher that speaks as one device: it queues and publishes the device's messages.

    Args:
        me: the device.
        transport: the transport to the broker.
        after_silence: called when this process may speak again after a silence.
    """

    me: Member
    transport: Transport
    after_silence: Callable[[], None]

    def __post_init__(self) -> None:
        self._outgoing: dict[str, tuple[str, bytes, bool]] = {}  # key -> topic, payload, retain
        self._sent: Counter[str] = Counter()  # how often the broker has taken each unanswered report, by order
        self._something_waits = asyncio.Event()
        self._twin: Twin | None = None
        self._silence: asyncio.TimerHandle | None = None  # the timer that ends our silence

    @property
    def silent(self) -> bool:
        """Whether this process is silent because another speaks."""
        return self._silence is not None

    def send(self, message: Status | Context | Report) -> None:
        """Queue a message in place of an earlier one with the same key, so that the queue is bounded."""
        if self.silent:
            return
        leaf = {Status: "status", Context: "context", Report: "reports"}[type(message)]
        key = message.order_id if isinstance(message, Report) else leaf
        payload = encode_message(self.me.rules.strip(message))
        self._outgoing[key] = (self.me.make_topic(leaf), payload, isinstance(message, Status))
        self._something_waits.set()

    def drop_report(self, order_id: str) -> None:
        """Stop sending a report."""
        self._outgoing.pop(order_id, None)
        self._sent.pop(order_id, None)

    def count_sent(self, order_id: str) -> int:
        """Return how often the broker has taken the report of an order."""
        return self._sent[order_id]

    async def publish_queued(self, unanswered: Callable[[str], bool]) -> None:
        """Publish messages one by one, endlessly. `unanswered`: (order id) -> whether its report is unanswered."""
        while True:
            await self._something_waits.wait()
            self._something_waits.clear()
            while self._outgoing:
                key = next(iter(self._outgoing))
                topic, payload, retain = self._outgoing.pop(key)
                try:
                    await self.transport.publish(topic, self.me.signed.seal(topic, payload), retain=retain)
                    if unanswered(key):
                        self._sent[key] += 1
                except TransportError as error:
                    # The broker's rules forbid this one; important messages are repeated, and the operator sees the
                    # reason.
                    self.me.events.log_event("publish_refused", logging.ERROR, topic=topic, detail=str(error))

    def pause(self, incarnation: str) -> None:
        """Be silent as this device for a while, because another process that came later speaks."""
        now = time.monotonic()
        lasts = self._twin is not None and now - self._twin.heard_at < 2 * YIELD_CAP_S
        before = self._twin if lasts else None
        since = time.time() if before is None or before.incarnation != incarnation else before.since
        self._twin = Twin(incarnation, since, now, 1 if before is None else before.times + 1)
        wait = compute_yield_s(self._twin.times, random.SystemRandom().random())
        self.me.events.log_event(
            "twin",
            logging.ERROR,
            incarnation=incarnation,
            since=format_time(since),
            again_in_s=round(wait),
            check=CHECK_TWIN,
        )
        self.resume()
        self._outgoing.clear()
        self._silence = asyncio.get_running_loop().call_later(wait, self.after_silence)

    def resume(self) -> None:
        """Speak again now, and cancel the end of the silence."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
