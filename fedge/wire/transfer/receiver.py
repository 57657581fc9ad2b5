"""Blobs over MQTT: the receiver requests byte ranges, the sender publishes each chunk once for all receivers.

    receiver                                   sender
    subscribe chunks/+                         source(digest) -> file
    Want(digest, missing ranges)  ──────────▶  queue, merged with others' wants
    write, record, hash           ◀──────────  chunks/{offset}: bytes, in order, for all subscribers
    stalled: Want again what is missing
    complete: SHA-256, rename into the folder

The Want follows the subscription at once. One TCP connection keeps the order, so the receiver gets every chunk that is
published after the first Want of a subscription, whoever requested the chunk.

A chunk is written and hashed on the event loop as it arrives, which takes 0.4 ms on a PC. A hop to a thread costs as
much, and more if all cores are busy. The bytes go to the page cache; only fsync and reading an earlier receiver's
leftovers wait for the disk, so these run in a thread.

Nothing here relies on the broker's delivery: a lost chunk is requested again, a duplicate changes nothing, and chunks
may come in any order. `Ranges`, `Receiving` and `Sending` decide, without clock or files; `Receiver` and `Sender` act.

A partial blob survives kill -9 of its receiver as two files in the blob folder: `{digest}.part` holds the bytes, and
`{digest}.ranges` lists which of them are valid. The list has a line for each chunk, written after the chunk's bytes, or
fewer lines if chunks are many and small. After a power cut the list may name bytes that never reached the disk; then
the hash does not match, and the blob is fetched again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from fedge.errors import ProtocolError, StoreError, raise_as
from fedge.system.files import BlobFolder
from fedge.wire.connection.broker import Inbound
from fedge.wire.connection.packet_limits import LARGE_CHUNK, PACKET_OVERHEAD
from fedge.wire.messages import BlobRef, Want, encode_message
from fedge.wire.transfer.partial_blob import PartialBlob
from fedge.wire.transfer.ranges import MAX_RANGES
from fedge.wire.transfer.receiving import Receiving
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.transfer")

TOTAL_ASK_BYTES: Final = 32 * 1024 * 1024
"""Most bytes requested at a time by all fetches of a receiver together, so that a cohort that uploads at once does not
overflow the broker's queue."""
ANSWER_CAP_S: Final = 30.0
"""Longest wait before a chunk counts as lost. Many transfers that share a broker or a sender wait for their turns, so
the wait is twice the present response time, up to this limit."""
MAX_ATTEMPTS: Final = 3
"""Complete transfers with a wrong digest after which the blob is given up."""
MAX_BLOB_BYTES: Final = 4 * 1024**3
"""Default limit on a blob's size; a role that knows its models sets a lower limit."""
RANGE_BYTES: Final = 19
"""Most bytes of one range in a Want."""
MEASURED_BYTES: Final = 64 * 1024
"""Smallest transfer whose rate is measured; shorter ones depend more on delays than on the link's rate."""
MEASURED: Final = 5
"""Number of latest transfers whose median rate counts, so that one slow transfer (a broken connection, a busy sender)
changes little."""
WHOLE_STALLS: Final = 3
"""Stalls after which pieces of a blob are accepted again though some were wrong, since a sender on a busy machine
answers late."""
PART_KEPT_S: Final = 24 * 3600.0
"""Age after which untouched partial blobs are deleted when a receiver starts."""


class Receiver:
    """Fetches blobs into a folder. Create it before the transport is entered, so that it notices reconnects.

    If `durable`, a fetched blob survives a power cut. Otherwise it may be lost or damaged, so a starting receiver
    checks the folder; that is fine for blobs that can be fetched again. `seal` signs a Want for its topic.
    """

    def __init__(
        self,
        transport: Transport,
        folder: BlobFolder,
        *,
        durable: bool = True,
        max_bytes: int = MAX_BLOB_BYTES,
        seal: Callable[[str, bytes], bytes] = lambda _, payload: payload,
    ) -> None:
        self._transport = transport
        self._folder = folder
        self._seal = seal
        self._durable = durable
        self._max_bytes = max_bytes
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetches: set[_Fetch] = set()
        self._pace = _Pace()
        self._rates: deque[float] = deque(maxlen=MEASURED)
        transport.on_connect(self._on_reconnect)
        _remove_old_parts(folder)
        if not durable:
            _remove_damaged(folder)

    @property
    def mbit_s(self) -> float | None:
        """The rate of arriving blobs in Mbit/s, waits included: the median of the last large ones; None before any."""
        return statistics.median(self._rates) if self._rates else None

    async def fetch(
        self, ref: BlobRef, *, chunks: str, wants: str, device_id: str, patience_s: float = math.inf
    ) -> Path:
        """Wait until the blob is in the folder and verified; return its path, at once if the folder has it already.

        The only time-out is `patience_s`; use `asyncio.timeout` for a limit on the whole fetch. Data received before a
        cancellation (or a kill -9) is kept, and the next fetch continues from there. Two fetches of one blob share the
        work.

        Args:
            ref: the blob; its digest and size are binding.
            chunks: topic filter of the blob's chunks, whose last level is "+" (the byte offset).
            wants: topic on which the blob's sender listens for Wants.
            device_id: the device named in the Want: the sender or, in a coordinator's Want, the addressee.
            patience_s: longest wait for new data while connected to the broker.

        Raises:
            ProtocolError: `oversized` (larger than `max_bytes`), `stalled` (nothing arrived in time), or `digest`
                (three mismatches).
            StoreError: the disk is full or the folder cannot be written.
            TransportError: the broker refused the subscription, the Want, or even the smallest packets.
        """
        if ref.size_bytes > self._max_bytes:
            raise ProtocolError("oversized", f"the blob has {ref.size_bytes} bytes; at most {self._max_bytes} allowed")
        lock = self._locks.setdefault(ref.digest, asyncio.Lock())
        async with lock:
            with raise_as(StoreError, f"cannot store blob {ref.digest}"):
                await self._fetch(ref, chunks, wants, device_id, patience_s)
        return self._folder.get_path(ref.digest)

    async def _fetch(self, ref: BlobRef, chunks: str, wants: str, device_id: str, patience_s: float) -> None:
        for attempt in range(MAX_ATTEMPTS):
            if ref.digest in self._folder:
                return
            part = PartialBlob(self._folder, ref, durable=self._durable)
            fetch = _Fetch(ref, part, self._pace)
            if attempt and ref.size_bytes <= self._transport.chunk_bytes:
                fetch.whole_only = WHOLE_STALLS
            self._fetches.add(fetch)
            try:
                await self._transfer(fetch, chunks, wants, device_id, patience_s)
                await self._transport.unsubscribe(chunks)
                if part.verified_at_once:
                    right = part.verify_and_keep()
                else:
                    right = await _run_to_end(asyncio.to_thread(part.verify_and_keep))
                if right:
                    return
                log.warning("event=digest_mismatch digest=%s device=%s", ref.digest, device_id)
            finally:
                self._fetches.discard(fetch)
                part.close()  # its content stays for the next receiver
                await self._transport.unsubscribe(chunks)
        raise ProtocolError(
            "digest",
            f"what came for {ref.digest} had another hash {MAX_ATTEMPTS} times; if the broker admits everybody, "
            "anybody can send such chunks: give it certificates (fedge provision)",
        )

    async def _transfer(self, fetch: _Fetch, chunks: str, wants: str, device_id: str, patience_s: float) -> None:
        if fetch.receiving.complete:
            return
        n_bytes, began = sum(end - start for start, end in fetch.receiving.missing), time.monotonic()
        ask = functools.partial(self._request, fetch, wants, device_id)
        await asyncio.gather(self._transport.subscribe(chunks, fetch.on_chunk), ask())
        while not fetch.receiving.complete:
            await fetch.wait(connected=self._transport.connected)
            if fetch.wrong and fetch.quiet_s and fetch.receiving.missing == ((0, fetch.ref.size_bytes),):
                return  # the blob came whole, and was never right
            if fetch.quiet_s >= patience_s:
                raise ProtocolError("stalled", f"nothing of {fetch.ref.digest} came for {fetch.quiet_s:.0f} s")
            await ask()
        if n_bytes >= MEASURED_BYTES:
            self._rates.append(8e-6 * n_bytes / (time.monotonic() - began))

    async def _request(self, fetch: _Fetch, wants: str, device_id: str) -> None:
        budget = TOTAL_ASK_BYTES
        if fetch.ref.size_bytes > LARGE_CHUNK:  # a blob of one chunk is always requested; there may be thousands
            budget -= sum(f.receiving.under_way for f in self._fetches)
        ranges = fetch.receiving.request_ranges(budget, _compute_most_ranges(self._transport.max_packet_bytes))
        if ranges:
            fetch.asked_at = time.monotonic()
            want = Want(device_id=device_id, digest=fetch.ref.digest, ranges=ranges, listening=fetch.listening)
            await self._transport.publish(wants, self._seal(wants, encode_message(want)))

    async def _on_reconnect(self) -> None:
        for fetch in self._fetches:
            fetch.listening = _draw_listening()
            fetch.receiving.record_lost()
            fetch.progress.set()


async def _run_to_end(work: Coroutine[Any, Any, bool]) -> bool:
    """Wait for a thread's result even if cancelled, since closing its file meanwhile would block the loop."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})


@dataclass(slots=True)
class _Pace:
    """The present response time of senders in seconds, averaged over all incoming transfers."""

    answer_s: float = 0.0

    def record(self, seconds: float) -> None:
        self.answer_s += (seconds - self.answer_s) / 8

    def compute_patience_s(self, least_s: float) -> float:
        return max(least_s, min(2 * self.answer_s, ANSWER_CAP_S))


class _Fetch:
    """An incoming transfer: its decisions, its file, the task that fills it, and its alarm clock."""

    def __init__(self, ref: BlobRef, part: PartialBlob, pace: _Pace) -> None:
        self.ref = ref
        self.receiving = Receiving(ref.size_bytes, part.have)
        self.listening = _draw_listening()
        """Random number, drawn anew when chunks in flight may be lost; the sender then takes us for a new receiver."""
        self.progress = asyncio.Event()
        self.quiet_s = 0.0
        """Seconds without new data while connected to the broker."""
        self.asked_at: float | None = None
        self.whole_only = 0
        """Number of stalls during which pieces are still ignored, because some were wrong. The sender needs
        only one chunk for the whole blob, unless it has found a limit of the broker."""
        self.wrong = False
        """Whether the whole blob came in one chunk with a wrong hash; such a chunk is dropped at once."""
        self._pace = pace
        self._part = part
        self._failure: OSError | None = None

    async def on_chunk(self, message: Inbound) -> None:
        """Store a chunk; its topic ends in the byte offset."""
        if message.retained:  # our senders retain no chunks, and this one would come again at each attempt
            return
        level = message.topic.rpartition("/")[2]
        if not (level.isascii() and level.isdigit() and len(level) < 16):
            raise ProtocolError("malformed", f"{level!r} is not a byte offset")
        offset = int(level)
        whole = len(message.payload) == self.ref.size_bytes
        if whole and hashlib.sha256(message.payload).hexdigest() != self.ref.digest:
            self.wrong = True
            return
        if self.whole_only and not whole:
            return
        pieces = self.receiving.record_arrived(offset, len(message.payload))
        if not pieces or self._failure is not None:
            return
        try:
            self._part.write(offset, message.payload, [(0, self.ref.size_bytes)] if whole else pieces)
        except OSError as error:
            self._failure = error
        else:
            for start, end in pieces:
                self.receiving.record_stored(start, end)
        if not self.receiving.has_advanced() and self._failure is None:
            return
        self.quiet_s = 0.0
        if self.asked_at is not None:
            self._pace.record(time.monotonic() - self.asked_at)
            self.asked_at = None  # the rest was requested together
        self.progress.set()

    async def wait(self, *, connected: bool) -> None:
        """Wait until something new is stored or nothing came for too long; raise the OSError of a failed write."""
        began = time.monotonic()
        while not self.progress.is_set():
            waited_s = time.monotonic() - began
            if (left_s := self._pace.compute_patience_s(self.receiving.patience_s) - waited_s) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self.progress.wait()
                continue
            self.quiet_s += waited_s if connected else 0.0
            log.info("event=stalled digest=%s missing=%d", self.ref.digest, len(self.receiving.missing))
            self.listening = _draw_listening()
            self.receiving.record_stalled()
            self.whole_only = max(0, self.whole_only - 1)
            break
        self.progress.clear()
        if self._failure is not None:
            raise self._failure


def _compute_most_ranges(max_packet_bytes: int | None) -> int:
    """Return the most ranges that a Want may have under the packet limit (None if there is no limit)."""
    if max_packet_bytes is None:
        return MAX_RANGES
    return max(1, min(MAX_RANGES, (max_packet_bytes - PACKET_OVERHEAD) // RANGE_BYTES))


def _draw_listening() -> int:
    return 1 + secrets.randbelow(2**53)


def _remove_old_parts(folder: BlobFolder) -> None:
    oldest = time.time() - PART_KEPT_S
    for path in folder.get_path("").iterdir():
        if path.suffix in {".part", ".ranges"} and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _remove_damaged(folder: BlobFolder) -> None:
    for digest in tuple(folder):
        with folder.get_path(digest).open("rb") as file:
            right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        if not right:
            log.warning("event=damaged_blob digest=%s", digest)
            folder.remove(digest)
