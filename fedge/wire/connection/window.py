"""The publishes that wait to be sent, and those sent but not yet acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

OUT_WINDOW: Final = 8
"""Most unacknowledged publishes, unless the server's Receive Maximum is smaller. A larger window gained nothing."""


@dataclass(slots=True, eq=False)
class Publish:
    """An outgoing message. The broker's acknowledgement resolves `done`."""

    topic: str
    payload: bytes
    retain: bool
    expires_in_s: int | None
    correlation: bytes | None
    done: asyncio.Future[None]
    chunk: bool = False
    """Whether the caller can send the payload in smaller pieces."""
    number: int = 0
    """Number of the message in the transport, in the order in which callers published."""

    @property
    def packet_bytes(self) -> int:
        """An upper estimate of the packet's size in bytes."""
        # Fixed header 5, topic length 2, packet id 2, properties 9, and 3 more for an answer.
        return len(self.payload) + len(self.topic.encode()) + len(self.correlation or b"") + 21


class Window:
    """A queue of publishes, of which at most `limit` are unacknowledged. No IO; packet ids come from outside.

    A permit belongs to the packet, not to the caller, and returns with the acknowledgement. So cancelling the caller of
    a publish in flight neither loses the permit nor frees it twice.
    """

    def __init__(self) -> None:
        self.limit = OUT_WINDOW
        self._waiting: deque[Publish] = deque()
        self._in_flight: dict[int, Publish] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    def add(self, publish: Publish) -> None:
        """Queue a publish at the end."""
        self._waiting.append(publish)

    def take_next(self) -> Publish | None:
        """Take the next publish that may be sent, or None; publishes whose caller gave up are skipped."""
        while self._waiting and len(self._in_flight) < self.limit:
            publish = self._waiting.popleft()
            if not publish.done.done():
                return publish
        return None

    def record_sent(self, packet_id: int, publish: Publish) -> None:
        """Record that the publish was sent with this packet id."""
        self._in_flight[packet_id] = publish

    def take_acknowledged(self, packet_id: int) -> Publish | None:
        """Free a packet's permit and return its publish, or None if the id is unknown."""
        return self._in_flight.pop(packet_id, None)

    @property
    def in_flight(self) -> tuple[Publish, ...]:
        """The publishes that were sent but not acknowledged, in order."""
        return tuple(self._in_flight.values())

    def repeat(self, publish: Publish) -> None:
        """Queue a publish again, before all others, because the broker did not take it."""
        self._waiting.appendleft(publish)

    def record_lost(self) -> None:
        """Record that the connection broke, so that unacknowledged publishes are sent first on the next one."""
        self._waiting.extendleft(p for p in reversed(self._in_flight.values()) if not p.done.done())
        self._in_flight.clear()
