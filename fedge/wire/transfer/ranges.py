"""Sets of byte offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final

Range = tuple[int, int]
"""A range of byte offsets, [start, end)."""
MAX_RANGES: Final = 256
"""Most ranges in one Want (`fedge.wire.messages`)."""
MAX_PIECES: Final = 4096
"""Most gaps of an incoming blob, and most pieces of an outgoing one; senders that send in order leave few gaps."""


class Ranges:
    """A set of byte offsets, kept as sorted disjoint ranges [start, end)."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    @property
    def n_bytes(self) -> int:
        """The number of offsets in the set."""
        return sum(end - start for start, end in self._ranges)

    def find_overlap(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that are in the set."""
        found = []
        for low, high in self._ranges[max(bisect_right(self._ranges, (start, start)) - 1, 0) :]:
            if low >= end:
                break
            if high > start:
                found.append((max(low, start), min(high, end)))
        return found

    def add(self, start: int, end: int) -> None:
        """Add [start, end); touching ranges are merged."""
        if start >= end:
            return
        first = bisect_left(self._ranges, start, key=_end)
        last = bisect_right(self._ranges, end, key=_start)
        if first < last:
            start, end = min(start, self._ranges[first][0]), max(end, self._ranges[last - 1][1])
        self._ranges[first:last] = [(start, end)]

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end), whether present or not."""
        if start >= end:
            return
        first = bisect_right(self._ranges, start, key=_end)
        last = bisect_left(self._ranges, end, key=_start)
        if first < last:
            kept = ((self._ranges[first][0], start), (end, self._ranges[last - 1][1]))
            self._ranges[first:last] = [(low, high) for low, high in kept if low < high]


_start, _end = itemgetter(0), itemgetter(1)
