"""The store's tables: in an SQLite file or on a PostgreSQL server.

Statements number their values `$1`, `$2`, ... and use only the common dialect. Migrations are written in SQLite's.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fedge.errors import ConfigError, StoreError
from fedge.settings import NAME
from fedge.system.files import give_to_owner

WAIT_S: Final = 5.0
"""Longest wait for another process that writes at this moment, or was just killed and is not gone yet."""
ANSWER_S: Final = 60.0
"""Time for one statement, after which the server counts as gone."""
SCHEMES: Final = ("postgresql://", "postgres://")
IN_USE: Final = 0x66656467
"""A file's `application_id` from its first connection to its last. Meanwhile a part of its content may be only in its
log, FILE-wal."""
WORDS: Final = {
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "BLOB": "BYTEA",
    "TEXT": 'TEXT COLLATE "C"',  # ordered by code point, like SQLite
    "STRICT": "",
}


class _Sqlite:
    """A connection to a local file in WAL mode, flushed to disk at each commit.

    While a process has the file open, the file itself says so (`IN_USE`), so that a copy without its log is refused. A
    killed process leaves log and mark. The last process to end cleanly merges the log, then removes the mark. If the
    mark stays, a log stays, too, even if empty.
    """

    def __init__(self, file: Path) -> None:
        self._log = Path(f"{file}-wal")
        self._users = (file.parent / "store.users").open("a")
        try:
            give_to_owner(self._users.fileno(), file.parent)
            fcntl.flock(self._users, fcntl.LOCK_SH)
            _require_log(file, self._log)
            self._db = sqlite3.connect(file, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self.execute(f"PRAGMA {pragma}")
            if self.execute("PRAGMA application_id") != [(IN_USE,)]:
                self._mark(IN_USE)
        except BaseException:
            self._users.close()
            raise

    def _mark(self, mark: int) -> bool:
        self.execute(f"PRAGMA application_id = {mark}")
        return self._merge_log()

    def _merge_log(self) -> bool:
        """Merge the log into the file; return whether all of it was merged. The log's space is kept for reuse."""
        return bool(self.execute("PRAGMA wal_checkpoint(RESTART)")[0][0] == 0)

    def execute(self, sql: str, *values: object) -> Sequence[Any]:
        """Execute one statement and return its rows."""
        return self._db.execute(sql.replace("$", "?"), values).fetchall()

    def executemany(self, sql: str, values: Iterable[Sequence[object]]) -> None:
        """Execute a statement for each of many values."""
        self._db.executemany(sql.replace("$", "?"), values)

    def execute_each(self, sql: str, values: Sequence[Sequence[object]]) -> list[bool]:
        """Execute a statement for each of many values; return for each whether it gave a row (with its first value)."""
        return [bool(self.execute(sql, *one)) for one in values]

    def become_dispatcher(self, taken: str) -> None:
        """Become the only dispatcher until the connection ends; for SQLite the lock of the folder decides.

        Raises:
            ConfigError: another process is the dispatcher; `taken` is the text.
        """

    def begin_writing(self) -> None:
        """Begin a writing transaction once no other process has one open, so that transactions end in their order."""
        self.execute("BEGIN IMMEDIATE")

    def begin_reading(self) -> None:
        """Begin a read-only transaction, all of which sees the tables as of its first statement."""
        self.execute("BEGIN")

    def get_version(self) -> int:
        """Return the number of the last migration; 0 if there are no tables yet."""
        return int(self.execute("PRAGMA user_version")[0][0])

    def migrate(self, number: int, script: str) -> None:
        """Run a migration and record it, in one transaction."""
        self._db.executescript(f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;")

    def close(self) -> None:
        clean = False
        with contextlib.suppress(OSError, sqlite3.Error):  # others have it open, or the disk is full
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db.rollback()
            clean = self._merge_log() and self._mark(0)
        self._db.close()
        if not clean:
            with contextlib.suppress(OSError):
                self._log.touch()
        self._users.close()


def _require_log(file: Path, log: Path) -> None:
    """Check that a file that was in use has its log.

    Raises:
        ConfigError: the file was copied without its log.
    """
    if not file.exists() or log.exists():
        return
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        if db.execute("PRAGMA application_id").fetchone() == (IN_USE,):
            raise ConfigError(
                f"{file} was in use when it was copied, and lacks what was in {log.name}: take a copy made by "
                "`fedge backup`, or one of the whole folder of a coordinator that was stopped (docs/operating.md)"
            )


class _Postgres:
    """A connection to a schema named after the federation. asyncpg runs in its own loop; callers wait.

    The server must keep the session, since advisory locks say who is the dispatcher and who writes. A pooler that
    shares sessions between transactions will not do.
    """

    def __init__(self, url: str, federation: str) -> None:
        try:
            import asyncpg
        except ModuleNotFoundError as error:
            raise ConfigError("a store on PostgreSQL needs fedge[postgres]: pip install 'fedge[postgres]'") from error
        self._busy: type[Exception] = asyncpg.LockNotAvailableError
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        settings = {
            "application_name": f"fedge {federation}",
            "search_path": f'"{federation}"',
            "synchronous_commit": "on",
            "lock_timeout": f"{WAIT_S}s",
            "tcp_keepalives_idle": "10",  # the locks of a lost machine are released after half a minute
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "4",
        }
        try:
            self._db = self._wait(
                asyncpg.connect(url, server_settings=settings, command_timeout=ANSWER_S, timeout=ANSWER_S)
            )
            self._run_script(f'CREATE SCHEMA IF NOT EXISTS "{federation}"')
            self._run_script("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        except BaseException:
            self._stop_loop()
            raise

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run_script(self, text: str) -> None:
        self._wait(self._db.execute(text))

    def execute(self, sql: str, *values: object) -> Sequence[Any]:
        return list(map(tuple, self._wait(self._db.fetch(sql, *values))))

    def executemany(self, sql: str, values: Iterable[Sequence[object]]) -> None:
        self._wait(self._db.executemany(sql, values))

    def execute_each(self, sql: str, values: Sequence[Sequence[object]]) -> list[bool]:
        rows = self._wait(self._db.fetchmany(sql, values))  # one round trip
        left = Counter(row[0] for row in rows)
        found = []
        for first, *_ in values:
            found.append(left[first] > 0)  # the first of equal values
            left[first] -= 1
        return found

    def begin_writing(self) -> None:
        self._run_script("BEGIN; SELECT pg_advisory_xact_lock(hashtextextended(current_schema(), 1))")

    def begin_reading(self) -> None:
        self._run_script("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def become_dispatcher(self, taken: str) -> None:
        try:
            self._run_script("SELECT pg_advisory_lock(hashtextextended(current_schema(), 0))")
        except self._busy as error:
            raise ConfigError(taken) from error

    def get_version(self) -> int:
        return int(self.execute("SELECT coalesce(max(version), 0) FROM schema_version")[0][0])

    def migrate(self, number: int, script: str) -> None:
        translated = re.sub(r"\b(" + "|".join(WORDS) + r")\b", lambda word: WORDS[word[0]], script)
        self._run_script(f"BEGIN;\n{translated}\nINSERT INTO schema_version VALUES ({number});\nCOMMIT;")

    def close(self) -> None:
        try:
            self._wait(self._db.close(timeout=WAIT_S))
        except get_failures():  # the server is gone: nothing to close
            self._db.terminate()
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Database = _Sqlite | _Postgres
"""A connection to the database, used by one thread at a time. `get_failures` returns its exceptions."""


def get_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a connection whose tables cannot be read or written."""
    asyncpg = sys.modules.get("asyncpg")
    if asyncpg is None:
        return sqlite3.Error, OSError
    return sqlite3.Error, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError


def make_connector(home: Path, url: str | None, federation: str) -> Callable[[], Database]:
    """Make a function that connects to the tables in HOME/store.db or at `url`, and creates what is missing.

    Raises:
        ConfigError: the URL is not PostgreSQL's, the federation's name is invalid, the home has tables of its own, or
            asyncpg is not installed.
    """
    file, elsewhere = home / "store.db", home / "store.elsewhere"
    if url is None:
        if elsewhere.exists():
            raise ConfigError(f"the federation in {home} keeps its tables on a server: name it with --store")
        return lambda: _Sqlite(file)
    if not url.startswith(SCHEMES):
        raise ConfigError("the store's address must begin with postgresql://; without one it is HOME/store.db")
    if re.match(NAME, str(federation)) is None:
        raise ConfigError(f"{federation!r} is no name of a federation")
    if file.exists():
        raise ConfigError(f"the federation in {home} was begun with {file}: leave --store out, or use another --home")
    home.mkdir(parents=True, exist_ok=True)
    elsewhere.touch()
    return lambda: _Postgres(url, federation)


MIGRATIONS = Path(__file__).with_name("migrations")


FEDGE_0_1: Final = 1
"""Schema of the stores of fedge 0.1."""


def migrate(db: Database, *, check: bool = False) -> None:
    """Bring the schema up to date; each migration and its record are one transaction.

    Args:
        db: the database to migrate.
        check: whether to check only that the schema is up to date.

    Raises:
        ConfigError: the store is of fedge 0.1, whose orders no agent understands any more; or, with `check`, the schema
            is not up to date.
        StoreError: the store is of a newer fedge.
    """
    version = db.get_version()
    scripts = {int(script.name[:4]): script for script in sorted(MIGRATIONS.glob("*.sql"))}
    if version == FEDGE_0_1:
        raise ConfigError(
            "this home was made by fedge 0.1, whose rounds fedge 0.2 cannot go on with: finish them with fedge 0.1, or "
            "begin anew with another --home; bundles that are installed on devices go on answering"
        )
    if version > max(scripts):
        raise StoreError(f"the store has schema {version}, this fedge knows {max(scripts)}: update fedge")
    if check and version < max(scripts):
        raise ConfigError("there is no store of this version of fedge yet: start its coordinator first")
    for number, script in scripts.items():
        if number > version:
            db.migrate(number, script.read_text())
