"""The file HOME/samples/samples.db: its tables, and transactions that survive kill -9 and a power cut.

Labels are class numbers, or numbers of other groups of samples (`Problem.find_group`), -1 without a label. Everything
is kept apart for sensitive samples (1) and all others (0), so that sensitive samples shape nothing about the others.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedge.errors import DamagedError, StoreError
from fedge.system.files import give_to_owner, make_folder

FOLDER: Final = "samples"
FILE: Final = "samples.db"
WAIT_S: Final = 30.0
"""Longest wait for another process that writes, which usually takes a few milliseconds."""
UNLABELLED: Final = -1
OVERHEAD: Final = 200
"""Bytes of a sample on the disk besides its numbers."""

PRAGMAS: Final = (
    *("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", "recursive_triggers = ON"),
    "cache_size = -1000",  # KiB, in the agent's small process, too
)
"""Triggers are recursive so that a row that is replaced leaves the totals."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS samples (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL, rank INTEGER NOT NULL, label INTEGER NOT NULL,
    sensitive INTEGER NOT NULL, place INTEGER NOT NULL, at REAL NOT NULL, origin TEXT NOT NULL, size INTEGER NOT NULL,
    dtype TEXT NOT NULL, x BLOB NOT NULL, UNIQUE (digest, label, sensitive)
);
CREATE INDEX IF NOT EXISTS samples_by_class ON samples (sensitive, label, rank);
CREATE TABLE IF NOT EXISTS totals (
    sensitive INTEGER NOT NULL, label INTEGER NOT NULL, n INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (sensitive, label)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON samples BEGIN
    INSERT INTO totals VALUES (new.sensitive, new.label, 1, new.size)
    ON CONFLICT DO UPDATE SET n = n + 1, size = size + excluded.size;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON samples BEGIN
    UPDATE totals SET n = n - 1, size = size - old.size WHERE sensitive = old.sensitive AND label = old.label;
END;
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF label, sensitive ON samples BEGIN
    UPDATE totals SET n = n - 1, size = size - old.size WHERE sensitive = old.sensitive AND label = old.label;
    INSERT INTO totals VALUES (new.sensitive, new.label, 1, new.size)
    ON CONFLICT DO UPDATE SET n = n + 1, size = size + excluded.size;
END;
CREATE TABLE IF NOT EXISTS places (
    digest BLOB NOT NULL, sensitive INTEGER NOT NULL, nth INTEGER NOT NULL, place INTEGER NOT NULL,
    present INTEGER NOT NULL, PRIMARY KEY (digest, sensitive, nth)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions (
    digest BLOB NOT NULL, sensitive INTEGER NOT NULL, decision TEXT NOT NULL, PRIMARY KEY (digest, sensitive)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    digest BLOB NOT NULL, sensitive INTEGER NOT NULL, label INTEGER NOT NULL, answered INTEGER NOT NULL,
    release INTEGER NOT NULL, at REAL NOT NULL, nth INTEGER NOT NULL, PRIMARY KEY (digest, sensitive, label, release)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_time ON answers (sensitive, nth);
CREATE TABLE IF NOT EXISTS taken (path TEXT PRIMARY KEY, version TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
TARGETS: Final = (
    "CREATE TABLE IF NOT EXISTS targets (number INTEGER PRIMARY KEY, dtype TEXT NOT NULL, target BLOB NOT NULL)",
    "CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON samples BEGIN "
    "DELETE FROM targets WHERE number = old.number; END",
)
"""The targets of samples, by their numbers, of tasks whose targets are more than a class or a mark."""
"""`places`: of the samples in the device's source, the nth of a digest. `decisions`: what the owner deleted or marked,
so that it does not come back. `taken`: watched files whose samples came already. `facts`: the task, the counters, and
what the source was when it was read last."""


class Database:
    """A connection to the samples of one home; its threads take turns, and so do processes."""

    def __init__(self, home: Path) -> None:
        """Open or create the file, readable by its owner alone.

        Raises:
            StoreError: the file cannot be read or written.
        """
        self.file = home / FOLDER / FILE
        self._lock = threading.RLock()
        make_folder(self.file.parent)
        with self._convert_failures():
            self.file.parent.chmod(0o700)
            with os.fdopen(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)) as opened:
                give_to_owner(opened.fileno(), self.file.parent)
            self._db = sqlite3.connect(self.file, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            try:
                for pragma in PRAGMAS:
                    self._db.execute(f"PRAGMA {pragma}")
                if self._db.execute("PRAGMA user_version").fetchone() == (0,):
                    self._db.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Make one transaction of the `with` block, on the disk when the block has ended.

        Raises:
            StoreError: it cannot be written, and nothing of it was.
        """
        with self._transact("BEGIN IMMEDIATE") as db:
            yield db

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Let the `with` block see one state of all tables.

        Raises:
            StoreError: it cannot be read.
        """
        with self._transact("BEGIN") as db:
            yield db

    def erase(self) -> None:
        """Let nothing of what was deleted stay in the file or its log, unless others are reading just now.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock, self._convert_failures():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def _transact(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._convert_failures():
            self._db.execute(begin)
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _convert_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{self.file} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise DamagedError(f"{self.file} is damaged, move it away to begin anew: {error}") from error


def get_fact(db: sqlite3.Connection, name: str, default: int | str) -> int | str:
    """Return a fact, or the default if it was never noted."""
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return default if row is None else row[0]


def save_fact(db: sqlite3.Connection, name: str, value: int | str) -> None:
    """Note a fact in place of what was noted before."""
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (name, value))
