"""The coordinator's durable state: SQLite or PostgreSQL for events, a content-addressed folder for tensors.

One event is one atomic change, including the key that keeps the event from happening twice. Pending changes share a
transaction. Everything is published after its commit. A failed write stops the process (`StoreError`), because an
accepted update would otherwise be lost.

Methods for frequent changes return a future that is done when the change is durable; changes take effect in the order
of the calls. All other methods block.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec

from coordinator.store.blobs import open_blobs, prevent_deletion
from coordinator.store.database import Database, make_connector, migrate
from coordinator.store.records import Device, Entry, Event, Offence, OrderStatus, make_entry
from coordinator.store.writer import Found, Writer, convert_failures
from fedge.errors import MALFORMED, ConfigError, ProtocolError, StoreError, raise_as
from fedge.system.files import InUseError, lock_folder
from fedge.wire.messages import Context, Order, Report

EXPIRED: Final = "no report before the deadline"
UNWANTED: Final = "the run ended before the report came"
UNASKED: Final = "the round ended without a wait for the report"
"""Reason for the end of an order written before a restart and not asked for after it, since its step has another
version."""
RECALLED_ROUNDS: Final = 8
"""Last rounds whose reports show, after a restart, how fast devices are and which problems they had."""
NOBODY: Final = msgspec.msgpack.encode([])
OFFERED: Final = "offered"
"""Name of a value (`Store.find_value`): the digests that servers of models may send because open orders name them, as
JSON."""
DEVICES: Final = "devices"
"""Name of a value: the devices' last messages for the next start, `coordinator.store.registry.LastMessages` by id, as
JSON."""
ISSUE: Final = "issue"
"""Name of a value: a part of the orders' ids since the store was restored from a backup (`coordinator.service.backup`).
"""
AT_BROKER: Final = "at_broker"
"""Name of a value: a secret of the federation's coordinator and its helpers, part of their names at the broker."""
LEASE: Final = "lease"
"""Name of a value: which coordinator works on the store (`coordinator.store.lease`)."""
MAX_EVENTS: Final = 200_000
"""Most events that are kept; older ones are deleted."""
ENTRY: Final = "SELECT body, status, reason, report, arrival FROM orders"


class Store:
    """The durable state of one federation. There is one dispatcher; intakes may come and go beside it.

    An intake may call `find_value("start")` (layout and initial model) and `find_entry`, and `accept` or `reject`
    reports. An order is closed once, by the first call. The dispatcher learns by `get_closed_since` which orders others
    have closed.
    """

    def __init__(
        self,
        home: Path,
        url: str | None = None,
        *,
        blobs: str | None = None,
        federation: str = "",
        intake: bool = False,
    ) -> None:
        """Open the federation's state, or create it.

        Args:
            home: folder of the tables and tensors, unless these are elsewhere.
            url: postgresql://... of the tables; several federations may share a database.
            blobs: s3://... of the tensors.
            federation: names the federation's schema in the database.
            intake: whether it is opened beside the dispatcher that has created it.

        Raises:
            ConfigError: another dispatcher has the state open; or, for an intake, the state does not exist yet.
            StoreError: the state cannot be read or written, or was written by a newer fedge.
        """
        self.home = home
        connect = make_connector(home, url, federation)
        with contextlib.ExitStack() as undo:
            if not intake:
                undo.enter_context(
                    lock_folder(home, f"another coordinator works in {home}; stop it, or use another --home")
                )
            with convert_failures():
                self.blobs = open_blobs(home, blobs, dispatcher=not intake)
                writing, self._db = (undo.enter_context(contextlib.closing(connect())) for _ in range(2))
            with convert_failures():
                if not intake:
                    writing.become_dispatcher(
                        f"another coordinator works for federation {federation} on this server: stop it"
                    )
                migrate(writing, check=intake)
            self._writer = undo.enter_context(contextlib.closing(Writer(writing)))
            self._reading = Lock()
            self._open = undo.pop_all()

    def close(self) -> None:
        """Close the database and let another process have the folder."""
        self._open.close()

    def _change(self, change: Callable[[Database], Found]) -> Found:
        return self._writer.submit(change).result()

    def _read(self, sql: str, *values: object) -> list[Any]:
        with convert_failures(), self._reading:
            return list(self._db.execute(sql, *values))

    # -------------------------------------------------------------------------------------------------------- rounds

    def start_round(self, number: int, devices: Iterable[Device], now: float) -> None:
        """Start a round with these devices; a later call does not change them."""
        snapshot = msgspec.msgpack.encode(list(devices))
        sql = "INSERT INTO rounds (round, devices, begun_at) VALUES ($1, $2, $3)"
        self._change(lambda db: db.execute(sql, number, snapshot, now))

    def get_round_devices(self, number: int) -> tuple[Device, ...] | None:
        """Return the devices of a round; None if the round has not begun."""
        rows = self._read("SELECT devices FROM rounds WHERE round = $1", number)
        return msgspec.msgpack.decode(rows[0][0], type=tuple[Device, ...]) if rows else None

    def get_round_beginning(self, number: int) -> float | None:
        """Return when a round began, in seconds since the epoch; None if it has not begun."""
        rows = self._read("SELECT begun_at FROM rounds WHERE round = $1", number)
        return float(rows[0][0]) if rows else None

    def commit_round(
        self, number: int, state: bytes, now: float, counted: Mapping[str, int], *, keep: int = RECALLED_ROUNDS
    ) -> None:
        """Commit a finished round: the method's state and the counters, all or nothing.

        Open orders expire, since nobody waits for their reports and a device repeats its report until a verdict. The
        devices and orders of all rounds but the last `keep` are deleted, streamed orders only once they are handed out.
        The times of rounds stay.
        """
        old = number - keep
        left = self._read("SELECT id FROM orders WHERE round = $1 AND streamed = 0 AND status = 'open'", number)
        self._expire(left, UNASKED, now)

        def commit(db: Database) -> None:
            db.execute("UPDATE rounds SET done_at = $1 WHERE round = $2", now, number)
            db.execute("INSERT INTO states (round, body) VALUES ($1, $2)", number, state)
            db.execute("DELETE FROM states WHERE round < $1", number)
            db.execute("UPDATE rounds SET devices = $1 WHERE round <= $2 AND devices != $1", NOBODY, old)
            db.execute(
                "DELETE FROM orders WHERE round <= $1 AND (streamed = 0 OR handed IS NOT NULL) "
                "AND coalesce(arrival, 0) < (SELECT coalesce(max(arrival), 1) FROM orders)",  # which numbers the next
                old,
            )
            _add_counts(db, counted)

        self._change(commit)

    def get_state(self) -> bytes | None:
        """Return the method's state after the last round that was committed; None before the first."""
        rows = self._read("SELECT body FROM states ORDER BY round DESC LIMIT 1")
        return rows[0][0] if rows else None

    def get_round_seconds(self, last: int = -1) -> dict[int, float]:
        """Return the duration of finished rounds, from the first beginning (before any crash) to the end.

        `last`: how many, the last ones; all if -1.
        """
        sql = "SELECT round, done_at - begun_at FROM rounds WHERE done_at IS NOT NULL ORDER BY round"
        if last < 0:
            return dict(self._read(sql))
        return dict(reversed(self._read(f"{sql} DESC LIMIT $1", last)))

    def get_last_contexts(self) -> dict[str, Context | None]:
        """Return the contexts of the devices of the last begun round, by id."""
        ((last,),) = self._read("SELECT max(round) FROM rounds")
        devices = self.get_round_devices(last) if last is not None else None
        return {device.id: device.context for device in devices or ()}

    def list_devices(self) -> set[str]:
        """List the devices of the last begun round and those whose statuses were stored last."""
        kept = json.loads(self.find_value(DEVICES) or "{}")
        return {*kept, *self.get_last_contexts()}

    # -------------------------------------------------------------------------------------------------------- orders

    def write_orders(self, orders: Iterable[Order], *, streamed: bool = False) -> dict[str, Entry]:
        """Write the orders of one step, except those that exist; return all of them as stored, by device id.

        `streamed`: whether their answers are handed out one by one, each with a record of the round.
        """
        given = list(orders)
        if not given:
            return {}
        values = [
            (o.id, o.round, o.label, o.device_id, msgspec.msgpack.encode(o), OrderStatus.OPEN.value, int(streamed))
            for o in given
        ]

        def write(db: Database) -> list[Any]:
            db.executemany(
                "INSERT INTO orders (id, round, label, device_id, body, status, streamed) "
                "VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
                values,
            )
            return list(db.execute(f"{ENTRY} WHERE round = $1 AND label = $2", given[0].round, given[0].label))

        found = {entry.order.device_id: entry for entry in map(make_entry, self._change(write))}
        return {order.device_id: found[order.device_id] for order in given}

    def find_entry(self, order_id: str) -> Entry | None:
        """Return an order and its outcome; None if there is no such order."""
        rows = self._read(f"{ENTRY} WHERE id = $1", order_id)
        return make_entry(rows[0]) if rows else None

    def get_entries(self, number: int) -> tuple[Entry, ...]:
        """Return all orders of a round, by label and device id."""
        return tuple(map(make_entry, self._read(f"{ENTRY} WHERE round = $1 ORDER BY label, device_id", number)))

    def get_streamed(self, number: int) -> tuple[Entry, ...]:
        """Return the streamed orders whose answers were not handed out in an earlier round.

        The closed ones come first, by their numbers, then the open ones.
        """
        which = "streamed = 1 AND (handed IS NULL OR handed = $1) ORDER BY arrival IS NULL, arrival, id"
        return tuple(map(make_entry, self._read(f"{ENTRY} WHERE {which}", number)))

    def hand_out(self, order_id: str, number: int) -> Future[object]:
        """Record, before a streamed order's answer is handed out, the round in which it is; the first call counts."""
        sql = "UPDATE orders SET handed = $1 WHERE id = $2 AND handed IS NULL"
        return self._writer.submit(lambda db: db.execute(sql, number, order_id))

    def expire_streams(self, now: float) -> None:
        """Expire the open streamed orders, whose answers are no longer wanted."""
        self._expire(self._read("SELECT id FROM orders WHERE streamed = 1 AND status = 'open'"), UNWANTED, now)

    def _expire(self, ids: Sequence[tuple[str]], reason: str, now: float) -> None:
        for future in [self._close(i, OrderStatus.EXPIRED, reason, None, now) for (i,) in ids]:
            future.result()

    def accept(self, report: Report, now: float) -> Future[bool]:
        """Record the report of an open order; False, and no change, if the order is not open any more."""
        body = msgspec.msgpack.encode(report)
        return self._close(report.order_id, OrderStatus.ACCEPTED, "", body, now)

    def reject(self, order_id: str, reason: str, now: float) -> Future[bool]:
        """Close an open order whose report is not acceptable; False if the order is not open any more."""
        return self._close(order_id, OrderStatus.REJECTED, reason, None, now)

    def expire(self, order_id: str, now: float) -> Future[bool]:
        """Close an open order that got no report in time; False if the order is not open any more."""
        return self._close(order_id, OrderStatus.EXPIRED, EXPIRED, None, now)

    def get_closed_since(self, arrival: int) -> tuple[Entry, ...]:
        """Return the orders that any process closed after the order with this number, in the order of closing.

        Numbers have no gaps and never become visible out of order, so the last number found is the next `arrival`.
        """
        return tuple(map(make_entry, self._read(f"{ENTRY} WHERE arrival > $1 ORDER BY arrival", arrival)))

    def get_last_arrival(self) -> int:
        """Return the number of the last closed order; 0 if there is none."""
        return int(self._read("SELECT coalesce(max(arrival), 0) FROM orders")[0][0])

    def _close(self, order_id: str, status: OrderStatus, reason: str, report: bytes | None, now: float) -> Future[bool]:
        return self._writer.submit_one(
            "UPDATE orders SET status = $2, reason = $3, report = $4, closed_at = $5, "
            "arrival = (SELECT coalesce(max(arrival), 0) + 1 FROM orders) "
            "WHERE id = $1 AND status = 'open' RETURNING id",
            *(order_id, status.value, _clean_text(reason), report, now),
        )

    # -------------------------------------------------------------------------------------------------------- events

    def record_events(self, *events: Event) -> Future[object]:
        """Record events, and delete the oldest beyond `MAX_EVENTS`. Callers need not wait."""
        bodies = [msgspec.json.encode(event.fields).decode().replace("\\u0000", "\\ufffd") for event in events]
        sql = "INSERT INTO events (number, at, round, name, device, fields) VALUES ($1, $2, $3, $4, $5, $6)"

        def insert_events(db: Database) -> None:
            ((last,),) = db.execute("SELECT coalesce(max(number), 0) FROM events")
            rows = enumerate(zip(events, bodies, strict=True), start=last + 1)
            db.executemany(sql, [(n, e.at, e.round, e.name, e.device, text) for n, (e, text) in rows])
            db.execute("DELETE FROM events WHERE number <= $1", last + len(events) - MAX_EVENTS)

        return self._writer.submit(insert_events)

    def get_events(
        self,
        *,
        after: int = 0,
        last: int | None = None,
        device: str | None = None,
        round: int | None = None,  # noqa: A002 - what it is
        before: int | None = None,
        names: Collection[str] = (),
        but: Collection[str] = (),
        limit: int = 1000,
    ) -> list[Event]:
        """Return events by number: at most `limit` after `after`, or the `last`; of one device or round if given.

        `before`: only events with lower numbers. `names`, `but`: only events with one of these names, and with none of
        those.
        """
        values = (after, limit if last is None else last)
        of = {"device =": device, "round =": round, "number <": before}
        each = [(condition, value) for condition, value in of.items() if value is not None]
        each += [("name !=", name) for name in but]
        which = "".join(f" AND {condition} ${k}" for k, (condition, _) in enumerate(each, start=3))
        if names:
            which += f" AND name IN ({', '.join(f'${k}' for k in range(3 + len(each), 3 + len(each) + len(names)))})"
        order = "number" if last is None else "number DESC"
        fields = "number, at, round, name, device, fields"
        sql = f"SELECT {fields} FROM events WHERE number > $1{which} ORDER BY {order} LIMIT $2"  # noqa: S608
        rows = self._read(sql, *values, *(value for _, value in each), *names)
        found = [
            Event(number=n, at=at, round=r, name=name, device=i, fields=msgspec.json.decode(fields))
            for n, at, r, name, i, fields in rows
        ]
        return found if last is None else found[::-1]

    # ------------------------------------------------------------------------------------------------------ the rest

    def record_offence(self, offence: Offence) -> Future[bool]:
        """Record evidence against a device; False if the same evidence is already recorded for its round."""
        sql = "INSERT INTO offences VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING round"
        values = offence.device_id, offence.round, offence.name, _clean_text(offence.detail)
        return self._writer.submit(lambda db: bool(db.execute(sql, *values)))

    def get_offences(self) -> tuple[Offence, ...]:
        """Return all evidence against devices."""
        rows = self._read("SELECT device_id, round, name, detail FROM offences ORDER BY 1, 2, 3")
        return tuple(Offence(device_id=i, round=r, name=name, detail=detail) for i, r, name, detail in rows)

    def add_counts(self, counted: Mapping[str, int]) -> None:
        """Add to counters."""
        self._change(lambda db: _add_counts(db, counted))

    def get_counters(self) -> dict[str, int]:
        """Return all counters, by name."""
        return dict(self._read("SELECT name, value FROM counters ORDER BY name"))

    def put_value_once(self, name: str, value: str) -> str:
        """Store a value unless there is one of this name; return the stored value."""

        def insert_value(db: Database) -> str:
            db.execute("INSERT INTO meta VALUES ($1, $2) ON CONFLICT DO NOTHING", name, value)
            return str(db.execute("SELECT value FROM meta WHERE name = $1", name)[0][0])

        return self._change(insert_value)

    def get_broker_secret(self) -> str:
        """Return the secret part of the names that this store's processes have at the broker."""
        return self.put_value_once(AT_BROKER, secrets.token_hex(16))

    def put_value(self, name: str, value: str) -> None:
        """Store a value in place of an earlier one of this name."""
        self.put_values({name: value})

    def put_values(self, values: Mapping[str, str]) -> None:
        """Store values in place of earlier ones of these names, all or nothing."""
        sql = "INSERT INTO meta VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        self._change(lambda db: db.executemany(sql, list(values.items())))

    def change_value(self, name: str, change: Callable[[str | None], str]) -> str:
        """Change a stored value, None if there is none, in one transaction; return the new value."""

        def change_stored(db: Database) -> str:
            rows = db.execute("SELECT value FROM meta WHERE name = $1", name)
            value = change(rows[0][0] if rows else None)
            sql = "INSERT INTO meta VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
            db.execute(sql, name, value)
            return value

        return self._change(change_stored)

    def find_value(self, name: str) -> str | None:
        """Return a stored value; None if there is none."""
        rows = self._read("SELECT value FROM meta WHERE name = $1", name)
        return str(rows[0][0]) if rows else None

    def require_blobs(self, url: str | None) -> None:
        """Check that the federation keeps its tensors at `url`, or in its home if None.

        Raises:
            ConfigError: it keeps them elsewhere.
        """
        if (begun := self.find_value("blobs") or None) != url:
            where = f"at {begun}: give --blobs {begun}" if begun else "in its home: leave --blobs out"
            raise ConfigError(f"the federation keeps its tensors {where}")

    def require_tensors(self, digests: Collection[str]) -> None:
        """Check that tensors exist.

        Raises:
            StoreError: some do not; the text names them.
        """
        if missing := sorted(digest for digest in digests if self.blobs.fetch(digest) is None):
            names = ", ".join(missing)
            raise StoreError(
                f"{self.home / 'blobs'} lacks {len(missing)} of the tensors that the store names ({names}): bring "
                "the folder that belongs to it, or `fedge restore` a backup"
            )

    def remove_others(self, digests: Collection[str], *, spare_s: float = 0.0) -> None:
        """Delete all other tensors, also partly received ones, except those younger than `spare_s`.

        During a backup nothing is deleted; the next call deletes them.
        """
        with contextlib.suppress(InUseError), prevent_deletion(self.home, "a backup is being made"), convert_failures():
            self.blobs.remove_others(digests, spare_s=spare_s)


def _add_counts(db: Database, counted: Mapping[str, int]) -> None:
    db.executemany(
        "INSERT INTO counters VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = counters.value + excluded.value",
        counted.items(),
    )


def _clean_text(text: str) -> str:
    """Cut text from a device, and remove the character that PostgreSQL cannot store."""
    return text[:1000].replace("\0", "\N{REPLACEMENT CHARACTER}")


def explain_unreadable(store: Store) -> AbstractContextManager[None]:
    """Explain, within this context, that the store's content is unreadable, since a backup may hold anything.

    Raises:
        StoreError: the content cannot be read; the text says what to do.
    """
    text = f"what {store.home} holds of the run cannot be read; restore another backup, or begin anew in another --home"
    return raise_as(StoreError, text, on=(*MALFORMED, json.JSONDecodeError, ProtocolError))
