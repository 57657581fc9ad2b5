import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.demo.processes import Child, Children, ProcessError, read_tail
from fedge.errors import FruitlessError


def test_output_and_log_go_to_their_files(tmp_path: Path) -> None:
    with Children(tmp_path / "logs") as children:
        child = children.start("help", ["--help"])
        child.process.wait(60)
        child.require(0)
    assert b"fedge demo" in (tmp_path / "logs" / "help.out").read_bytes()
    assert (tmp_path / "logs" / "help.log").read_bytes() == b""


def test_a_file_in_the_present_folder_shadows_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedge.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    with Children(tmp_path / "logs") as children:
        child = children.start("help", ["--help"])
        child.process.wait(60)
        child.require(0)


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("wrong", ["no-such-command"])
        child.process.wait(60)
        with pytest.raises(ProcessError, match=r"wrong ended with exit code 2(.|\n)*no such command no-such-command"):
            child.require(0)


def test_an_end_with_nothing_to_show_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "c.log").write_text("INFO event=connected\nerror: nothing was learned in 2 rounds: cam1: it is tired\n")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(6)"])
    ended.wait(60)
    child = Child("coordinator", ended, tmp_path / "c.out", tmp_path / "c.log")
    with pytest.raises(FruitlessError) as caught:
        child.require(0)
    assert str(caught.value) == f"nothing was learned in 2 rounds: cam1: it is tired; the logs are in {tmp_path}"


def test_a_child_that_ended_by_itself_is_not_running_as_it_should(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("help", ["--help"])
        child.process.wait(60)
        with pytest.raises(ProcessError):
            child.require()


def test_nothing_is_left_when_the_context_ends(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("broker", ["broker", "--port", "0"])
        child.require()
    assert not child.running
    assert not psutil.pid_exists(child.process.pid)


def test_the_tail_of_a_log_is_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(map(str, range(100))))
    assert read_tail(log).split() == [str(n) for n in range(85, 100)]
    log.write_text("")
    assert read_tail(log) == "    (nothing)"
