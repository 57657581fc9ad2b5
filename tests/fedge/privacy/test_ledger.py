"""The ledger of what has left: kill -9, two writers, damage, and its bound."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedge.errors import StoreError
from fedge.privacy import ledger
from fedge.privacy.ledger import FILE, Ledger, read_lines

KILLED = """
import sys
from pathlib import Path
from fedge.privacy.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for n in range(10**9):
    ledger.record("reports", f"train r.{n}.train.d", ["update"], 10)
    print(n, flush=True)  # it has left
"""


def test_messages_of_a_day_that_tell_the_same_are_one_line(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    for size in (3, 4):
        book.record("context", "", ["load", "count"], size)
    book.record("reports", "train r.1.train.d", ["update"], 5)
    first, second = read_lines(tmp_path)
    assert (first.message, first.about, first.kinds, first.n, first.bytes) == ("context", "", ("count", "load"), 2, 7)
    assert first.first <= first.last
    assert (second.about, second.kinds, second.n, second.bytes) == ("train r.1.train.d", ("update",), 1, 5)
    book.close()


def test_nothing_has_left_before_something_did(tmp_path: Path) -> None:
    assert read_lines(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_two_processes_write_at_the_same_time(tmp_path: Path) -> None:
    agent, runtime = Ledger(tmp_path), Ledger(tmp_path)
    for _ in range(20):
        agent.record("context", "", ["load"], 1)
        runtime.record("health", "", ["verdict"], 1)
    assert [line.n for line in read_lines(tmp_path)] == [20, 20]
    agent.close()
    runtime.close()


@pytest.mark.parametrize("after", [1, 7, 40])
def test_kill_9_loses_nothing_that_has_left(tmp_path: Path, after: int) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [next(process.stdout) for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    n = len([line for line in said if line.endswith("\n")])
    assert n <= len(read_lines(tmp_path)) <= n + 1


def test_the_oldest_lines_become_one_of_each_kind_and_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_LINES", 20)
    monkeypatch.setattr(ledger, "FOLDED", 10)
    book = Ledger(tmp_path)
    for n in range(100):
        book.record("reports", f"train r.{n}.train.d", ["update"], 2)
        book.record("reports", f"trial r.{n}.trial.d", ["loss"], 3)
    found = read_lines(tmp_path)
    assert len(found) <= 21
    assert {(line.day, line.about, line.kinds) for line in found[:2]} == {("", "", ("update",)), ("", "", ("loss",))}
    assert (sum(line.n for line in found), sum(line.bytes for line in found)) == (200, 500)
    assert found[-1].about == "trial r.99.trial.d"
    book.close()


@pytest.mark.parametrize("damage", [b"", b"not a database, and long enough to be looked at as one" * 100])
def test_a_damaged_file_is_put_aside(tmp_path: Path, damage: bytes) -> None:
    book = Ledger(tmp_path)
    book.record("status", "", ["count"], 1)
    book.close()
    (tmp_path / FILE).write_bytes(damage)
    book = Ledger(tmp_path)
    book.record("status", "", ["count"], 1)
    assert [line.n for line in read_lines(tmp_path)] == [1]
    assert (tmp_path / f"{FILE}.damaged").exists() == bool(damage)
    book.close()


def test_what_cannot_be_noted_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(StoreError, match="nothing leaves that is not noted"):
        Ledger(tmp_path)


def test_what_is_counted_again_and_again_takes_little_disk(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    for _ in range(1000):
        book.record("context", "", ["load"], 3)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 500_000
    book.close()
    (line,) = read_lines(tmp_path)
    assert line.n == 1000
