"""Limits on the packets that a broker takes: the announced one, and those found by trying."""

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
"""Chunk size in bytes where the broker announces no limit. Nearly any broker takes 64 KiB; lower limits are found by
trying."""
PACKET_OVERHEAD: Final = 1024
"""Bytes of a packet that are kept free for its header, topic and properties."""
LEAST_PACKET: Final = 4096
"""Packet size in bytes that every broker must take; signed messages and certificates need as much."""
BROKE_UNDER: Final = 2
"""Connections in a row that break under a chunk before chunks are halved, since some brokers only hang up."""


def compute_chunk_bytes(max_packet_bytes: int | None) -> int:
    """Return the chunk payload size in bytes under a packet limit of at least `LEAST_PACKET`, or None for no limit."""
    return SMALL_CHUNK if max_packet_bytes is None else min(LARGE_CHUNK, max_packet_bytes - PACKET_OVERHEAD)


class PacketLimits:
    """The limits of a broker: the announced one, and those learned from chunks that it refused, broke under or took."""

    def __init__(self, broker: str) -> None:
        self._broker = broker
        self.max_packet_bytes: int | None = None
        """Size of the largest packet that the broker takes; None if it announced no limit."""
        self.taken_bytes = 0
        """Size of the largest chunk that the broker took on this connection."""
        self.unfit = ""
        """Why fedge cannot use this broker; empty if it can."""
        self._chunk_limit = LARGE_CHUNK  # halved and doubled by what connections have taken (`record_ending`)
        self._broke_under = 0  # connections in a row that broke under a chunk
        self._refused_bytes = sys.maxsize  # size of the smallest packet that was too large

    @property
    def chunk_bytes(self) -> int:
        """The chunk payload size in bytes, which is halved when a chunk is refused and grows back slowly."""
        return min(compute_chunk_bytes(self.max_packet_bytes), self._chunk_limit)

    def record_taken(self, publish: Publish) -> None:
        """Record that the broker took this publish."""
        if publish.chunk:
            self.taken_bytes = max(self.taken_bytes, len(publish.payload))

    def record_ending(self, ending: Ending, unanswered: Sequence[Publish]) -> None:
        """Learn about the broker's limits from a connection that ended with these unanswered publishes.

        If that connection took chunks of the present size, the next one tries twice that size. The cause of the limit
        may have been a bad network, or the broker may be another one now. If the limit still exists, this costs a
        refused chunk or two broken connections. Beginning with the full size again would cost all halvings, and trying
        more while a connection lasts could break what works.
        """
        chunk = max((len(publish.payload) for publish in unanswered if publish.chunk), default=0)
        taken = self.taken_bytes >= self.chunk_bytes
        if ending.code != TOO_LARGE:
            self._refused_bytes = sys.maxsize  # the broker's limit may be another one now
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
        """Record that the broker refused this publish for its size."""
        self._refused_bytes = min(self._refused_bytes, publish.packet_bytes)
        if publish.packet_bytes <= LEAST_PACKET:
            self.unfit = f"it takes no packet of {publish.packet_bytes:,} bytes, fedge needs {LEAST_PACKET:,}; {reason}"
        else:
            self._halve(len(publish.payload), reason)

    def _halve(self, n_bytes: int, reason: str) -> None:
        """Limit chunks to half of `n_bytes` from now on."""
        self._broke_under = 0
        if (limit := max(LEAST_PACKET - PACKET_OVERHEAD, n_bytes // 2)) < self.chunk_bytes:
            self._chunk_limit = limit
            log.warning("event=smaller_chunks broker=%s bytes=%d reason=%r", self._broker, limit, reason)

    def check(self, publish: Publish) -> None:
        """Refuse a publish that is too large for the broker, as far as we know.

        Raises:
            TooLargeError: the packet exceeds the broker's announced or detected limit.
        """
        size = publish.packet_bytes
        if self.max_packet_bytes is not None and size > self.max_packet_bytes:
            raise TooLargeError(
                f"{publish.topic}: packet of {size} bytes, the broker takes {self.max_packet_bytes}: "
                f"{MEANINGS[TOO_LARGE].do}"
            )
        if size >= self._refused_bytes or (publish.chunk and len(publish.payload) > self.chunk_bytes):
            raise TooLargeError(f"{publish.topic}: packet of {size} bytes; the broker refused one of that size")
