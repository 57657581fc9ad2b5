"""Blobs over MQTT: the receiver requests byte ranges, the sender publishes each chunk once for all receivers.

    receiver                                   sender
    subscribe chunks/+                         source(digest) -> file
    Want(digest, missing ranges)  ──────────▶  queue, merged with others' wants
    write, record, hash           ◀──────────  chunks/{offset}: bytes, in order, for all subscribers
    stalled: Want again what is missing
    complete: SHA-256, rename into the folder

The Want follows the subscription at once: one TCP connection keeps the order, so no chunk can overtake it, and the
receiver gets everything published after the first Want of a subscription, whoever requested it.

A chunk is written and hashed on the event loop as it arrives, 0.4 ms each on a PC: a hop to a thread costs as much, and
more if all cores are busy. The bytes go to the page cache; only fsync and reading an earlier receiver's leftovers wait
for the disk, and these have a thread.

Nothing here relies on the broker's delivery: a lost chunk is requested again, a duplicate changes nothing, and any
order will do. `Ranges`, `Receiving` and `Sending` decide, without clock or files; `Receiver` and `Sender` act. A
partial blob survives kill -9 of its receiver as two files in the blob folder, `{digest}.part` (the bytes) and
`{digest}.ranges` (which of them are valid: a line for each chunk, written after its bytes, and fewer if chunks are many
and small). After a power cut the record may list bytes that never reached the disk; then the hash does not match and
the blob is fetched again.
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
"""All fetches of a receiver together, so that a cohort that uploads at once does not overflow the broker's queue."""
ANSWER_CAP_S: Final = 30.0
"""Where many transfers share a broker or a sender, each waits for its turn: nothing counts as lost before twice the
time that answers take just now, but after so long in any case."""
MAX_ATTEMPTS: Final = 3
"""Complete transfers with a wrong digest before the blob is given up."""
MAX_BLOB_BYTES: Final = 4 * 1024**3
"""Default bound on a blob; a role that knows its models sets a lower one."""
RANGE_BYTES: Final = 19
"""Of one range in a Want, at most."""
MEASURED_BYTES: Final = 64 * 1024
"""Shorter transfers tell more of delays than of the link's rate."""
MEASURED: Final = 5
"""Transfers of whose rates the median counts: one that a broken connection or a busy sender held up changes little."""
WHOLE_STALLS: Final = 3
"""After how many stalls pieces are taken again where some were wrong: a sender on a busy machine answers late."""
PART_KEPT_S: Final = 24 * 3600.0
"""Partial blobs untouched for a day are deleted when a receiver starts."""


class Receiver:
    """Fetches blobs into a folder. Create it before the transport is entered, so that it notices reconnects.

    `durable`: a fetched blob survives a power cut. Otherwise it may be lost or damaged, so a starting receiver searches
    the folder; fine for blobs that can be fetched again. `seal`: signs a Want for its topic.
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
        """The rate of arriving blobs, waiting included, a median of the last large ones; None before any."""
        return statistics.median(self._rates) if self._rates else None

    async def fetch(
        self, ref: BlobRef, *, chunks: str, wants: str, device_id: str, patience_s: float = math.inf
    ) -> Path:
        """Wait until the blob is in the folder and verified; returns at once if it is there already.

        There is no time-out except `patience_s`: wrap it in `asyncio.timeout`. Data received before a cancellation (or
        a kill -9) is kept, and the next fetch continues from there. Two fetches of one blob share the work.

        Args:
            ref: the blob; its digest and size are binding.
            chunks: topic filter of its chunks, whose last level is "+" (the byte offset).
            wants: topic on which its sender listens for Wants.
            device_id: goes into the Want: the sender, or, from the coordinator, the addressee.
            patience_s: longest wait for new data while connected to the broker.

        Raises:
            ProtocolError: `oversized` (larger than `max_bytes`), `stalled` (nothing arrived in time), or
            `digest`
                (three mismatches).
            StoreError: the disk is full or the folder cannot be written.
            TransportError: the broker refused the subscription or the Want, or even such a small packet.
        """
        if ref.size_bytes > self._max_bytes:
            raise ProtocolError("oversized", f"blob of {ref.size_bytes} bytes, at most {self._max_bytes} allowed")
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
            f"{ref.digest} is not what came, {MAX_ATTEMPTS} times; where the broker admits everybody, anybody can send "
            "such chunks: give it certificates (fedge provision)",
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
                return  # it came whole, and was never right
            if fetch.quiet_s >= patience_s:
                raise ProtocolError("stalled", f"nothing of {fetch.ref.digest} came for {fetch.quiet_s:.0f} s")
            await ask()
        if n_bytes >= MEASURED_BYTES:
            self._rates.append(8e-6 * n_bytes / (time.monotonic() - began))

    async def _request(self, fetch: _Fetch, wants: str, device_id: str) -> None:
        budget = TOTAL_ASK_BYTES
        if fetch.ref.size_bytes > LARGE_CHUNK:  # one chunk is requested in any case, and there may be thousands
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
    """Wait for a thread's result even if cancelled: closing the file would block the loop on it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})


@dataclass(slots=True)
class _Pace:
    """The present response time of senders, over all incoming transfers."""

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
        """Drawn anew when what is on its way to us may be lost: then the sender takes us for somebody new."""
        self.progress = asyncio.Event()
        self.quiet_s = 0.0
        """For how long nothing new has come although the broker was there."""
        self.asked_at: float | None = None
        self.whole_only = 0
        """For how many stalls pieces are still ignored: some were wrong, and the sender needs one chunk alone, unless
        it has found a limit of the broker's."""
        self.wrong = False
        """Whether the whole blob came in one chunk and was not right: that is known at once, and changes nothing."""
        self._pace = pace
        self._part = part
        self._failure: OSError | None = None

    async def on_chunk(self, message: Inbound) -> None:
        """Store a chunk; its topic ends in the byte offset."""
        if message.retained:  # no sender of ours does that, and it would come again at each attempt
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
        """Wait until something new is stored or nothing came for too long; re-raises the OSError of a failed write."""
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
    """Return the number of ranges in a Want under the packet limit (None: no limit)."""
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
