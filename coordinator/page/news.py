"""News for open pages: events as they happen, in streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec
from aiohttp import web

from coordinator.page.answers import HEADERS, read_number
from coordinator.page.logins import Logins
from coordinator.store.records import Event
from coordinator.watch.words import make_event_values
from fedge.errors import StoreError

log = logging.getLogger("fedge.ui")

LOOK_S: Final = 0.5
"""Pause between two looks for news."""
MAX_STREAMS: Final = 50
"""Most pages that receive news at the same time."""
HEARTBEAT_S: Final = 5.0
"""Longest time for which a page that listens receives nothing."""
MAX_NEWS: Final = 1000
"""Most events that are sent to a page at once, the last ones."""
MAX_BEHIND: Final = 100
"""Most messages that wait for a page; a page that takes none for longer misses the next ones."""
Lines = list[tuple[int, bytes]]
"""Events by number, as lines of the stream. Empty if the news are of a rollout or of times."""


class ReadingThread(Protocol):
    """A function that has work done in the reading thread."""

    def __call__(self, work: Callable[[], Lines], /) -> Awaitable[Lines]:
        """Do the work and return its result."""


class EventFeed:
    """A feed of events to listeners, such as open pages.

    Args:
        read: has work done in the reading thread.
        events: reads the store's events, as `Store.get_events`.
        version: returns a value that changes with the rollouts.
        forget: called before each look for news.
        logins: the logins that decide who may listen.
    """

    def __init__(
        self,
        read: ReadingThread,
        events: Callable[..., list[Event]],
        version: Callable[[], object],
        forget: Callable[[], None],
        logins: Logins,
    ) -> None:
        self._read = read
        self._events = events
        self._version = version
        self._forget = forget
        self._logins = logins
        self._streams: dict[asyncio.Queue[Lines | None], bool] = {}  # whether it has logged in; the oldest first
        self._sent = 0  # number of the last event that streams were told of

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._streams)

    def close(self) -> None:
        """End all streams."""
        for queue in self._streams:
            queue.put_nowait(None)

    async def publish_new(self) -> None:
        """Send news to all listeners."""
        rollouts = self._version()
        while True:
            await asyncio.sleep(LOOK_S)
            if rollouts != (rollouts := await asyncio.to_thread(self._version)):
                self.send([])
            try:
                new = await self._read(self._read_unsent)
            except StoreError as error:
                log.warning("event=cannot_read reason=%r", str(error))
                continue
            if new:
                self.send(new)

    def _read_unsent(self) -> Lines:
        """Read what has happened since the last look; nothing is read if no page is open."""
        self._forget()
        new = self._events(after=self._sent, last=MAX_NEWS if self._streams else 1)
        self._sent = new[-1].number if new else self._sent
        return _encode_lines(new)

    def send(self, news: Lines) -> None:
        """Send news to all listeners."""
        for queue in self._streams:
            if queue.qsize() < MAX_BEHIND:
                queue.put_nowait(news)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream events as they occur."""
        known = self._logins.knows(request)
        if len(self._streams) >= MAX_STREAMS:
            self._drop_stream(known=known)
        last = request.headers.get("Last-Event-ID", "")
        follows = last.isdecimal() and len(last) < 19
        after = int(last) if follows else read_number(request, "after", 0, 1 << 62)
        answer = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        queue: asyncio.Queue[Lines | None] = asyncio.Queue()
        self._streams[queue] = known
        try:
            await answer.prepare(request)
            if missed := await self._read(lambda: _encode_lines(self._events(after=after, last=MAX_NEWS))):
                await answer.write(b"".join(line for _, line in missed))
                after, _ = missed[-1]
            while True:
                new: Lines | None = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        new = await queue.get()
                if new is None or not self._logins.may_read(request):  # revoked meanwhile, or logged in too long ago
                    return answer
                if not new:
                    await answer.write(b"event: state\ndata: {}\n\n")
                elif lines := b"".join(line for number, line in new if number > after):
                    await answer.write(lines)
        except ConnectionError:
            return answer
        finally:
            self._streams.pop(queue, None)

    def _drop_stream(self, *, known: bool) -> None:
        """Make room for a stream; somebody who has logged in replaces the oldest stream of somebody who has not.

        Raises:
            web.HTTPServiceUnavailable: no stream can be dropped.
        """
        oldest = next((queue for queue, theirs in self._streams.items() if known and not theirs), None)
        if oldest is None:
            raise web.HTTPServiceUnavailable(text="too many pages are open; who logs in has a place before who has not")
        del self._streams[oldest]
        oldest.put_nowait(None)


def _encode_lines(events: list[Event]) -> Lines:
    return [
        (each.number, b"id: %d\ndata: %b\n\n" % (each.number, msgspec.json.encode(make_event_values(each))))
        for each in events
    ]
