"""A child finds what its parent finds, gives what the function gives, and a failure says why."""

import logging
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.system import child
from fedge.system.stopping import StoppedError
from fedge.tensors.layout import Model

WORK = """
import logging, os, signal, time
from pathlib import Path
import numpy as np
from numpy.typing import NDArray
from fedge.errors import ConfigError
from fedge.tensors.layout import Model

def doubled(x: NDArray[np.float32], here: Path, times: int) -> tuple[Model, NDArray[np.float64]]:
    print("hello")
    os.write(1, b"from below Python")
    x *= times
    return Model(x.ravel(), np.zeros(0, np.float32), np.arange(2)), np.full((2, 3), len(here.name), np.float64)

def fails(how: str) -> int:
    if how == "named":
        raise ConfigError("first line\\nno such thing")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leaves a process":
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)
        os._exit(0)
    if how == "breaks off":
        os.closerange(3, 4096)
        time.sleep(60)
    if how == "slow":
        time.sleep(60)
    return "no number"

HERE = []

def counts() -> int:
    logging.getLogger("fedge.theirs").info("event=counting n=%d", len(HERE))
    HERE.append(1)
    return len(HERE)
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only this process knows."""
    (tmp_path / "their_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)


def test_arrays_and_models_go_there_and_back_and_the_work_may_print() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    model, lengths = child.call_once(
        "their_work:doubled", x, Path("/a/four"), 2, returns=tuple[Model, NDArray[np.float64]]
    )
    np.testing.assert_array_equal(model.params, 2 * np.arange(6, dtype=np.float32))
    assert (model.params.dtype, model.buffers.shape, model.counters.tolist()) == (np.float32, (0,), [0, 1])
    np.testing.assert_array_equal(lengths, np.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("how", "reason"),
    [("named", r"\Ano such thing\Z"), ("killed", "signal 9"), ("other", "makes no sense")],
)
def test_a_failure_says_why(how: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        child.call_once("their_work:fails", how, returns=int)


def test_a_child_that_died_is_missed_though_a_process_of_its_own_goes_on() -> None:
    with pytest.raises(child.DiedError, match="signal 9"):
        child.call_once("their_work:fails", "leaves a process", returns=int, timeout_s=8.0)


def test_a_child_that_breaks_off_and_stays_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_S", 0.2)
    with pytest.raises(child.DiedError, match="broke the connection and did not end"):
        child.call_once("their_work:fails", "breaks off", returns=int)


def test_a_child_that_takes_too_long_is_killed() -> None:
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        child.call_once("their_work:fails", "slow", returns=int, timeout_s=1.0)


def test_a_child_that_is_stopped_while_it_loads_goes_on_loading(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(1)\n" + WORK)
    with child.Child("slow_to_load:counts") as staying:
        with pytest.raises(StoppedError):
            staying.load(stop=lambda: True)
        assert psutil.pid_exists(staying.pid)
        assert [staying.call(returns=int), staying.call(returns=int)] == [1, 2]


def test_a_file_in_the_present_folder_shadows_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "fedge.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(here)
    assert 0 <= child.call_once("fedge.wire.rollout:compute_place", "a", "b", returns=float) < 1


def test_a_child_that_stays_serves_one_call_after_the_other_and_logs_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedge")
    with child.Child("their_work:counts") as staying:
        assert [staying.call(returns=int) for _ in range(2)] == [1, 2]
    assert caplog.messages == ["event=counting n=0", "event=counting n=1"]
    assert not psutil.pid_exists(staying.pid)
