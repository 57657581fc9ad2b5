"""The bookkeeping of a sender, which chooses the next chunk to publish. No IO, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fedge.errors import ProtocolError
from fedge.wire.transfer.ranges import MAX_PIECES, Range, Ranges

Key = tuple[str, str]
"""A blob to be sent: its digest, and the topic filter of its chunks."""
Listener = tuple[str, int]
"""A subscription to the chunks of a blob: the device, and the number that it drew (`Want.listening`)."""
SENT_BLOBS: Final = 64
"""Most blobs whose published ranges a sender remembers."""
LISTENERS: Final = 1024
"""Most subscriptions to one blob that a sender remembers. For a forgotten one, chunks already on their way are sent
again."""


@dataclass(slots=True)
class _Outgoing:
    """A blob that receivers have requested: ranges to send, ranges held back, and ranges already published."""

    due: Ranges = field(default_factory=Ranges)
    held: Ranges = field(default_factory=Ranges)
    published: Ranges = field(default_factory=Ranges)
    on_the_way: OrderedDict[Listener, Ranges] = field(default_factory=OrderedDict)
    """Ranges published since each listener's first Want; the listener gets them unasked, as it gets all chunks."""


class Sending:
    """Chooses the next chunk to publish. Overlapping wants are merged while they wait, and blobs take turns. No IO."""

    def __init__(self) -> None:
        self._blobs: OrderedDict[Key, _Outgoing] = OrderedDict()  # most recently requested last
        self._turns: OrderedDict[Key, None] = OrderedDict()  # blobs with something due

    def add_want(self, key: Key, ranges: Iterable[Range], listener: Listener | None = None) -> bool:
        """Queue byte ranges; return True if some were published before and now wait for `release`.

        Ranges already on their way to this listener, because others requested them, are not queued.

        Raises:
            ProtocolError: `fragmented` if too many pieces are waiting already.
        """
        blob = self._blobs.setdefault(key, _Outgoing())
        if len(blob.due) + len(blob.held) > MAX_PIECES:
            raise ProtocolError("fragmented", f"{len(blob.due) + len(blob.held)} pieces of {key[0]} already wait")
        self._blobs.move_to_end(key)
        on_the_way = blob.on_the_way.get(listener, Ranges()) if listener else Ranges()
        for start, end in ranges:
            fresh = Ranges([(start, end)])
            for low, high in on_the_way.find_overlap(start, end):
                fresh.remove(low, high)
            for part in tuple(fresh):
                for low, high in blob.published.find_overlap(*part):
                    blob.held.add(low, high)
                    fresh.remove(low, high)
            for low, high in fresh:
                blob.due.add(low, high)
        if listener and listener not in blob.on_the_way:
            blob.on_the_way[listener] = Ranges()
            if len(blob.on_the_way) > LISTENERS:
                blob.on_the_way.popitem(last=False)
        if blob.due:
            self._turns.setdefault(key)
        self._forget_old()
        return bool(blob.held)

    def release(self, key: Key) -> None:
        """Queue the ranges that were held back, for all receivers that requested them meanwhile."""
        blob = self._blobs.get(key)
        if blob is not None and blob.held:
            for start, end in blob.held:
                blob.due.add(start, end)
            blob.held = Ranges()
            self._turns.setdefault(key)

    def take_next(self, chunk_bytes: int) -> tuple[Key, int, int] | None:
        """Take the next chunk of at most `chunk_bytes`: its blob's key, start and end; None if nothing is due."""
        if not self._turns:
            return None
        key, _ = self._turns.popitem(last=False)
        blob = self._blobs[key]
        start, end = next(iter(blob.due))
        stop = min(end, start + chunk_bytes)
        blob.due.remove(start, stop)
        blob.published.add(start, stop)
        if len(blob.published) > MAX_PIECES:  # merge; the gaps are then held back once, too
            (low, _), *_, (_, high) = blob.published
            blob.published = Ranges([(low, high)])
        for listener, ranges in tuple(blob.on_the_way.items()):
            ranges.add(start, stop)
            if len(ranges) > MAX_PIECES:
                del blob.on_the_way[listener]
        if blob.due:
            self._turns[key] = None
        return key, start, stop

    def requeue(self, key: Key, start: int, end: int) -> None:
        """Queue a chunk that the broker refused again; no effect if the blob was dropped meanwhile."""
        if (blob := self._blobs.get(key)) is not None:
            blob.due.add(start, end)
            self._turns.setdefault(key)

    def drop(self, key: Key) -> None:
        """Forget a blob and all wants for it."""
        self._blobs.pop(key, None)
        self._turns.pop(key, None)

    def _forget_old(self) -> None:
        if len(self._blobs) > SENT_BLOBS:
            idle = [key for key, blob in self._blobs.items() if not blob.due and not blob.held]
            for key in idle[: len(self._blobs) - SENT_BLOBS]:
                del self._blobs[key]
