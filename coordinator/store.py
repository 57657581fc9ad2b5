"""The coordinator's truth: SQLite in WAL mode for what happened, a content-addressed folder for tensors.

One event is one transaction: the state change, and what keeps it from happening twice. Whatever is published is
published after its commit. A failed write stops the process (`StoreError`): going on would lose an accepted update.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from coordinator.fleet import Device
from coordinator.fleet.orders import OrderStatus
from coordinator.fleet.quarantine import Offence
from fedge.errors import ConfigError, StoreError
from fedge.files import BlobFolder, locked
from fedge.messages import Context, Order, Report

MIGRATIONS = Path(__file__).with_name("migrations")
EXPIRED: Final = "no report before the deadline"
UNWANTED: Final = "the run ended before the report came"
FEDGE_0_1: Final = 1
"""Schema of the stores of fedge 0.1."""


class Entry(Struct, frozen=True, kw_only=True):
    """An order and what came of it."""

    order: Order
    status: OrderStatus
    reason: str = ""
    report: Report | None = None


class Store:
    """One federation's durable state in one folder. Not for two processes at once: the second is refused."""

    def __init__(self, home: Path) -> None:
        """Open the folder, or make it.

        Raises:
            ConfigError: another process has it open.
            StoreError: it cannot be read or written, or was written by a newer fedge.
        """
        self.home = home
        with _guarded(), contextlib.ExitStack() as undo:
            taken = f"another coordinator works in {home}; stop it, or use another --home"
            undo.enter_context(locked(home, taken))
            self._db = undo.enter_context(contextlib.closing(sqlite3.connect(home / "store.db", isolation_level=None)))
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            migrate(self._db)
            self.blobs = BlobFolder(home / "blobs")
            self._open = undo.pop_all()

    def close(self) -> None:
        """Close the database and let another process have the folder."""
        self._open.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                if self._db.in_transaction:  # a full disk has rolled back already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # -------------------------------------------------------------------------------------------------------- rounds

    def begin_round(self, number: int, devices: Iterable[Device], now: float) -> None:
        """Begin a round with these devices, which stay the round's devices for good."""
        snapshot = msgspec.msgpack.encode(list(devices))
        with self._transaction() as db:
            db.execute("INSERT INTO rounds (round, devices, begun_at) VALUES (?, ?, ?)", (number, snapshot, now))

    def snapshot(self, number: int) -> tuple[Device, ...] | None:
        """The devices of a round that has begun; None: it has not."""
        with _guarded():
            row = self._db.execute("SELECT devices FROM rounds WHERE round = ?", (number,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=tuple[Device, ...])

    def commit_round(self, number: int, state: bytes, now: float, counted: Mapping[str, int]) -> None:
        """The round is done, this is the method's state, and so much is to be counted; all or nothing."""
        with self._transaction() as db:
            db.execute("UPDATE rounds SET done_at = ? WHERE round = ?", (now, number))
            db.execute("INSERT INTO states (round, body) VALUES (?, ?)", (number, state))
            db.execute("DELETE FROM states WHERE round < ?", (number,))
            for name, by in counted.items():
                _count(db, name, by)

    def state(self) -> bytes | None:
        """The method's state after the last round that was committed; None before the first."""
        with _guarded():
            row = self._db.execute("SELECT body FROM states ORDER BY round DESC LIMIT 1").fetchone()
        return None if row is None else row[0]

    def round_seconds(self) -> dict[int, float]:
        """How long each finished round took, from its beginning (before a crash, if there was one) to its end."""
        with _guarded():
            rows = self._db.execute("SELECT round, done_at - begun_at FROM rounds WHERE done_at IS NOT NULL ORDER BY 1")
            return dict(rows.fetchall())

    def last_contexts(self) -> dict[str, Context | None]:
        """What the devices of the last round that was begun had said of themselves, by id."""
        with _guarded():
            row = self._db.execute("SELECT max(round) FROM rounds").fetchone()
        devices = self.snapshot(row[0]) if row[0] is not None else None
        return {device.id: device.context for device in devices or ()}

    # -------------------------------------------------------------------------------------------------------- orders

    def write_orders(self, orders: Iterable[Order], *, streamed: bool = False) -> dict[str, Entry]:
        """Write orders that are not there yet; all of them as they stand, by device id.

        `streamed`: their answers are handed out one by one, and it is recorded in which round.
        """
        entries = {}
        with self._transaction() as db:
            for order in orders:
                db.execute(
                    "INSERT OR IGNORE INTO orders (id, round, label, device_id, body, status, streamed) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        order.id,
                        order.round,
                        order.label,
                        order.device_id,
                        msgspec.msgpack.encode(order),
                        OrderStatus.OPEN,
                        streamed,
                    ),
                )
                entries[order.device_id] = _entry(
                    db.execute("SELECT body, status, reason, report FROM orders WHERE id = ?", (order.id,)).fetchone()
                )
        return entries

    def entry(self, order_id: str) -> Entry | None:
        """An order and what came of it; None: there never was such an order."""
        with _guarded():
            row = self._db.execute(
                "SELECT body, status, reason, report FROM orders WHERE id = ?", (order_id,)
            ).fetchone()
        return None if row is None else _entry(row)

    def entries(self, number: int) -> tuple[Entry, ...]:
        """All orders of a round, by label and device id."""
        with _guarded():
            rows = self._db.execute(
                "SELECT body, status, reason, report FROM orders WHERE round = ? ORDER BY label, device_id", (number,)
            ).fetchall()
        return tuple(_entry(row) for row in rows)

    def streamed(self, number: int) -> tuple[Entry, ...]:
        """The streamed orders that no round before this one was given the answers of.

        First those that are closed, in the order in which they were, then those that are open.
        """
        with _guarded():
            rows = self._db.execute(
                "SELECT body, status, reason, report FROM orders "
                "WHERE streamed = 1 AND (handed IS NULL OR handed = ?) ORDER BY arrival IS NULL, arrival, id",
                (number,),
            ).fetchall()
        return tuple(_entry(row) for row in rows)

    def hand_out(self, order_id: str, number: int) -> None:
        """Record that a round is given the answer of a streamed order, before it is; the first time counts."""
        with self._transaction() as db:
            db.execute("UPDATE orders SET handed = ? WHERE id = ? AND handed IS NULL", (number, order_id))

    def end_streams(self, now: float) -> None:
        """Nobody waits for the answers of streamed orders any more: those that are open expire."""
        with _guarded():
            rows = self._db.execute(
                "SELECT id FROM orders WHERE streamed = 1 AND status = ?", (OrderStatus.OPEN,)
            ).fetchall()
        for (order_id,) in rows:
            self._close(order_id, OrderStatus.EXPIRED, UNWANTED, None, now)

    def accept(self, report: Report, now: float) -> bool:
        """Record the report of an open order; False, and nothing changed, if it is not open any more."""
        body = msgspec.msgpack.encode(report)
        return self._close(report.order_id, OrderStatus.ACCEPTED, "", body, now)

    def reject(self, order_id: str, reason: str, now: float) -> bool:
        """Close an open order whose report is not acceptable; False if it is not open any more."""
        return self._close(order_id, OrderStatus.REJECTED, reason, None, now)

    def expire(self, order_id: str, now: float) -> bool:
        """Close an open order that nobody answered in time; False if it is not open any more."""
        return self._close(order_id, OrderStatus.EXPIRED, EXPIRED, None, now)

    def _close(self, order_id: str, status: OrderStatus, reason: str, report: bytes | None, now: float) -> bool:
        with self._transaction() as db:
            cursor = db.execute(
                "UPDATE orders SET status = ?, reason = ?, report = ?, closed_at = ?, "
                "arrival = (SELECT coalesce(max(arrival), 0) + 1 FROM orders) WHERE id = ? AND status = ?",
                (status, reason[:1000], report, now, order_id, OrderStatus.OPEN),
            )
            return cursor.rowcount == 1

    # ------------------------------------------------------------------------------------------------------ the rest

    def accuse(self, offence: Offence) -> bool:
        """Keep evidence against a device; False if a round has this against it already."""
        with self._transaction() as db:
            cursor = db.execute(
                "INSERT OR IGNORE INTO offences VALUES (?, ?, ?, ?)",
                (offence.device_id, offence.round, offence.name, offence.detail[:1000]),
            )
            return cursor.rowcount == 1

    def offences(self) -> tuple[Offence, ...]:
        """All evidence against devices."""
        with _guarded():
            rows = self._db.execute("SELECT device_id, round, name, detail FROM offences ORDER BY 1, 2, 3").fetchall()
        return tuple(Offence(device_id=i, round=r, name=name, detail=detail) for i, r, name, detail in rows)

    def count(self, counted: Mapping[str, int]) -> None:
        """Add to counters."""
        with self._transaction() as db:
            for name, by in counted.items():
                _count(db, name, by)

    def counters(self) -> dict[str, int]:
        """All counters, by name."""
        with _guarded():
            return dict(self._db.execute("SELECT name, value FROM counters ORDER BY name").fetchall())

    def remember(self, name: str, value: str) -> str:
        """Keep a value for good; what was kept before wins and is returned."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
            (stored,) = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(stored)

    def keep(self, name: str, value: str) -> None:
        """Keep a value until the next one of this name."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def recall(self, name: str) -> str | None:
        """A value that was kept; None: there is none."""
        with _guarded():
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def keep_only(self, digests: Collection[str]) -> None:
        """Delete all other tensors, and what was received of others."""
        with _guarded():
            for path in list(self.blobs.path("").iterdir()):
                if path.name.partition(".")[0] not in digests:
                    path.unlink(missing_ok=True)


def _count(db: sqlite3.Connection, name: str, by: int) -> None:
    db.execute(
        "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value", (name, by)
    )


def _entry(row: tuple[bytes, str, str, bytes | None]) -> Entry:
    body, status, reason, report = row
    return Entry(
        order=msgspec.msgpack.decode(body, type=Order),
        status=OrderStatus(status),
        reason=reason,
        report=None if report is None else msgspec.msgpack.decode(report, type=Report),
    )


def migrate(db: sqlite3.Connection) -> None:
    """Bring the schema up to date; each migration and its record are one transaction.

    Raises:
        ConfigError: the store is fedge 0.1's, whose orders no agent understands any more.
        StoreError: it is a newer fedge's.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    scripts = {int(script.name[:4]): script for script in sorted(MIGRATIONS.glob("*.sql"))}
    if version == FEDGE_0_1:
        raise ConfigError(
            "this home was made by fedge 0.1, whose rounds fedge 0.2 cannot go on with: finish them with fedge 0.1, or "
            "begin anew with another --home; bundles that are installed on devices go on answering"
        )
    if version > max(scripts):
        raise StoreError(f"the store has schema {version}, this fedge knows {max(scripts)}: update fedge")
    for number, script in scripts.items():
        if number > version:
            db.executescript(f"BEGIN IMMEDIATE;\n{script.read_text()}\nPRAGMA user_version = {number};\nCOMMIT;")


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"the store cannot be read or written: {error}") from error
