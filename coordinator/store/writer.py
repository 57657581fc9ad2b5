"""The one thread that writes a store; changes that wait share a transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

from coordinator.store.database import Database, get_failures
from fedge.errors import StoreError

MAX_BATCH: Final = 1000
"""Most changes in one transaction."""


Found = TypeVar("Found")


class _Change(NamedTuple):
    """A change for the writer: a function to call, or a statement for `Database.execute_each`."""

    future: Future[Any]
    run: Callable[[Database], Any] | None
    sql: str = ""
    values: Sequence[object] = ()


class Writer:
    """A thread that applies changes in order; pending ones share a transaction."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self._waiting: SimpleQueue[_Change | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, change: Callable[[Database], Found]) -> Future[Found]:
        """Queue a change; the future, which cannot be cancelled, is done when the change is durable."""
        return self._put(_Change(Future(), change))

    def submit_one(self, sql: str, *values: object) -> Future[bool]:
        """Queue one statement for `Database.execute_each`, which runs equal neighbours together."""
        return self._put(_Change(Future(), None, sql, values))

    def _put(self, change: _Change) -> Future[Any]:
        change.future.set_running_or_notify_cancel()
        self._waiting.put(change)
        return change.future

    def close(self) -> None:
        """Apply pending changes, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty() and len(batch) < MAX_BATCH:
                batch.append(self._waiting.get())
            if changes := [waiting for waiting in batch if waiting is not None]:
                self._carry_out(changes)
            if len(changes) < len(batch):
                return

    def _carry_out(self, changes: list[_Change]) -> None:
        found: list[Any] = []
        try:
            with convert_failures():
                self.db.begin_writing()
                try:
                    for sql, alike in groupby(changes, key=lambda change: change.sql):
                        if sql:
                            found += self.db.execute_each(sql, [change.values for change in alike])
                        else:
                            found += [change.run(self.db) for change in alike if change.run is not None]
                    self.db.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(*get_failures()):  # a full disk has rolled back already
                        self.db.execute("ROLLBACK")
                    raise
        except BaseException as error:  # noqa: BLE001 - passed to the callers
            for change in changes:
                change.future.set_exception(error)
        else:
            for change, one in zip(changes, found, strict=True):
                change.future.set_result(one)


@contextlib.contextmanager
def convert_failures() -> Iterator[None]:
    """Have failures of the database raise `StoreError`."""
    try:
        yield
    except get_failures() as error:
        raise StoreError(f"the store cannot be read or written: {str(error) or 'it did not answer in time'}") from error
