"""News for open pages: that something has happened, in streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from coordinator.page.answers import HEADERS
from coordinator.page.logins import Logins
from fedge.errors import StoreError

log = logging.getLogger("fedge.ui")

LOOK_S: Final = 0.5
"""Pause between two looks for news."""
MAX_STREAMS: Final = 50
"""Most pages that receive news at the same time."""
HEARTBEAT_S: Final = 5.0
"""Longest time for which a page that listens receives nothing."""
NEWS: Final = b"event: news\ndata: {}\n\n"


class ReadingThread(Protocol):
    """A function that has work done in the reading thread."""

    def __call__(self, work: Callable[[], int], /) -> Awaitable[int]:
        """Do the work and return its result."""


class NewsFeed:
    """A feed that tells listeners, such as open pages, that there is news; what it is they ask for.

    Args:
        read: has work done in the reading thread.
        find_last: returns the number of the last event.
        version: returns a value that changes with the rollouts.
        forget: called before each look for news.
        logins: the logins that decide who may listen.
    """

    def __init__(
        self,
        read: ReadingThread,
        find_last: Callable[[], int],
        version: Callable[[], object],
        forget: Callable[[], None],
        logins: Logins,
    ) -> None:
        self._read = read
        self._find_last = find_last
        self._version = version
        self._forget = forget
        self._logins = logins
        self._streams: dict[asyncio.Queue[bool], bool] = {}  # whether it has logged in; the oldest first

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._streams)

    def close(self) -> None:
        """End all streams."""
        for queue in self._streams:
            _send_word(queue, goes_on=False)

    async def publish_new(self) -> None:
        """Tell all listeners of news."""
        rollouts, last = self._version(), 0
        while True:
            await asyncio.sleep(LOOK_S)
            if rollouts != (rollouts := await asyncio.to_thread(self._version)):
                self.send()
            try:
                if last != (last := await self._read(self._find_news)):
                    self.send()
            except StoreError as error:
                log.warning("event=cannot_read reason=%r", str(error))

    def _find_news(self) -> int:
        self._forget()
        return self._find_last()

    def send(self) -> None:
        """Tell all listeners that there is news; who has not taken the last one has it still before them."""
        for queue in self._streams:
            if queue.empty():
                queue.put_nowait(True)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Tell of news as long as the listener stays, and from time to time without any."""
        known = self._logins.knows(request)
        if len(self._streams) >= MAX_STREAMS:
            self._drop_stream(known=known)
        answer = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        queue: asyncio.Queue[bool] = asyncio.Queue()
        self._streams[queue] = known
        try:
            with contextlib.suppress(ConnectionError):
                await answer.prepare(request)
                goes_on = True
                while goes_on and self._logins.may_read(request):  # revoked meanwhile, or logged in too long ago
                    await answer.write(NEWS)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HEARTBEAT_S):
                            goes_on = await queue.get()
        finally:
            self._streams.pop(queue, None)
        return answer

    def _drop_stream(self, *, known: bool) -> None:
        """Make room for a stream; somebody who has logged in replaces the oldest stream of somebody who has not.

        Raises:
            web.HTTPServiceUnavailable: no stream can be dropped.
        """
        oldest = next((queue for queue, theirs in self._streams.items() if known and not theirs), None)
        if oldest is None:
            raise web.HTTPServiceUnavailable(text="too many pages are open; who logs in has a place before who has not")
        del self._streams[oldest]
        _send_word(oldest, goes_on=False)


def _send_word(queue: asyncio.Queue[bool], *, goes_on: bool) -> None:
    """Put a word for a stream before what waits there."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(goes_on)
