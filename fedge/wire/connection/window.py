"""What waits to go out, and what went out without an acknowledgement so far."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

OUT_WINDOW: Final = 8
"""Unacknowledged publishes, unless the server's Receive Maximum is smaller. More gained nothing."""


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
    """Whether its caller can send the same in smaller pieces."""
    number: int = 0
    """Of the transport's messages, in the order of its callers."""

    @property
    def packet_bytes(self) -> int:
        """The size of its packet in bytes, estimated upwards."""
        # Fixed header 5, topic length 2, packet id 2, properties 9, and 3 more for an answer.
        return len(self.payload) + len(self.topic.encode()) + len(self.correlation or b"") + 21


class Window:
    """Publishes in order, at most `limit` of them unacknowledged. No IO: packet ids come from outside.

    A permit belongs to the packet, not to the caller, and returns with the acknowledgement: cancelling the caller of a
    publish in flight neither leaks the permit nor lends it out twice.
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
        """Take the next publish that may go out, if any; those whose caller gave up are skipped."""
        while self._waiting and len(self._in_flight) < self.limit:
            publish = self._waiting.popleft()
            if not publish.done.done():
                return publish
        return None

    def record_sent(self, packet_id: int, publish: Publish) -> None:
        """Record that the publish went out under this id."""
        self._in_flight[packet_id] = publish

    def take_acknowledged(self, packet_id: int) -> Publish | None:
        """Return a packet's permit; None if the id is unknown."""
        return self._in_flight.pop(packet_id, None)

    @property
    def in_flight(self) -> tuple[Publish, ...]:
        """What went out and was not acknowledged, in order."""
        return tuple(self._in_flight.values())

    def repeat(self, publish: Publish) -> None:
        """Send an acknowledged publish first of all once more: the broker did not take it."""
        self._waiting.appendleft(publish)

    def record_lost(self) -> None:
        """Record that the connection broke: unacknowledged publishes go first on the next."""
        self._waiting.extendleft(p for p in reversed(self._in_flight.values()) if not p.done.done())
        self._in_flight.clear()
