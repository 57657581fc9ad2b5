"""The ledger HOME/egress.db, a record of everything that leaves a device, written before it leaves.

It uses SQLite, since agent and runtime write concurrently while `fedge egress` reads. Messages of one day that reveal
the same about the same order share a line with a count. kill -9 loses nothing; a power cut loses no line, but perhaps
the last seconds of a count. When there are more than `MAX_LINES`, the oldest `FOLDED` lines are merged into one per
kind of message, without order and day, so that nothing counted is ever forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from fedge.errors import StoreError
from fedge.system.files import put_aside

log = logging.getLogger("fedge")

FILE: Final = "egress.db"
MAX_LINES: Final = 20_000
"""Most lines, some 4 MB. With 16 lines per round they cover the last 1,000 rounds and more."""
FOLDED: Final = 1_000
LOG_PAGES: Final = 64
"""Pages of 4 kB after which the write-ahead log is written back, since the ledger itself is seldom larger."""
WAIT_S: Final = 5.0
"""Longest wait for another process that writes, which usually takes a millisecond."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS left (
    id INTEGER PRIMARY KEY, day TEXT NOT NULL, message TEXT NOT NULL, about TEXT NOT NULL, kinds TEXT NOT NULL,
    n INTEGER NOT NULL, bytes INTEGER NOT NULL, first REAL NOT NULL, last REAL NOT NULL,
    UNIQUE (day, message, about, kinds)
)"""
COUNT: Final = (
    "UPDATE left SET n = n + 1, bytes = bytes + ?, last = ? WHERE day = ? AND message = ? AND about = ? AND kinds = ?"
)
ADD: Final = "INSERT INTO left (n, bytes, first, last, day, message, about, kinds) VALUES (1, ?, ?, ?, ?, ?, ?, ?)"
OLDEST: Final = "SELECT id FROM left WHERE day <> '' ORDER BY id LIMIT ?"
FOLD: Final = f"""
INSERT INTO left (day, message, about, kinds, n, bytes, first, last)
SELECT '', message, '', kinds, SUM(n), SUM(bytes), MIN(first), MAX(last) FROM left WHERE id IN ({OLDEST})
GROUP BY message, kinds
ON CONFLICT (day, message, about, kinds) DO UPDATE
SET n = n + excluded.n, bytes = bytes + excluded.bytes, last = MAX(last, excluded.last)
"""  # noqa: S608 - nothing of it comes from outside


class Line(Struct, frozen=True, kw_only=True):
    """Messages of one kind that left on one day for one order.

    `message` is the last level of the topic; `about` is step and order, or "". If `day` is "", the line covers several
    days and orders. `kinds` is what the messages revealed (`fedge.steps.contract.Reveals`). `n` counts the messages,
    `bytes` their payload bytes; `first` and `last` are times by the device's clock, in seconds since the epoch.
    """

    day: str
    message: str
    about: str
    kinds: tuple[str, ...]
    n: int
    bytes: int
    first: float
    last: float


class Ledger:
    """The ledger of one device; several processes may have it open."""

    def __init__(self, home: Path) -> None:
        """Open or create the file; a damaged file is put aside first.

        Raises:
            StoreError: the file cannot be read or written.
        """
        self._path = home / FILE
        with _convert_failures(self._path):
            home.mkdir(parents=True, exist_ok=True)
            try:
                self._db = _open(self._path)
            except sqlite3.DatabaseError as error:
                self._start_anew(error)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def record(self, message: str, about: str, kinds: Iterable[str], size_bytes: int) -> None:
        """Record that a message is about to leave.

        Raises:
            StoreError: the message cannot be recorded, so it must not leave.
        """
        now = time.time()
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        key = (day, message, about, ",".join(sorted(kinds)))
        with _convert_failures(self._path):
            try:
                self._write(key, size_bytes, now)
            except sqlite3.DatabaseError as error:
                self._start_anew(error)
                self._write(key, size_bytes, now)

    def _write(self, key: tuple[str, ...], size_bytes: int, now: float) -> None:
        if self._db.execute(COUNT, (size_bytes, now, *key)).rowcount:
            return
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.execute(ADD, (size_bytes, now, now, *key))
            if self._db.execute("SELECT COUNT(*) FROM left").fetchone()[0] > MAX_LINES:
                self._db.execute(FOLD, (FOLDED,))
                self._db.execute(f"DELETE FROM left WHERE id IN ({OLDEST})", (FOLDED,))  # noqa: S608 - as above
        self._db.execute("PRAGMA synchronous = NORMAL")

    def _start_anew(self, error: sqlite3.DatabaseError) -> None:
        """Put a damaged file aside and begin a new one; re-raise the error if the file is merely unwritable."""
        if isinstance(error, sqlite3.OperationalError):
            raise error
        with contextlib.suppress(AttributeError):
            self._db.close()
        put_aside(self._path, error)
        for beside in ("-wal", "-shm"):
            self._path.with_name(FILE + beside).unlink(missing_ok=True)
        self._db = _open(self._path)


def read_lines(home: Path) -> list[Line]:
    """Return all lines, oldest first.

    Raises:
        StoreError: the file cannot be read.
    """
    if not (home / FILE).exists():
        return []
    with _convert_failures(home / FILE), contextlib.closing(_open(home / FILE)) as db:
        db.row_factory = sqlite3.Row
        rows = db.execute("SELECT day, message, about, kinds, n, bytes, first, last FROM left ORDER BY day, id")
        return [Line(**{**row, "kinds": tuple(filter(None, row["kinds"].split(",")))}) for row in rows]


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        db.execute(SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def _convert_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{path} cannot be used, and nothing leaves that is not noted there: {error}") from error
