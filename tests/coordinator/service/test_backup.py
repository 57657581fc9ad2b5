"""`fedge backup` and `restore`; with federations that go on elsewhere: tests/faults/test_backup.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.service import backup as backup_cli
from coordinator.service.backup import TABLES, _copy_files, back_up, restore_to
from coordinator.store.blobs import prevent_deletion
from coordinator.store.records import Device, Event
from coordinator.store.store import ISSUE, Store
from fedge.commands.cli import main
from fedge.errors import ConfigError, StoreError
from fedge.system.files import InUseError
from tests.coordinator.store.test_store import order, report


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a coordinator in round 1: a has answered, b has not."""
    home = tmp_path / "home"
    with contextlib.closing(Store(home)) as store:
        store.blobs.put(b"a tensor")
        store.start_round(1, [Device("a", 5), Device("b", 6)], now=1.0)
        store.write_orders([order("a"), order("b")])
        store.accept(report("a"), now=2.0).result()
        store.record_events(Event(at=1.0, round=1, name="asked")).result()
        store.add_counts({"bytes_up": 3})
    (home / "summary.json").write_text(json.dumps({"federation": "f", "round": 0, "at": 1.0}))
    (home / "task.json").write_text("{}")
    return home


def test_all_tables_and_tensors_are_copied_and_only_open_orders_get_another_id(
    home: Path, tmp_path: Path, store_url: str | None
) -> None:
    with contextlib.closing(Store(home)) as store:
        made = store._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert {name for (name,) in made} == set(TABLES)
        secret = store.get_broker_secret()
        before = {table: store._db.execute(f"SELECT * FROM {table}") for table in TABLES}
        assert back_up(home, None, tmp_path / "backup") == 1  # while it is open
    new = tmp_path / "new"
    assert restore_to(tmp_path / "backup", new, store_url) == 1
    assert (new / "task.json").exists()
    with contextlib.closing(Store(new, store_url, federation="f")) as store:
        issue = store.find_value(ISSUE)
        assert issue
        assert [entry.order.id for entry in store.get_entries(1)] == ["r.1.s.a", f"r{issue}.1.s.b"]
        assert store._db.execute("SELECT id FROM orders WHERE status = 'open'") == [(f"r{issue}.1.s.b",)]
        assert store.write_orders([order("a"), order("b")])["a"].report == report("a")
        after = {table: store._db.execute(f"SELECT * FROM {table}") for table in TABLES}
        assert [t for t in TABLES if sorted(after[t]) != sorted(before[t])] == ["orders", "meta"]
        assert [store.blobs.get(digest) for digest in store.blobs] == [b"a tensor"]
        assert store.get_broker_secret() != secret  # if the old one still runs, it shares no reports with this one
    if store_url is not None:
        with pytest.raises(ConfigError, match="f is on this server already: drop the schema"):
            restore_to(tmp_path / "backup", tmp_path / "again", store_url)
        assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("to_bucket", [False, True])
def test_tensors_in_a_bucket_are_copied_and_go_home_or_into_another(
    bucket: str, tmp_path: Path, to_bucket: bool
) -> None:
    home, folder, new = tmp_path / "home", tmp_path / "backup", tmp_path / "new"
    with contextlib.closing(Store(home, blobs=bucket)) as store:
        store.put_value_once("blobs", bucket)
        digest = store.blobs.put(b"a model")
        with contextlib.closing(Store(home, blobs=bucket, intake=True)) as intake:
            intake.blobs.put(b"an update that the dispatcher has not seen")
        (home / "summary.json").write_text(json.dumps({"federation": "f", "round": 0, "at": 1.0}))
        assert back_up(home, None, folder) == 2
    elsewhere = f"{bucket}/elsewhere" if to_bucket else None
    assert restore_to(folder, new, None, elsewhere) == 2
    with contextlib.closing(Store(new, blobs=elsewhere)) as store:
        store.require_blobs(elsewhere)
        assert store.blobs.get(digest) == b"a model"
    if elsewhere:
        with contextlib.closing(Store(new, blobs=elsewhere, intake=True)) as intake:
            assert intake.blobs.get(digest) == b"a model"


def test_nothing_is_deleted_while_a_backup_is_made(home: Path) -> None:
    with contextlib.closing(Store(home)) as store:
        with prevent_deletion(home):
            store.remove_others(())
            assert len(list(store.blobs)) == 1
        store.remove_others(())
        assert not list(store.blobs)


def test_what_is_there_stays_and_what_is_damaged_is_named(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    with pytest.raises(ConfigError, match="is no coordinator's --home"):
        back_up(tmp_path / "nothing", None, folder)
    with pytest.raises(ConfigError, match="home is there already"):
        back_up(home, None, home)
    (blob,) = (home / "blobs").iterdir()
    whole = blob.read_bytes()
    blob.write_bytes(b"another")
    with pytest.raises(StoreError, match=f"{blob.name} is damaged"):
        back_up(home, None, folder)
    assert not folder.exists()
    blob.write_bytes(whole)
    back_up(home, None, folder)
    with pytest.raises(ConfigError, match="home is there already"):
        restore_to(folder, home, None)
    (folder / "store.db").unlink()
    with pytest.raises(StoreError, match="cannot make"):
        restore_to(folder, tmp_path / "new", None)


def test_what_has_come_to_the_target_meanwhile_stays(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, new = tmp_path / "backup", tmp_path / "new"
    new.mkdir()  # empty: may be taken
    back_up(home, None, folder)

    def copied(source: Path, target: Path) -> int:
        Store(new).close()  # a coordinator begins there
        return _copy_files(source, target)

    monkeypatch.setattr(backup_cli, "_copy_files", copied)
    with pytest.raises(ConfigError, match="new is there already: name a new folder"):
        restore_to(folder, new, None)
    assert not (new / "task.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "home", "new"]
    monkeypatch.undo()
    shutil.rmtree(new)
    new.mkdir()
    assert restore_to(folder, new, None) == 1


def test_a_home_without_tables_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"federation": "f", "round": 0, "at": 1.0}))
    with pytest.raises(ConfigError, match=r"has no store\.db"):
        back_up(tmp_path, None, tmp_path / "backup")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_commands_tell_what_was_copied(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, new = tmp_path / "backup", tmp_path / "new"
    assert main(["backup", str(folder), "--home", str(home)]) == 0
    assert "f, 1 tensors, after round 0" in capsys.readouterr().out
    assert main(["restore", str(folder), "--home", str(new), "--json"]) == 0
    told = {"event": "restored", "from": str(folder), "to": str(new), "tensors": 1, "round": 0}
    assert json.loads(capsys.readouterr().out) == told
    assert main(["restore", str(folder), "--home", str(new)]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_backs_up_and_restores_stays_the_service_s(home: Path, tmp_path: Path) -> None:
    for path in (tmp_path, home, *home.rglob("*")):
        os.chown(path, 12345, 12346)
    (home / "store.users").unlink()
    back_up(home, None, tmp_path / "backup")
    restore_to(tmp_path / "backup", tmp_path / "new", None)
    owners = {path: path.stat().st_uid for path in (tmp_path, *tmp_path.rglob("*"))}
    assert {path for path, owner in owners.items() if owner != 12345} == set()


def test_the_name_in_a_backup_becomes_no_other_sql(home: Path, tmp_path: Path) -> None:
    back_up(home, None, tmp_path / "backup")
    evil = {"federation": 'f"; DROP SCHEMA public; --', "round": 0, "at": 1.0}
    (tmp_path / "backup" / "summary.json").write_text(json.dumps(evil))
    with pytest.raises(ConfigError, match="is no name of a federation"):
        restore_to(tmp_path / "backup", tmp_path / "new", "postgresql://fedge@127.0.0.1:1/fedge")


HOLD = """
import sys, time
from pathlib import Path
from coordinator.store.store import prevent_deletion
with prevent_deletion(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_two_backups_take_turns_and_a_killed_one_leaves_no_lock(home: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(home)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with ThreadPoolExecutor() as threads:
            backups = [threads.submit(back_up, home, None, tmp_path / name) for name in ("a", "b")]
            with pytest.raises(InUseError), prevent_deletion(home, "taken"):
                pass
            assert not any(backup.done() for backup in backups)
            other.kill()
            assert [backup.result(timeout=300) for backup in backups] == [1, 1]
