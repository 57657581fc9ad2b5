"""Which packets a broker takes: what it announces, and what is found out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Final

from fedge.errors import TooLargeError
from fedge.wire.connection.reasons import MEANINGS, TOO_LARGE
from fedge.wire.connection.refusals import LOST, NOT_MQTT, UNTOLD, Ending
from fedge.wire.connection.window import Publish

log = logging.getLogger("fedge.transport")

LARGE_CHUNK: Final = 512 * 1024
SMALL_CHUNK: Final = 64 * 1024
"""Chunks where the broker announces no limit: nearly any broker takes 64 KiB; others are found out."""
PACKET_OVERHEAD: Final = 1024
"""Kept free of a packet for its header, topic and properties."""
LEAST_PACKET: Final = 4096
"""A broker that takes no such packet is refused: signed messages and certificates need as much."""
BROKE_UNDER: Final = 2
"""After so many connections in a row that broke under a chunk, chunks are halved: some brokers only hang up."""


def compute_chunk_bytes(max_packet_bytes: int | None) -> int:
    """Return the chunk payload size under a packet limit, at least `LEAST_PACKET` (None: no limit)."""
    return SMALL_CHUNK if max_packet_bytes is None else min(LARGE_CHUNK, max_packet_bytes - PACKET_OVERHEAD)


class PacketLimits:
    """What one broker takes: its announced limit, and the chunks that it refused, broke under, or took."""

    def __init__(self, broker: str) -> None:
        self._broker = broker
        self.max_packet_bytes: int | None = None
        """Largest packet that the broker takes; None: it announced nothing."""
        self.taken_bytes = 0
        """Size of the largest chunk that the broker took on this connection."""
        self.unfit = ""
        """Why fedge cannot use this broker; empty: it can."""
        self._chunk_limit = LARGE_CHUNK  # halved and doubled by what connections have taken (`record_ending`)
        self._broke_under = 0  # connections in a row that broke under a chunk
        self._refused_bytes = sys.maxsize  # of the smallest packet that was too large

    @property
    def chunk_bytes(self) -> int:
        """The chunk payload size, which is halved when a chunk is refused and grows back slowly."""
        return min(compute_chunk_bytes(self.max_packet_bytes), self._chunk_limit)

    def record_taken(self, publish: Publish) -> None:
        """Note that the broker took this one."""
        if publish.chunk:
            self.taken_bytes = max(self.taken_bytes, len(publish.payload))

    def record_ending(self, ending: Ending, unanswered: Sequence[Publish]) -> None:
        """Note what a connection that broke under these says of the broker's limits.

        If it took chunks of the present size, the next one tries the double: the cause may have been a bad network, or
        the broker may be another one by now. Where the limit is still there, that costs a refused chunk or two broken
        connections. To begin with the full size again would cost the whole way down, and to try more while a connection
        lasts could break what works.
        """
        chunk = max((len(publish.payload) for publish in unanswered if publish.chunk), default=0)
        taken = self.taken_bytes >= self.chunk_bytes
        if ending.code != TOO_LARGE:
            self._refused_bytes = sys.maxsize  # its limit may be another by now
            if taken:
                self._chunk_limit = min(LARGE_CHUNK, 2 * self._chunk_limit)
        elif unanswered:
            self.record_refused(max(unanswered, key=lambda publish: publish.packet_bytes), ending.reason)
        if chunk and not taken and (ending.code in UNTOLD or ending.reason in (LOST, NOT_MQTT)):
            self._broke_under += 1
            if self._broke_under == BROKE_UNDER:
                self._halve(chunk, ending.reason)
        else:
            self._broke_under = 0

    def record_refused(self, publish: Publish, reason: str) -> None:
        """Note that the broker refused this one for its size."""
        self._refused_bytes = min(self._refused_bytes, publish.packet_bytes)
        if publish.packet_bytes <= LEAST_PACKET:
            self.unfit = f"it takes no packet of {publish.packet_bytes:,} bytes, fedge needs {LEAST_PACKET:,}; {reason}"
        else:
            self._halve(len(publish.payload), reason)

    def _halve(self, n_bytes: int, reason: str) -> None:
        """Send chunks of half so many bytes at most from now on."""
        self._broke_under = 0
        if (limit := max(LEAST_PACKET - PACKET_OVERHEAD, n_bytes // 2)) < self.chunk_bytes:
            self._chunk_limit = limit
            log.warning("event=smaller_chunks broker=%s bytes=%d reason=%r", self._broker, limit, reason)

    def check(self, publish: Publish) -> None:
        """Refuse what is too large for the broker, so far as we know.

        Raises:
            TooLargeError: the packet exceeds the broker's limit, as announced or found out.
        """
        size = publish.packet_bytes
        if self.max_packet_bytes is not None and size > self.max_packet_bytes:
            raise TooLargeError(
                f"{publish.topic}: packet of {size} bytes, the broker takes {self.max_packet_bytes}: "
                f"{MEANINGS[TOO_LARGE].do}"
            )
        if size >= self._refused_bytes or (publish.chunk and len(publish.payload) > self.chunk_bytes):
            raise TooLargeError(f"{publish.topic}: packet of {size} bytes; the broker refused one of that size")
