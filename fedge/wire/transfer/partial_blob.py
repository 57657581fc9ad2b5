"""A partial blob on disk, and the record of its valid byte ranges."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable
from typing import Final

from fedge.system.files import BlobFolder, sync
from fedge.wire.messages import BlobRef
from fedge.wire.transfer.ranges import MAX_PIECES, Range, Ranges

MAX_LINES: Final = 4 * MAX_PIECES
"""Most lines of a partial blob's record; beyond them the record is rewritten with one line for each range."""
READ_BYTES: Final = 1024 * 1024


class PartialBlob:
    """A partial blob on disk. Its methods block, may run in threads, and do nothing after `close`."""

    def __init__(self, folder: BlobFolder, ref: BlobRef, *, durable: bool) -> None:
        self._final = folder.get_path(ref.digest)
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
        """The recorded ranges; at first those that an earlier receiver left."""
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
                if start < self._hashed:  # these bytes replace hashed ones
                    self._hasher, self._hashed = hashlib.sha256(), 0
                data = memoryview(payload)[start - offset : end - offset]
                _write_all(self._data, data, start)
                self._record_range(start, end)
                if self._durable:
                    _start_writing_back(self._data, start, end)
                if start == self._hashed:
                    self._hasher.update(data)
                    self._hashed = end
            self._catch_up(self._hashed + READ_BYTES)

    def _record_range(self, start: int, end: int) -> None:
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
        """Hash stored bytes that follow the hashed part without a gap, up to `until`."""
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


def _start_writing_back(handle: int, start: int, end: int) -> None:
    """Start writing these bytes to disk while others still arrive, which leaves less work for fsync.

    Linux does so when it is advised that dirty pages are not needed; they stay in memory until they are clean.
    """
    if sys.platform == "linux":
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)
