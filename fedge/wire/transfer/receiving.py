"""The bookkeeping of a receiver: which bytes of a blob are missing, and which to request now. No IO, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fedge.errors import ProtocolError
from fedge.wire.connection.packet_limits import LARGE_CHUNK, LEAST_PACKET, PACKET_OVERHEAD, SMALL_CHUNK
from fedge.wire.transfer.ranges import MAX_PIECES, MAX_RANGES, Range, Ranges

ASK_BYTES: Final = 8 * 1024 * 1024
"""Most bytes under way in one fetch: 60 ms at 1 GbE, and far below a broker's queue limit."""
STALL_S: Final = 3.0
"""Time without a new chunk after which the requested bytes count as lost. It doubles up to `STALL_CAP_S` where chunks
need longer."""
STALL_CAP_S: Final = 12.0
STEP_BYTES: Final = SMALL_CHUNK
"""New bytes that count as progress, unless the largest chunk of this fetch is smaller or all requested bytes have come.
Fewer bytes do not count, because a stranger who sends a byte now and then (on a broker that admits everybody) would
keep a receiver from requesting lost bytes again. The receiver measures the chunks, since only the sender may know how
small they must be."""
LEAST_CHUNK: Final = LEAST_PACKET - PACKET_OVERHEAD
"""Smallest chunk that counts as one; our senders cut none smaller, and a stranger's do not make progress cheaper."""


class Receiving:
    """Tracks which bytes of a blob are missing, and chooses which to request now. No IO, no clock."""

    def __init__(self, size_bytes: int, have: Iterable[Range] = ()) -> None:
        self.size_bytes = size_bytes
        self.patience_s = STALL_S
        """Seconds without a new chunk after which `record_stalled` must be called."""
        self._missing = Ranges([(0, size_bytes)])
        self._asked = Ranges()
        self._unsafe_bytes = 0
        self._since_step = 0
        self._chunk_bytes = LEAST_CHUNK
        self._ask_bytes = ASK_BYTES
        for start, end in have:
            self._missing.remove(start, end)

    @property
    def complete(self) -> bool:
        """Whether all bytes are stored; the digest decides whether they are right."""
        return not self._missing and not self._unsafe_bytes

    @property
    def missing(self) -> tuple[Range, ...]:
        """The ranges that have not arrived, in order."""
        return tuple(self._missing)

    @property
    def under_way(self) -> int:
        """The number of bytes requested but not yet stored."""
        return self._asked.n_bytes

    def record_arrived(self, offset: int, length: int) -> list[Range]:
        """Return the missing parts of a chunk, to be stored and then reported to `record_stored`.

        Raises:
            ProtocolError: `out-of-range` if the chunk is empty or reaches beyond the blob; `fragmented` if there would
                be too many gaps.
        """
        if offset < 0 or length < 1 or offset + length > self.size_bytes:
            raise ProtocolError(
                "out-of-range", f"a chunk of {length} bytes at {offset} does not fit a blob of {self.size_bytes}"
            )
        new, n_before = self._missing.find_overlap(offset, offset + length), len(self._missing)
        self._missing.remove(offset, offset + length)
        if n_before < len(self._missing) > MAX_PIECES:
            self._missing.add(offset, offset + length)  # all of it was missing
            raise ProtocolError(
                "fragmented", f"a chunk of {length} bytes at {offset} would add a gap to {n_before} others"
            )
        self._unsafe_bytes += sum(end - start for start, end in new)
        self._chunk_bytes = max(self._chunk_bytes, length)
        return new

    def record_stored(self, start: int, end: int) -> None:
        """Mark [start, end), which had arrived, as stored."""
        self._unsafe_bytes -= end - start
        self._since_step += end - start
        self._asked.remove(start, end)
        self._ask_bytes = min(ASK_BYTES, self._ask_bytes * 2)

    def has_advanced(self) -> bool:
        """Return whether enough bytes were stored since this last returned True (`STEP_BYTES`)."""
        if found := self._since_step >= min(STEP_BYTES, self._chunk_bytes) or not self._asked:
            self._since_step = 0
        return found

    def request_ranges(self, budget: int, max_ranges: int = MAX_RANGES) -> tuple[Range, ...]:
        """Return the ranges to request now, in order; none while half of the allowance is under way.

        Args:
            budget: bytes that other fetches leave us; one chunk is requested even if none, so that all make progress.
            max_ranges: most ranges of one Want.
        """
        under_way = self.under_way
        if under_way > self._ask_bytes // 2:
            return ()
        room = max(min(self._ask_bytes - under_way, budget), 0 if under_way else LARGE_CHUNK)
        free = Ranges(self._missing)
        for start, end in self._asked:
            free.remove(start, end)
        chosen: list[Range] = []
        for start, end in free:
            if room <= 0 or len(chosen) == max_ranges:
                break
            chosen.append((start, min(end, start + room)))
            room -= end - start
        for start, end in chosen:
            self._asked.add(start, end)
        return tuple(chosen)

    def record_lost(self) -> None:
        """Record that the connection broke, so that nothing is under way any more."""
        self._asked = Ranges()

    def record_stalled(self) -> None:
        """Restart with one chunk because nothing came in time; the sender may be gone, and others need the room."""
        self.record_lost()
        self._ask_bytes = LARGE_CHUNK
        self.patience_s = min(STALL_CAP_S, self.patience_s * 2)
