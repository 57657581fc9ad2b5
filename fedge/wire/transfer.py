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
import os
import secrets
import statistics
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from fedge.errors import ProtocolError, StoreError, TooLargeError, TransportError, failing_as
from fedge.system.background import first_failure
from fedge.system.files import BlobFolder, sync
from fedge.wire.connection.broker import Inbound
from fedge.wire.connection.packet_limits import LARGE_CHUNK, LEAST_PACKET, PACKET_OVERHEAD, SMALL_CHUNK
from fedge.wire.messages import BlobRef, Want, decode, encode
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.transfer")

Range = tuple[int, int]
"""Bytes [start, end)."""
Source = Callable[[str], Path | bytes | None]
"""digest -> where its bytes are; None when there is no such blob."""
Key = tuple[str, str]
"""A blob on its way out: digest, topic filter of its chunks."""
Listener = tuple[str, int]
"""A subscription to the chunks of a blob: device, and a number that it drew for it (`Want.listening`)."""

ASK_BYTES: Final = 8 * 1024 * 1024
"""One fetch has at most this much under way: 60 ms at 1 GbE, and far below a broker's queue limit."""
TOTAL_ASK_BYTES: Final = 32 * 1024 * 1024
"""All fetches of a receiver together, so that a cohort that uploads at once does not overflow the broker's queue."""
STALL_S: Final = 3.0
"""No new chunk for so long: what was asked for is lost. Doubles up to `STALL_CAP_S` where chunks need longer."""
STALL_CAP_S: Final = 12.0
STEP_BYTES: Final = SMALL_CHUNK
"""So many new bytes, as many as the largest chunk of this fetch, or all that was asked for, count as progress. Fewer do
not: on a broker that admits everybody, a stranger who sends a byte now and then would keep a receiver from asking again
for what was lost. How small chunks must be, the sender may find out alone: so the receiver measures them."""
LEAST_CHUNK: Final = LEAST_PACKET - PACKET_OVERHEAD
"""No sender of ours cuts smaller ones; those of a stranger do not make progress cheaper."""
ANSWER_CAP_S: Final = 30.0
"""Where many transfers share a broker or a sender, each waits for its turn: nothing counts as lost before twice the
time that answers take just now, but after so long in any case."""
MAX_ATTEMPTS: Final = 3
"""Complete transfers with a wrong digest before the blob is given up."""
MAX_BLOB_BYTES: Final = 4 * 1024**3
"""Default bound on a blob; a role that knows its models sets a lower one."""
MAX_RANGES: Final = 256
"""Ranges in one Want (fedge.wire.messages)."""
MAX_PIECES: Final = 4096
"""Gaps of a blob on its way in, and pieces of one on its way out: senders that send in order leave a few."""
MAX_LINES: Final = 4 * MAX_PIECES
"""Lines of the record of a partial blob, after which it is written anew: one for each of its ranges."""
RANGE_BYTES: Final = 19
"""Of one range in a Want, at most."""
SENDER_TASKS: Final = 6
"""Chunks being published at a time; leaves room in the transport's window of 8 for messages."""
GATHER_S: Final = 0.02
"""Bytes published before are held back for this long: the rest of a cohort asks within it, and all share one copy.
Otherwise k devices that ask one after the other get k copies each."""
SENT_BLOBS: Final = 64
"""Blobs whose published ranges a sender remembers for that purpose."""
LISTENERS: Final = 1024
"""Subscriptions to one blob that a sender remembers. A forgotten one is sent again what is already on its way."""
MEASURED_BYTES: Final = 64 * 1024
"""Shorter transfers tell more of delays than of the link's rate."""
MEASURED: Final = 5
"""Transfers of whose rates the median counts: one that a broken connection or a busy sender held up changes little."""
PART_KEPT_S: Final = 24 * 3600.0
"""Partial blobs untouched for a day are deleted when a receiver starts."""
READ_BYTES: Final = 1024 * 1024


# ------------------------------------------------------------------------------------------------------------- core


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

    def overlap(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are in the set."""
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


class Receiving:
    """Which bytes of a blob are missing, and which to request now. No IO, no clock."""

    def __init__(self, size_bytes: int, have: Iterable[Range] = ()) -> None:
        self.size_bytes = size_bytes
        self.patience_s = STALL_S
        """Time without a new chunk after which `stalled` is to be called."""
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
        """All bytes are stored; the digest decides whether they are right."""
        return not self._missing and not self._unsafe_bytes

    @property
    def missing(self) -> tuple[Range, ...]:
        """What has not arrived, in order."""
        return tuple(self._missing)

    @property
    def under_way(self) -> int:
        """Bytes requested but not yet stored."""
        return self._asked.n_bytes

    def arrived(self, offset: int, length: int) -> list[Range]:
        """The missing parts of a chunk, to be stored and then reported to `stored`.

        Raises:
            ProtocolError: `out-of-range`: the chunk is empty or reaches beyond the blob; `fragmented`: there would be
                too many gaps.
        """
        if offset < 0 or length < 1 or offset + length > self.size_bytes:
            raise ProtocolError("out-of-range", f"chunk of {length} bytes at {offset} of {self.size_bytes}")
        new, n_before = self._missing.overlap(offset, offset + length), len(self._missing)
        self._missing.remove(offset, offset + length)
        if n_before < len(self._missing) > MAX_PIECES:
            self._missing.add(offset, offset + length)  # all of it was missing
            raise ProtocolError("fragmented", f"chunk of {length} bytes at {offset}: {n_before} gaps already")
        self._unsafe_bytes += sum(end - start for start, end in new)
        self._chunk_bytes = max(self._chunk_bytes, length)
        return new

    def stored(self, start: int, end: int) -> None:
        """Mark [start, end), which had arrived, as stored."""
        self._unsafe_bytes -= end - start
        self._since_step += end - start
        self._asked.remove(start, end)
        self._ask_bytes = min(ASK_BYTES, self._ask_bytes * 2)

    def advanced(self) -> bool:
        """Whether a step was stored since the last time that this was so."""
        if found := self._since_step >= min(STEP_BYTES, self._chunk_bytes) or not self._asked:
            self._since_step = 0
        return found

    def ask(self, budget: int, max_ranges: int = MAX_RANGES) -> tuple[Range, ...]:
        """The ranges to request now, in order: none while at least half of this fetch's allowance is under way.

        Args:
            budget: bytes that other fetches leave us; one chunk is requested even without, so that all make progress.
            max_ranges: limit of one Want.
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

    def lost(self) -> None:
        """The connection broke: nothing is under way any more."""
        self._asked = Ranges()

    def stalled(self) -> None:
        """Nothing new arrived in time: restart with one chunk (the sender may be gone; leave room for others)."""
        self.lost()
        self._ask_bytes = LARGE_CHUNK
        self.patience_s = min(STALL_CAP_S, self.patience_s * 2)


@dataclass(slots=True)
class _Outgoing:
    """A blob with outstanding wants."""

    due: Ranges = field(default_factory=Ranges)
    held: Ranges = field(default_factory=Ranges)
    published: Ranges = field(default_factory=Ranges)
    on_the_way: OrderedDict[Listener, Ranges] = field(default_factory=OrderedDict)
    """What was published since a listener's first Want: it subscribes to all chunks, so it gets this unasked."""


class Sending:
    """Chooses the next chunk to publish. Overlapping wants are merged while they wait; blobs take turns. No IO."""

    def __init__(self) -> None:
        self._blobs: OrderedDict[Key, _Outgoing] = OrderedDict()  # most recently requested last
        self._turns: OrderedDict[Key, None] = OrderedDict()  # blobs with something due

    def want(self, key: Key, ranges: Iterable[Range], listener: Listener | None = None) -> bool:
        """Queue byte ranges; True if some were published before and wait for `release`.

        Ranges already on their way to this listener, because others wanted them, are not queued.

        Raises:
            ProtocolError: `fragmented`: too many pieces are waiting already.
        """
        blob = self._blobs.setdefault(key, _Outgoing())
        if len(blob.due) + len(blob.held) > MAX_PIECES:
            raise ProtocolError("fragmented", f"{len(blob.due) + len(blob.held)} pieces of {key[0]} wait already")
        self._blobs.move_to_end(key)
        on_the_way = blob.on_the_way.get(listener, Ranges()) if listener else Ranges()
        for start, end in ranges:
            fresh = Ranges([(start, end)])
            for low, high in on_the_way.overlap(start, end):
                fresh.remove(low, high)
            for part in tuple(fresh):
                for low, high in blob.published.overlap(*part):
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
        """End the wait: queue again what was published before, for all who asked meanwhile."""
        blob = self._blobs.get(key)
        if blob is not None and blob.held:
            for start, end in blob.held:
                blob.due.add(start, end)
            blob.held = Ranges()
            self._turns.setdefault(key)

    def next(self, chunk_bytes: int) -> tuple[Key, int, int] | None:
        """Take the next chunk: key, start, end (at most `chunk_bytes` long); None if nothing is due."""
        if not self._turns:
            return None
        key, _ = self._turns.popitem(last=False)
        blob = self._blobs[key]
        start, end = next(iter(blob.due))
        stop = min(end, start + chunk_bytes)
        blob.due.remove(start, stop)
        blob.published.add(start, stop)
        if len(blob.published) > MAX_PIECES:  # the gaps are held back once, too
            (low, _), *_, (_, high) = blob.published
            blob.published = Ranges([(low, high)])
        for listener, ranges in tuple(blob.on_the_way.items()):
            ranges.add(start, stop)
            if len(ranges) > MAX_PIECES:
                del blob.on_the_way[listener]
        if blob.due:
            self._turns[key] = None
        return key, start, stop

    def again(self, key: Key, start: int, end: int) -> None:
        """Queue a chunk again that the broker did not take; no effect if the blob was dropped meanwhile."""
        if (blob := self._blobs.get(key)) is not None:
            blob.due.add(start, end)
            self._turns.setdefault(key)

    def drop(self, key: Key) -> None:
        """Forget a blob and all its wants."""
        self._blobs.pop(key, None)
        self._turns.pop(key, None)

    def _forget_old(self) -> None:
        if len(self._blobs) > SENT_BLOBS:
            idle = [key for key, blob in self._blobs.items() if not blob.due and not blob.held]
            for key in idle[: len(self._blobs) - SENT_BLOBS]:
                del self._blobs[key]


# ------------------------------------------------------------------------------------------------- the partial file


class _Part:
    """A partial blob on disk. Its methods block; they may run in threads, even after `close` (then without effect)."""

    def __init__(self, folder: BlobFolder, ref: BlobRef, *, durable: bool) -> None:
        self._final = folder.path(ref.digest)
        self._data_path = self._final.with_name(f"{ref.digest}.part")
        self._record_path = self._final.with_name(f"{ref.digest}.ranges")
        self._size = ref.size_bytes
        self._durable = durable
        self._lock = threading.Lock()
        self._hasher = hashlib.sha256()
        self._hashed = 0
        recorded = self._read_record() if self._data_path.exists() else []
        self._n_lines = len(recorded)
        self.have = Ranges(recorded)
        """What is recorded; at first what an earlier receiver left."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        self._data = os.open(self._data_path, flags, 0o600)
        try:
            if os.fstat(self._data).st_size > self._size:  # left by a receiver that was given a larger size
                os.ftruncate(self._data, self._size)
            self._record = os.open(self._record_path, flags | os.O_APPEND | (0 if self.have else os.O_TRUNC), 0o600)
        except OSError:
            os.close(self._data)
            raise
        self._closed = False

    def _read_record(self) -> list[Range]:
        try:
            lines = self._record_path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        numbers = [line.split() for line in lines[:-1]]  # anything after the last newline is torn
        ranges = [(int(n[0]), int(n[1])) for n in numbers if len(n) == 2 and n[0].isdigit() and n[1].isdigit()]
        return [(start, end) for start, end in ranges if start < end <= self._size]

    def write(self, offset: int, payload: bytes, pieces: Iterable[Range]) -> None:
        """Store the new pieces of a chunk, record them, and hash up to the first gap."""
        with self._lock:
            if self._closed:
                return
            for start, end in pieces:
                if start < self._hashed:  # other bytes were there
                    self._hasher, self._hashed = hashlib.sha256(), 0
                data = memoryview(payload)[start - offset : end - offset]
                _write_all(self._data, data, start)
                self._note(start, end)
                if self._durable:
                    _begin_writing_back(self._data, start, end)
                if start == self._hashed:
                    self._hasher.update(data)
                    self._hashed = end
            self._catch_up(self._hashed + READ_BYTES)

    def _note(self, start: int, end: int) -> None:
        """Record that these bytes are valid."""
        os.write(self._record, b"%d %d\n" % (start, end))
        self.have.add(start, end)
        self._n_lines += 1
        if self._n_lines > MAX_LINES:
            anew = self._record_path.with_suffix(".new.ranges")
            anew.write_bytes(b"".join(b"%d %d\n" % known for known in self.have))
            anew.replace(self._record_path)
            os.close(self._record)
            self._record = os.open(self._record_path, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND)
            self._n_lines = len(self.have)

    def _catch_up(self, until: int) -> None:
        """Read and hash gapless bytes after the hashed part that arrived earlier or out of order."""
        first = next(iter(self.have), (0, 0))
        end = min(until, first[1] if first[0] == 0 else 0)
        while self._hashed < end and (data := os.pread(self._data, min(READ_BYTES, end - self._hashed), self._hashed)):
            self._hasher.update(data)
            self._hashed += len(data)

    @property
    def verified_at_once(self) -> bool:
        """Whether `verify_and_keep` needs no disk access."""
        return self._hashed == self._size and not self._durable

    def verify_and_keep(self) -> bool:
        """Move the complete blob into place, or discard it and return False if its digest does not match."""
        with self._lock:
            if self._closed:
                return False
            self._catch_up(self._size)
            right = self._hasher.hexdigest() == self._final.name
            if right:
                if self._durable:
                    os.fsync(self._data)
                self._data_path.replace(self._final)
            self._data_path.unlink(missing_ok=True)
            self._record_path.unlink(missing_ok=True)
            if self._durable:
                sync(self._final.parent)
            return right

    def close(self) -> None:
        """Close the files; their content stays for the next receiver."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._data)
                os.close(self._record)


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(handle, data, offset)
        data, offset = data[n:], offset + n


def _begin_writing_back(handle: int, start: int, end: int) -> None:
    """Start write-back of these bytes while others still arrive, which leaves less for fsync.

    Linux does so when told that dirty pages are not needed; they stay in memory until they are clean.
    """
    if sys.platform == "linux":
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)


# --------------------------------------------------------------------------------------------------------- receiver


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
        transport.on_connect(self._reconnected)
        _remove_old_parts(folder)
        if not durable:
            _remove_damaged(folder)

    @property
    def mbit_s(self) -> float | None:
        """The rate at which blobs arrive, waiting included: the median of the last large ones; None before any."""
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
            ProtocolError: `oversized` (larger than `max_bytes`), `stalled` (nothing arrived in time), or `digest`
                (three mismatches).
            StoreError: the disk is full or the folder cannot be written.
            TransportError: the broker refused the subscription or the Want, or even such a small packet.
        """
        if ref.size_bytes > self._max_bytes:
            raise ProtocolError("oversized", f"blob of {ref.size_bytes} bytes, at most {self._max_bytes} allowed")
        lock = self._locks.setdefault(ref.digest, asyncio.Lock())
        async with lock:
            with failing_as(StoreError, f"cannot store blob {ref.digest}"):
                await self._fetch(ref, chunks, wants, device_id, patience_s)
        return self._folder.path(ref.digest)

    async def _fetch(self, ref: BlobRef, chunks: str, wants: str, device_id: str, patience_s: float) -> None:
        for attempt in range(MAX_ATTEMPTS):
            if ref.digest in self._folder:
                return
            part = _Part(self._folder, ref, durable=self._durable)
            fetch = _Fetch(ref, part, self._pace)
            fetch.whole_only = bool(attempt) and ref.size_bytes <= self._transport.chunk_bytes
            self._fetches.add(fetch)
            try:
                await self._transfer(fetch, chunks, wants, device_id, patience_s)
                await self._transport.unsubscribe(chunks)
                if part.verified_at_once:
                    right = part.verify_and_keep()
                else:
                    right = await _to_its_end(asyncio.to_thread(part.verify_and_keep))
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
        ask = functools.partial(self._ask, fetch, wants, device_id)
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

    async def _ask(self, fetch: _Fetch, wants: str, device_id: str) -> None:
        budget = TOTAL_ASK_BYTES
        if fetch.ref.size_bytes > LARGE_CHUNK:  # one chunk is requested in any case, and there may be thousands
            budget -= sum(f.receiving.under_way for f in self._fetches)
        ranges = fetch.receiving.ask(budget, _most_ranges(self._transport.max_packet_bytes))
        if ranges:
            fetch.asked_at = time.monotonic()
            want = Want(device_id=device_id, digest=fetch.ref.digest, ranges=ranges, listening=fetch.listening)
            await self._transport.publish(wants, self._seal(wants, encode(want)))

    async def _reconnected(self) -> None:
        for fetch in self._fetches:
            fetch.listening = _drawn()
            fetch.receiving.lost()
            fetch.progress.set()


async def _to_its_end(work: Coroutine[Any, Any, bool]) -> bool:
    """Its result. Waits for its end even if cancelled, since closing the file would block the loop on the thread."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})


@dataclass(slots=True)
class _Pace:
    """The present response time of senders, over all incoming transfers."""

    answer_s: float = 0.0

    def note(self, seconds: float) -> None:
        self.answer_s += (seconds - self.answer_s) / 8

    def patience_s(self, least_s: float) -> float:
        return max(least_s, min(2 * self.answer_s, ANSWER_CAP_S))


class _Fetch:
    """An incoming transfer: its decisions, its file, the task that fills it, and its alarm clock."""

    def __init__(self, ref: BlobRef, part: _Part, pace: _Pace) -> None:
        self.ref = ref
        self.receiving = Receiving(ref.size_bytes, part.have)
        self.listening = _drawn()
        """Drawn anew when what is on its way to us may be lost: then the sender takes us for somebody new."""
        self.progress = asyncio.Event()
        self.quiet_s = 0.0
        """For how long nothing new has come although the broker was there."""
        self.asked_at: float | None = None
        self.whole_only = False
        """Whether pieces are ignored until nothing comes: some were wrong, and the sender needs one chunk alone, unless
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
        pieces = self.receiving.arrived(offset, len(message.payload))
        if not pieces or self._failure is not None:
            return
        try:
            self._part.write(offset, message.payload, [(0, self.ref.size_bytes)] if whole else pieces)
        except OSError as error:
            self._failure = error
        else:
            for start, end in pieces:
                self.receiving.stored(start, end)
        if not self.receiving.advanced() and self._failure is None:
            return
        self.quiet_s = 0.0
        if self.asked_at is not None:
            self._pace.note(time.monotonic() - self.asked_at)
            self.asked_at = None  # the rest was requested together
        self.progress.set()

    async def wait(self, *, connected: bool) -> None:
        """Wait until something new is stored or nothing came for too long; re-raises the OSError of a failed write."""
        began = time.monotonic()
        while not self.progress.is_set():
            waited_s = time.monotonic() - began
            if (left_s := self._pace.patience_s(self.receiving.patience_s) - waited_s) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self.progress.wait()
                continue
            self.quiet_s += waited_s if connected else 0.0
            log.info("event=stalled digest=%s missing=%d", self.ref.digest, len(self.receiving.missing))
            self.listening = _drawn()
            self.receiving.stalled()
            self.whole_only = False
            break
        self.progress.clear()
        if self._failure is not None:
            raise self._failure


def _most_ranges(max_packet_bytes: int | None) -> int:
    """The number of ranges in a Want under the broker's packet limit (None: no limit announced)."""
    if max_packet_bytes is None:
        return MAX_RANGES
    return max(1, min(MAX_RANGES, (max_packet_bytes - PACKET_OVERHEAD) // RANGE_BYTES))


def _drawn() -> int:
    return 1 + secrets.randbelow(2**53)


def _remove_old_parts(folder: BlobFolder) -> None:
    oldest = time.time() - PART_KEPT_S
    for path in folder.path("").iterdir():
        if path.suffix in {".part", ".ranges"} and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _remove_damaged(folder: BlobFolder) -> None:
    for digest in tuple(folder):
        with folder.path(digest).open("rb") as file:
            right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        if not right:
            log.warning("event=damaged_blob digest=%s", digest)
            folder.remove(digest)


# ----------------------------------------------------------------------------------------------------------- sender


class Sender:
    """Publishes wanted chunks. Async context manager; enter it inside the transport.

    All blobs share `SENDER_TASKS` concurrent publishes and take turns, so a large one does not hold up a small one. A
    chunk that is larger than those that the broker took on this connection goes alone.
    """

    def __init__(self, transport: Transport, source: Source) -> None:
        self._transport = transport
        self._source = source
        self._sending = Sending()
        self._wake = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._workers: list[asyncio.Task[None]] = []
        self._trying = False
        """Whether a chunk is under way that is larger than the broker is known to take: if it refuses it, a window full
        of them would have been sent for nothing, which takes a slow link a minute."""

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._workers = [self._group.create_task(self._work(), name=f"sender {i}") for i in range(SENDER_TASKS)]
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._workers:
            task.cancel()
        with first_failure():
            await self._group.__aexit__(*error)

    def want_of(self, device: str, payload: bytes, topics: Topics) -> None:
        """Queue the model bytes that a device requests; returns at once.

        Raises:
            ProtocolError: not a Want; `foreign-id`: it speaks for another device; or as `want`.
        """
        want = decode(payload, Want)
        if want.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {want.device_id}")
        listener = (device, want.listening) if want.listening else None
        self.want(want.digest, want.ranges, chunks=topics.model_chunk(want.digest), listener=listener)

    def want(self, digest: str, ranges: Iterable[Range], *, chunks: str, listener: Listener | None = None) -> None:
        """Queue byte ranges of a blob for publishing; returns at once.

        Args:
            digest: which blob.
            ranges: what a receiver lacks, [start, end).
            chunks: topic filter of the chunks as the receiver subscribes to it; the byte offset replaces its last "+".
            listener: the sender of the Want: chunks published since its first one are not repeated for it. None: they
                are.

        Raises:
            ProtocolError: `unknown-blob`, `out-of-range` (a range is empty or reaches beyond the blob) or `fragmented`
                (too many pieces of it are waiting already).
        """
        source = self._source(digest)
        if source is None:
            raise ProtocolError("unknown-blob", digest)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        ranges = tuple(ranges)
        for start, end in ranges:
            if not 0 <= start < end <= size:
                raise ProtocolError("out-of-range", f"bytes {start} to {end} of {size}")
        key = (digest, chunks)
        if self._sending.want(key, ranges, listener):
            asyncio.get_running_loop().call_later(GATHER_S, self._release, key)
        self._wake.set()

    def _release(self, key: Key) -> None:
        self._sending.release(key)
        self._wake.set()

    async def _work(self) -> None:
        while True:
            chunk = None if self._trying else self._sending.next(self._transport.chunk_bytes)
            if chunk is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            key, start, end = chunk
            if end - start <= self._transport.taken_bytes:
                await self._publish(key, start, end)
                continue
            self._trying = True
            await self._publish(key, start, end)
            self._trying = False
            self._wake.set()

    async def _publish(self, key: Key, start: int, end: int) -> None:
        digest, chunks = key
        try:
            data = _read(self._source(digest), start, end)
            await self._transport.publish(f"{chunks.removesuffix('+')}{start}", data, chunk=True)
        except (OSError, TransportError) as error:
            if isinstance(error, TooLargeError) and end - start > self._transport.chunk_bytes:  # now it is less
                self._sending.again(key, start, end)
                self._wake.set()
                return
            # The blob was deleted meanwhile, or the broker refuses it: receivers that still need it will ask again.
            log.warning("event=chunk_failed digest=%s offset=%d reason=%r", digest, start, str(error))
            self._sending.drop(key)


def _read(source: Path | bytes | None, start: int, end: int) -> bytes:
    """Read one chunk, on the event loop.

    That takes 0.1 ms from memory, where a recent blob lies, against 0.2 ms through a thread. It also lets chunks leave
    in the order in which they were taken.
    """
    if source is None:
        raise FileNotFoundError("the blob is gone")
    if isinstance(source, bytes):
        return source[start:end]
    with source.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), end - start, start)
