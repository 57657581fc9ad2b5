"""The store: what is committed is there after any death, and nothing is taken twice."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.store import database
from coordinator.store.records import Device, Offence, OrderStatus
from coordinator.store.store import Store
from fedge.errors import ConfigError, StoreError
from fedge.wire.messages import Context, Order, Outcome, Report


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


Open = functools.partial[Store]


@pytest.fixture
def opened(tmp_path: Path, store_url: str | None) -> Open:
    """Opens the store of this test, again and again, on either database."""
    return functools.partial(Store, tmp_path, store_url, federation="f")


@pytest.fixture
def store(opened: Open) -> Iterator[Store]:
    with contextlib.closing(opened()) as store:
        store.start_round(1, [Device("a", 5, Context(device_id="a", load=0.5)), Device("b", 6)], now=1.0)
        yield store


def test_it_waits_for_the_disk(store: Store, store_url: str | None) -> None:
    writing = store._writer.db
    if store_url is None:
        assert writing.execute("PRAGMA journal_mode") == [("wal",)]
        assert writing.execute("PRAGMA synchronous") == [(2,)]
    else:
        assert writing.execute("SHOW synchronous_commit") == [("on",)]


def test_the_snapshot_of_a_round_stays(store: Store) -> None:
    assert store.get_round_devices(1) == (Device("a", 5, Context(device_id="a", load=0.5)), Device("b", 6, None))
    assert store.get_round_devices(2) is None
    assert store.get_last_contexts() == {"a": Context(device_id="a", load=0.5), "b": None}
    with pytest.raises(StoreError):
        store.start_round(1, [], now=2.0)
    assert len(store.get_round_devices(1) or ()) == 2


def test_orders_that_are_there_stay_as_they_were(store: Store) -> None:
    store.write_orders([order("a")])
    entries = store.write_orders([order("a", left_s=99.0), order("b", left_s=99.0)])
    assert [e.order.left_s for e in entries.values()] == [60.0, 99.0]
    assert list(entries) == ["a", "b"]
    assert store.get_entries(1) == tuple(entries.values())


def test_a_report_is_accepted_once(store: Store) -> None:
    store.write_orders([order()])
    assert store.accept(report(value=0.1), now=2.0).result()
    assert not store.accept(report(value=0.9), now=3.0).result()
    assert not store.reject("r.1.s.a", "late", now=3.0).result()
    assert not store.expire("r.1.s.a", now=3.0).result()
    entry = store.find_entry("r.1.s.a")
    assert entry is not None
    assert (entry.status, entry.report) == (OrderStatus.ACCEPTED, report(value=0.1))


@pytest.mark.parametrize("closing", ["reject", "expire"])
def test_an_order_that_is_closed_takes_no_report(store: Store, closing: str) -> None:
    store.write_orders([order()])
    assert (
        store.reject("r.1.s.a", "bad", now=2.0).result()
        if closing == "reject"
        else store.expire("r.1.s.a", now=2.0).result()
    )
    assert not store.accept(report(), now=3.0).result()
    (entry,) = store.get_entries(1)
    assert entry.status == {"reject": OrderStatus.REJECTED, "expire": OrderStatus.EXPIRED}[closing]
    assert entry.report is None


def test_a_report_without_an_order_is_not_taken(store: Store) -> None:
    assert not store.accept(report("x"), now=2.0).result()
    assert store.find_entry("r.1.s.x") is None


def test_a_round_is_committed_with_its_counts_or_not_at_all(store: Store) -> None:
    store.commit_round(1, b"one", 3.5, {"bytes_up": 10})
    with pytest.raises(StoreError):  # the round was committed already
        store.commit_round(1, b"two", 9.0, {"bytes_up": 10})
    assert store.get_state() == b"one"
    assert store.get_counters() == {"bytes_up": 10}
    assert store.get_round_seconds() == {1: 2.5}
    store.start_round(2, [], now=4.0)
    store.commit_round(2, b"two", 5.0, {"bytes_up": 1, "refused.malformed": 3})
    assert store.get_state() == b"two"
    assert store.get_counters() == {"bytes_up": 11, "refused.malformed": 3}


def test_an_order_that_is_still_open_when_its_round_ends_expires(store: Store) -> None:
    store.write_orders([order("a")])
    store.commit_round(1, b"one", 3.5, {})
    (entry,) = store.get_entries(1)
    assert (entry.status, entry.reason) == (OrderStatus.EXPIRED, "the round ended without a wait for the report")
    assert not store.accept(report("a"), now=4.0).result()


def test_of_old_rounds_only_their_times_stay(store: Store) -> None:
    """But open streams, and the number of the last arrival."""
    store.write_orders([order("a")])
    store.write_orders([order("a", label="t"), order("b", label="t"), order("c", label="t")], streamed=True)
    store.accept(msgspec.structs.replace(report("a"), order_id="r.1.t.a"), now=2.0).result()
    store.hand_out("r.1.t.a", 1).result()
    store.accept(report("a"), now=2.0).result()
    store.commit_round(1, b"1", 2.0, {}, keep=2)
    for number in (2, 3):
        store.start_round(number, [Device("a", 5)], now=2.0)
        store.commit_round(number, b"", 4.0, {}, keep=2)
        store.write_orders([order("a", round_=number)])  # afterwards: open ones expire, and are the last arrivals
    assert [e.order.id for e in store.get_entries(1)] == ["r.1.s.a", "r.1.t.b", "r.1.t.c"]
    assert [len(store.get_entries(number)) for number in (2, 3)] == [1, 1]
    assert (store.get_round_devices(1), store.get_round_devices(2)) == ((), (Device("a", 5),))
    assert store.get_round_seconds() == {1: 1.0, 2: 2.0, 3: 2.0}
    store.expire("r.1.t.b", now=5.0).result()
    assert [(e.order.device_id, e.arrival) for e in store.get_closed_since(2)] == [("b", 3)]
    store.commit_round(4, b"", 6.0, {}, keep=2)
    assert [e.order.id for e in store.get_entries(1)] == ["r.1.t.b", "r.1.t.c"]


def test_what_is_remembered_first_stays(store: Store) -> None:
    assert store.find_value("run") is None
    assert store.put_value_once("run", "x") == "x"
    assert store.put_value_once("run", "y") == "x"
    assert store.find_value("run") == "x"


def test_only_named_tensors_are_kept(store: Store) -> None:
    kept, gone = store.blobs.put(b"kept"), store.blobs.put(b"gone")
    partial = store.blobs.get_path(gone).with_name(f"{'1' * 64}.part")
    partial.write_bytes(b"of a device that was too late")
    coming = partial.with_name(f"{'2' * 64}.part")
    coming.write_bytes(b"of an answer to a streamed order")
    store.remove_others({kept, "2" * 64}, spare_s=60.0)
    assert gone in store.blobs  # an intake may have just got it
    store.remove_others({kept, "2" * 64})
    assert coming.exists()
    assert kept in store.blobs
    assert gone not in store.blobs
    assert not partial.exists()


# ----------------------------------------------------------------------------------------------------------- streams


def test_streamed_orders_come_as_they_were_closed_until_a_round_has_had_them(store: Store) -> None:
    store.write_orders([order("a"), order("b"), order("c")], streamed=True)
    store.write_orders([order("a", label="t")])  # of a step, which is no stream
    store.expire("r.1.s.c", now=2.0).result()
    store.accept(report("a"), now=3.0).result()

    def seen(number: int) -> list[str]:
        return [entry.order.device_id for entry in store.get_streamed(number)]

    assert seen(1) == ["c", "a", "b"]
    store.hand_out("r.1.s.c", 1).result()
    assert (seen(1), seen(2)) == (["c", "a", "b"], ["a", "b"])
    store.start_round(2, [], now=4.0)
    store.hand_out("r.1.s.c", 2).result()  # had it in round 1
    store.hand_out("r.1.s.a", 2).result()
    assert (seen(1), seen(2), seen(3)) == (["c", "b"], ["a", "b"], ["b"])
    store.expire_streams(now=5.0)
    assert [entry.status for entry in store.get_streamed(3)] == ["expired"]
    entry = store.find_entry("r.1.t.a")
    assert entry is not None
    assert entry.status == "open"


# ------------------------------------------------------------------------------------------------------ two and none


def test_a_second_coordinator_is_refused_until_the_first_is_gone(
    store: Store, opened: Open, store_url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.1)
    homes = [tmp_path] if store_url is None else [tmp_path, tmp_path / "on another machine"]
    for home in homes:
        with pytest.raises(ConfigError, match="another coordinator works"):
            Store(home, *opened.args[1:], **opened.keywords)
    store.close()
    opened().close()


def race(opened: Open, value: float, start: object, won: object) -> None:
    """Accept one's own report, as an intake."""
    with contextlib.closing(opened(intake=True)) as store:
        start.wait()  # type: ignore[attr-defined]
        if store.accept(report(value=value), now=value).result():
            won.put(value)  # type: ignore[attr-defined]


def test_of_two_processes_that_race_for_an_order_one_wins(store: Store, opened: Open) -> None:
    store.write_orders([order()])
    spawn = multiprocessing.get_context("spawn")
    start, won = spawn.Barrier(2), spawn.Queue()
    racers = [spawn.Process(target=race, args=(opened, value, start, won)) for value in (0.25, 0.75)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    winner = won.get(timeout=300)
    entry = store.find_entry("r.1.s.a")
    assert entry is not None
    assert entry.report == report(value=winner)


DIES = """
import json, os, signal, sys
from pathlib import Path
from coordinator.store.store import Store
from tests.coordinator.store.test_store import order, report
home, url, federation, statement = json.loads(sys.argv[1])
store = Store(Path(home), url, federation=federation)
class Dying:
    def __init__(self, db): self.db, self.left = db, statement
    def __getattr__(self, name):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return getattr(self.db, name)
store._writer.db = Dying(store._writer.db)
store.write_orders([order()])
store.accept(report(), 2.0).result()
store.commit_round(1, b"state", 3.0, {"bytes_up": 1})
"""


def test_killed_between_any_two_statements_each_event_is_whole_or_not_there(
    tmp_path: Path, store_url: str | None
) -> None:
    seen = []
    for statement in range(20):
        home, federation = tmp_path / str(statement), f"f{statement}"
        with contextlib.closing(Store(home, store_url, federation=federation)) as store:
            store.start_round(1, [Device("a", 5)], now=1.0)
        given = json.dumps([str(home), store_url, federation, statement])
        died = subprocess.run([sys.executable, "-c", DIES, given], env={**os.environ, "PYTHONPATH": "."})
        with contextlib.closing(Store(home, store_url, federation=federation)) as store:
            entries = store.get_entries(1)
            if store_url is None:
                assert store._db.execute("PRAGMA integrity_check") == [("ok",)]
            committed = store.get_state() is not None
            assert committed == (store.get_counters() == {"bytes_up": 1}) == (1 in store.get_round_seconds())
            seen.append((len(entries), entries[0].status.value if entries else "", committed))
            # Whatever was there, doing it all again ends in the same state.
            store.write_orders([order()])
            store.accept(report(), 2.0).result()
            if not committed:
                store.commit_round(1, b"state", 3.0, {"bytes_up": 1})
            assert [e.status for e in store.get_entries(1)] == [OrderStatus.ACCEPTED]
        if died.returncode == 0:
            break
        assert died.returncode == -signal.SIGKILL
    assert list(dict.fromkeys(seen)) == [
        (0, "", False),
        (1, "open", False),
        (1, "accepted", False),
        (1, "accepted", True),
    ]


# ----------------------------------------------------------------------------------------------------------- intakes


def test_an_intake_works_beside_the_dispatcher_which_learns_what_it_closed(store: Store, opened: Open) -> None:
    store.put_value_once("start", "layout and model")
    store.write_orders([order("a"), order("b"), order("c")])
    assert store.accept(report("c"), now=2.0).result()
    seen = store.get_last_arrival()
    with contextlib.closing(opened(intake=True)) as one, contextlib.closing(opened(intake=True)) as other:
        assert one.find_value("start") == "layout and model"
        assert one.get_broker_secret() == other.get_broker_secret() == store.get_broker_secret() != ""
        entry = one.find_entry("r.1.s.a")
        assert entry is not None
        assert (entry.order, entry.status) == (order("a"), OrderStatus.OPEN)
        assert other.reject("r.1.s.b", "bad\0 text", now=3.0).result()
        assert one.accept(report("a"), now=4.0).result()
        assert not other.accept(report("a", value=0.9), now=5.0).result()
        assert not store.expire("r.1.s.a", now=6.0).result()
    closed = store.get_closed_since(seen)
    assert [(e.order.device_id, e.status, e.arrival) for e in closed] == [("b", "rejected", 2), ("a", "accepted", 3)]
    assert closed[1].report == report("a")
    assert store.get_closed_since(store.get_last_arrival()) == ()


def test_an_intake_before_the_first_dispatcher_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="start its coordinator first"):
        opened(intake=True)


# ---------------------------------------------------------------------------------------------------------- together


def test_changes_that_wait_together_are_one_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"d{i}" for i in range(100)]
    store.write_orders(map(order, names))
    held, begun = threading.Event(), []
    begin = store._writer.db.begin_writing
    monkeypatch.setattr(store._writer.db, "begin_writing", lambda: begun.append(held.wait(60)) or begin())
    futures = [store.accept(report(name), now=2.0) for name in names]
    assert store.get_last_arrival() == 0
    assert not any(future.done() for future in futures)  # nothing before its commit
    held.set()
    assert all(future.result() for future in futures)
    assert len(begun) <= 2
    assert [entry.order.device_id for entry in store.get_closed_since(0)] == names  # in the order of the calls


def test_what_waits_when_it_is_closed_is_still_carried_out(store: Store, opened: Open) -> None:
    store.write_orders([order()])
    future = store.accept(report(), now=2.0)
    store.close()
    assert future.done()
    with contextlib.closing(opened()) as again:
        assert again.get_last_arrival() == 1


# ------------------------------------------------------------------------------------------------------ broken disks


def alone(home: Path, copy: Path) -> Store:
    """What a copy of the tables' file alone is opened as."""
    copy.mkdir(parents=True)
    shutil.copy(home / "store.db", copy)
    return Store(copy)


KILLED = """
import os, signal, sys
from pathlib import Path
from coordinator.store.store import Store
store = Store(Path(sys.argv[1]))
store.put_value("at", "the end")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_copy_without_the_log_is_refused_until_the_last_process_has_ended_cleanly(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with contextlib.closing(Store(home)) as store:
        with pytest.raises(ConfigError, match=r"lacks what was in store\.db-wal: take a copy made by `fedge backup`"):
            alone(home, tmp_path / "begun")
        store.put_value("at", "noon")
        intake = Store(home, intake=True)
    intake.put_value("at", "night")  # the dispatcher has ended
    with pytest.raises(ConfigError, match="was in use"):
        alone(home, tmp_path / "helped")
    intake.close()
    with contextlib.closing(alone(home, tmp_path / "ended")) as copy:
        assert copy.find_value("at") == "night"


def test_after_kill_9_the_log_is_there_and_whoever_looks_leaves_a_whole_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    died = subprocess.run([sys.executable, "-c", KILLED, str(home)], env={**os.environ, "PYTHONPATH": "."})
    assert died.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="was in use"):
        alone(home, tmp_path / "killed")
    with contextlib.closing(Store(home, intake=True)) as looking:
        assert looking.find_value("at") == "the end"
    with contextlib.closing(alone(home, tmp_path / "looked")) as copy:
        assert copy.find_value("at") == "the end"


def test_a_log_that_cannot_be_brought_in_stays(tmp_path: Path) -> None:
    """Or the next start would take its own file for a copy."""
    store = Store(tmp_path)
    store._writer.db.execute("PRAGMA query_only = ON")  # as on a disk that can be read alone
    store.close()
    assert (tmp_path / "store.db-wal").exists()
    Store(tmp_path).close()
    with contextlib.closing(alone(tmp_path, tmp_path / "copy")):
        pass


def test_tensors_that_are_not_there_are_named(store: Store) -> None:
    there = store.blobs.put(b"there")
    store.require_tensors([there])
    with pytest.raises(StoreError, match=f"lacks 2 of the tensors .*{'a' * 64}, {'b' * 64}.*`fedge restore`"):
        store.require_tensors([there, "b" * 64, "a" * 64])


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_full_disk_is_an_error_and_nothing_is_half_written(store: Store) -> None:
    store.write_orders([order()])
    ((pages,),) = store._writer.db.execute("PRAGMA page_count")
    store._writer.db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full"):
        store.commit_round(1, os.urandom(10**6), 3.0, {})
    assert store.get_state() is None
    assert store.get_round_seconds() == {}


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match="cannot be read or written"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        Store(tmp_path / "file")


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_server_that_lets_go_of_us_is_an_error(store: Store, opened: Open) -> None:
    store.write_orders([order()])
    ours = "pid != pg_backend_pid() AND application_name = $1"
    terminate = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}"
    store._db.execute(terminate, f"fedge {opened.keywords['federation']}")
    with pytest.raises(StoreError, match="cannot be read or written"):
        store.accept(report(), now=2.0).result()


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read or written"):
        Store(tmp_path, "postgresql://fedge@127.0.0.1:1/fedge", federation="f")


def test_an_address_must_be_one_of_postgresql_and_a_home_that_was_begun_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must begin with postgresql://"):
        Store(tmp_path, "mysql://fedge@db/fedge", federation="f")
    Store(tmp_path).close()
    with pytest.raises(ConfigError, match="leave --store out"):
        Store(tmp_path, "postgresql://fedge@db/fedge", federation="f")


# -------------------------------------------------------------------------------------------------------- migrations


def test_a_store_of_a_newer_fedge_is_refused(opened: Open) -> None:
    with contextlib.closing(opened()) as store:
        store._writer.db.migrate(99, "")
    with pytest.raises(StoreError, match="update fedge"):
        opened()


def test_a_migration_that_fails_leaves_the_old_schema(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().close()
    scripts = tmp_path / "migrations"
    scripts.mkdir()
    for script in database.MIGRATIONS.glob("*.sql"):
        (scripts / script.name).write_text(script.read_text())
    broken = scripts / "9000_more.sql"
    broken.write_text("CREATE TABLE more (x INTEGER) STRICT; CREATE TABLE orders (x INTEGER) STRICT;")
    monkeypatch.setattr(database, "MIGRATIONS", scripts)
    with pytest.raises(StoreError, match="already exists"):
        opened()
    broken.write_text("CREATE TABLE more (x INTEGER) STRICT;")
    with contextlib.closing(opened()) as store:
        assert store._db.get_version() == 9000
        assert store._db.execute("SELECT count(*) FROM more") == [(0,)]


def test_a_home_whose_tables_are_on_a_server_is_not_begun_anew_without_it(opened: Open, tmp_path: Path) -> None:
    opened().close()
    if opened.args[1] is None:
        with contextlib.closing(Store(tmp_path, federation="f")) as again:
            assert again.get_state() is None
    else:
        with pytest.raises(ConfigError, match="keeps its tables on a server: name it with --store"):
            Store(tmp_path, federation="f")


def test_evidence_against_a_device_is_kept_once_a_round_and_name(store: Store, opened: Open) -> None:
    first = Offence(device_id="a", round=1, name="long-update", detail="norm 50")
    assert store.record_offence(first).result()
    assert not store.record_offence(
        Offence(device_id="a", round=1, name="long-update", detail="after a restart")
    ).result()
    assert store.record_offence(Offence(device_id="a", round=2, name="long-update", detail="x" * 2000)).result()
    store.close()
    with contextlib.closing(opened()) as again:
        kept = again.get_offences()
    assert (kept[0], kept[1].round, len(kept[1].detail)) == (first, 2, 1000)
