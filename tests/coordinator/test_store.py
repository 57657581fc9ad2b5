"""The store: what is committed is there after any death, and nothing is taken twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import store as module
from coordinator.fleet import Device
from coordinator.fleet.orders import OrderStatus
from coordinator.fleet.quarantine import Offence
from coordinator.store import Store
from fedge.errors import ConfigError, StoreError
from fedge.messages import Context, Order, Outcome, Report


def order(device: str = "a", *, round_: int = 1, label: str = "s", left_s: float = 60.0) -> Order:
    return Order(
        id=f"r.{round_}.{label}.{device}",
        device_id=device,
        run="r",
        round=round_,
        label=label,
        seed=0,
        task_fingerprint="t",
        left_s=left_s,
        step="profile",
        body=b"",
    )


def report(device: str = "a", value: float = 0.5) -> Report:
    return Report(order_id=f"r.1.s.{device}", device_id=device, seconds=value, outcome=Outcome.DONE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path)) as opened:
        opened.begin_round(1, [Device("a", 5, Context(device_id="a", load=0.5)), Device("b", 6)], now=1.0)
        yield opened


def test_it_is_in_wal_mode_and_waits_for_the_disk(store: Store) -> None:
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_snapshot_of_a_round_stays(store: Store, tmp_path: Path) -> None:
    assert store.snapshot(1) == (Device("a", 5, Context(device_id="a", load=0.5)), Device("b", 6, None))
    assert store.snapshot(2) is None
    assert store.last_contexts() == {"a": Context(device_id="a", load=0.5), "b": None}
    with pytest.raises(StoreError):
        store.begin_round(1, [], now=2.0)
    assert len(store.snapshot(1) or ()) == 2


def test_orders_that_are_there_stay_as_they_were(store: Store) -> None:
    store.write_orders([order("a")])
    entries = store.write_orders([order("a", left_s=99.0), order("b", left_s=99.0)])
    assert [e.order.left_s for e in entries.values()] == [60.0, 99.0]
    assert list(entries) == ["a", "b"]
    assert store.entries(1) == tuple(entries.values())


def test_a_report_is_accepted_once(store: Store) -> None:
    store.write_orders([order()])
    assert store.accept(report(value=0.1), now=2.0)
    assert not store.accept(report(value=0.9), now=3.0)
    assert not store.reject("r.1.s.a", "late", now=3.0)
    assert not store.expire("r.1.s.a", now=3.0)
    entry = store.entry("r.1.s.a")
    assert entry is not None
    assert (entry.status, entry.report) == (OrderStatus.ACCEPTED, report(value=0.1))


@pytest.mark.parametrize("closing", ["reject", "expire"])
def test_an_order_that_is_closed_takes_no_report(store: Store, closing: str) -> None:
    store.write_orders([order()])
    assert store.reject("r.1.s.a", "bad", now=2.0) if closing == "reject" else store.expire("r.1.s.a", now=2.0)
    assert not store.accept(report(), now=3.0)
    (entry,) = store.entries(1)
    assert entry.status == {"reject": OrderStatus.REJECTED, "expire": OrderStatus.EXPIRED}[closing]
    assert entry.report is None


def test_a_report_without_an_order_is_not_taken(store: Store) -> None:
    assert not store.accept(report("x"), now=2.0)
    assert store.entry("r.1.s.x") is None


def test_a_round_is_committed_with_its_counts_or_not_at_all(store: Store) -> None:
    store.commit_round(1, b"one", 3.5, {"bytes_up": 10})
    with pytest.raises(StoreError):  # the round was committed already
        store.commit_round(1, b"two", 9.0, {"bytes_up": 10})
    assert store.state() == b"one"
    assert store.counters() == {"bytes_up": 10}
    assert store.round_seconds() == {1: 2.5}
    store.begin_round(2, [], now=4.0)
    store.commit_round(2, b"two", 5.0, {"bytes_up": 1, "refused.malformed": 3})
    assert store.state() == b"two"
    assert store.counters() == {"bytes_up": 11, "refused.malformed": 3}


def test_what_is_remembered_first_stays(store: Store) -> None:
    assert store.recall("run") is None
    assert store.remember("run", "x") == "x"
    assert store.remember("run", "y") == "x"
    assert store.recall("run") == "x"


def test_only_named_tensors_are_kept(store: Store) -> None:
    kept, gone = store.blobs.put(b"kept"), store.blobs.put(b"gone")
    partial = store.blobs.path(gone).with_name(f"{'1' * 64}.part")
    partial.write_bytes(b"of a device that was too late")
    coming = partial.with_name(f"{'2' * 64}.part")
    coming.write_bytes(b"of an answer to a streamed order")
    store.keep_only({kept, "2" * 64})
    assert coming.exists()
    assert kept in store.blobs
    assert gone not in store.blobs
    assert not partial.exists()


# ----------------------------------------------------------------------------------------------------------- streams


def test_streamed_orders_come_as_they_were_closed_until_a_round_has_had_them(store: Store) -> None:
    store.write_orders([order("a"), order("b"), order("c")], streamed=True)
    store.write_orders([order("a", label="t")])  # of a step, which is no stream
    store.expire("r.1.s.c", now=2.0)
    store.accept(report("a"), now=3.0)

    def seen(number: int) -> list[str]:
        return [entry.order.device_id for entry in store.streamed(number)]

    assert seen(1) == ["c", "a", "b"]
    store.hand_out("r.1.s.c", 1)
    assert (seen(1), seen(2)) == (["c", "a", "b"], ["a", "b"])
    store.begin_round(2, [], now=4.0)
    store.hand_out("r.1.s.c", 2)  # had it in round 1
    store.hand_out("r.1.s.a", 2)
    assert (seen(1), seen(2), seen(3)) == (["c", "b"], ["a", "b"], ["b"])
    store.end_streams(now=5.0)
    assert [entry.status for entry in store.streamed(3)] == ["expired"]
    entry = store.entry("r.1.t.a")
    assert entry is not None
    assert entry.status == "open"


# ------------------------------------------------------------------------------------------------------ two and none


def test_a_second_coordinator_is_refused_until_the_first_is_gone(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another coordinator works"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def race(folder: Path, value: float, start: object, won: object) -> None:
    """Accept one's own report; the lock is left out, to see what the transaction alone is worth."""
    module.locked = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    with contextlib.closing(Store(folder)) as store:
        start.wait()  # type: ignore[attr-defined]
        if store.accept(report(value=value), now=value):
            won.put(value)  # type: ignore[attr-defined]


def test_of_two_processes_that_race_for_an_order_one_wins(store: Store, tmp_path: Path) -> None:
    store.write_orders([order()])
    spawn = multiprocessing.get_context("spawn")
    start, won = spawn.Barrier(2), spawn.Queue()
    racers = [spawn.Process(target=race, args=(tmp_path, value, start, won)) for value in (0.25, 0.75)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    winner = won.get(timeout=10)
    entry = store.entry("r.1.s.a")
    assert entry is not None
    assert entry.report == report(value=winner)


DIES = """
import os, signal, sqlite3, sys
from pathlib import Path
from coordinator.store import Store
from tests.coordinator.test_store import order, report
folder, statement = Path(sys.argv[1]), int(sys.argv[2])
store = Store(folder)
class Dying:
    def __init__(self, db): self.db, self.left = db, statement
    def execute(self, *args):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.db.execute(*args)
    def close(self): self.db.close()
store._db = Dying(store._db)
store.write_orders([order()])
store.accept(report(), 2.0)
store.commit_round(1, b"state", 3.0, {"bytes_up": 1})
"""


def test_killed_between_any_two_statements_each_event_is_whole_or_not_there(tmp_path: Path) -> None:
    seen = []
    for statement in range(20):
        folder = tmp_path / str(statement)
        with contextlib.closing(Store(folder)) as store:
            store.begin_round(1, [Device("a", 5)], now=1.0)
        died = subprocess.run(
            [sys.executable, "-c", DIES, str(folder), str(statement)], env={**os.environ, "PYTHONPATH": "."}
        )
        with contextlib.closing(Store(folder)) as store:
            entries = store.entries(1)
            assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            committed = store.state() is not None
            assert committed == (store.counters() == {"bytes_up": 1}) == (1 in store.round_seconds())
            seen.append((len(entries), entries[0].status.value if entries else "", committed))
            # Whatever was there, doing it all again ends in the same state.
            store.write_orders([order()])
            store.accept(report(), 2.0)
            if not committed:
                store.commit_round(1, b"state", 3.0, {"bytes_up": 1})
            assert [e.status for e in store.entries(1)] == [OrderStatus.ACCEPTED]
        if died.returncode == 0:
            break
        assert died.returncode == -signal.SIGKILL
    assert list(dict.fromkeys(seen)) == [
        (0, "", False),
        (1, "open", False),
        (1, "accepted", False),
        (1, "accepted", True),
    ]


# ------------------------------------------------------------------------------------------------------ broken disks


def test_a_full_disk_is_an_error_and_nothing_is_half_written(store: Store) -> None:
    store.write_orders([order()])
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full"):
        store.commit_round(1, os.urandom(10**6), 3.0, {})
    assert store.state() is None
    assert store.round_seconds() == {}


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match="cannot be read or written"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        Store(tmp_path / "file")


# -------------------------------------------------------------------------------------------------------- migrations


def test_a_store_of_a_newer_fedge_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="update fedge"):
        Store(tmp_path)


def test_a_migration_that_fails_leaves_the_old_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "home").close()
    scripts = tmp_path / "migrations"
    scripts.mkdir()
    for script in module.MIGRATIONS.glob("*.sql"):
        (scripts / script.name).write_text(script.read_text())
    broken = scripts / "0004_more.sql"
    broken.write_text("CREATE TABLE more (x INTEGER) STRICT; CREATE TABLE orders (x INTEGER) STRICT;")
    monkeypatch.setattr(module, "MIGRATIONS", scripts)
    with pytest.raises(StoreError, match="already exists"):
        Store(tmp_path / "home")
    broken.write_text("CREATE TABLE more (x INTEGER) STRICT;")
    with contextlib.closing(Store(tmp_path / "home")) as store:
        assert store._db.execute("PRAGMA user_version").fetchone() == (4,)
        assert store._db.execute("SELECT count(*) FROM more").fetchone() == (0,)


def test_evidence_against_a_device_is_kept_once_a_round_and_name(store: Store, tmp_path: Path) -> None:
    first = Offence(device_id="a", round=1, name="long-update", detail="norm 50")
    assert store.accuse(first)
    assert not store.accuse(Offence(device_id="a", round=1, name="long-update", detail="after a restart"))
    assert store.accuse(Offence(device_id="a", round=2, name="long-update", detail="x" * 2000))
    store.close()
    with contextlib.closing(Store(tmp_path)) as again:
        kept = again.offences()
    assert (kept[0], kept[1].round, len(kept[1].detail)) == (first, 2, 1000)
