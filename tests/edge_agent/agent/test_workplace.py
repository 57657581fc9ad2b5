"""Orders in a process of its own: what comes back is what the worker gives, whatever becomes of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from edge_agent.agent import workplace
from edge_agent.agent.identity import SampleCounts
from edge_agent.agent.settings import AgentSettings
from edge_agent.agent.workplace import SampleWatch, WorkerProcess, make_worker
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.privacy.dp_ledger import Ledger
from edge_agent.samples import SampleStore
from fedge.errors import StoreError
from fedge.settings import Secret
from fedge.steps.contract import Action, Failed, load_known_steps
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.steps.training.train_dp import TrainDp
from fedge.system.files import BlobFolder
from fedge.system.stopping import StoppedError, never
from fedge.tasks import DeviceData, read_device_data
from fedge.wire.messages import Order, Why
from tests.support.orders import Blobs, order

pytestmark = pytest.mark.process
WAIT_S = 300.0
OTHERS: set[psutil.Process] = set()
STEPS = """
import os, signal, time
from pathlib import Path
from typing import ClassVar
from fedge.errors import StoreError
from fedge.steps.contract import Action, Result, Reveals

class Drawn(Result, frozen=True, kw_only=True):
    REVEALS: ClassVar = {"n": Reveals.NOTHING, "pid": Reveals.NOTHING}
    n: float
    pid: int

class Draw(Action, frozen=True, kw_only=True):
    STEP: ClassVar = "draw"
    RESULT: ClassVar = Drawn
    DEVICE: ClassVar = "their_steps"
    TRAINS: ClassVar = False
    how: str = ""

def run(device, action):
    marks = device.home / "begun"
    with marks.open("a") as file:
        file.write("x")
    times = len(marks.read_text())
    print("a line of the user's")
    if action.how == "slow" and times == 1:
        time.sleep(60)
    if action.how == "fills":
        (device.home / "bundles" / ".unfinished-1").mkdir(parents=True)
        time.sleep(60)
    if action.how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.how == "leaves":
        os._exit(3)
    if action.how == "full":
        raise StoreError("no space left")
    if action.how == "raises":
        raise ZeroDivisionError("a network of the user's")
    return Drawn(n=float(device.make_rng(1).random()), pid=os.getpid())

class Numbers(Result, frozen=True, kw_only=True):
    REVEALS: ClassVar = {"train": Reveals.NOTHING, "validation": Reveals.NOTHING, "marked": Reveals.NOTHING}
    train: list[float]
    validation: list[float]
    marked: list[float]

class Tell(Action, frozen=True, kw_only=True):
    STEP: ClassVar = "tell"
    RESULT: ClassVar = Numbers
    DEVICE: ClassVar = "tells"
    TRAINS: ClassVar = False
"""
TELLS = """
from their_steps import Numbers

def run(device, action):
    data = device.data
    train, validation = (x[:, 0, 0, 0] for x in (data.x_train, data.x_val))
    return Numbers(train=train.tolist(), validation=validation.tolist(), marked=train[data.sensitive].tolist())
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    (tmp_path / "their_steps.py").write_text(STEPS)
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.integers(0, 17, (40, 8, 8)).astype(np.float32), y=np.arange(40) % 10)
    home = tmp_path / "home"
    home.mkdir()
    return AgentSettings(
        broker="-", federation="f", id="d", home=home, task="digits", data=tmp_path / "d.npz", steps="their_steps:Draw",
        inference_only=True, password=Secret("for the broker"), proxy=Secret("http://me:pass@proxy:1"),
    )  # fmt: skip


def working(settings: AgentSettings) -> WorkerProcess:
    return WorkerProcess(settings)


@pytest.fixture
def place(settings: AgentSettings) -> Iterator[WorkerProcess]:
    place = working(settings)
    yield place
    place.close()


def draw(settings: AgentSettings, how: str = "", number: int = 1) -> tuple[Order, Action]:
    action = load_known_steps(["their_steps:Draw"])["draw"](how=how)  # type: ignore[call-arg]
    return order(action, number, task=settings.make_spec()), action


def done(place: WorkerProcess, order: Order, action: Action, stop: Callable[[], bool] = never) -> FinishedOrder:
    return place.execute(order, Blobs(), stop=stop, action=action)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Processes that other tests have left are not ours."""
    OTHERS.update(psutil.Process().children())
    yield
    OTHERS.clear()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in OTHERS]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_training_gives_the_bytes_that_it_gives_in_this_process(settings: AgentSettings) -> None:
    settings = msgspec.structs.replace(settings, inference_only=False)
    place = working(settings)
    blobs = Blobs(settings.make_spec())
    ref = blobs.model(3)
    BlobFolder(settings.home / "models").put(blobs[ref.digest])
    action = Train(starts=(Start(model=ref),), sgd=Sgd(steps=3))
    asked = order(action, task=settings.make_spec())
    data = read_device_data(settings.make_spec(), settings.data, seed=0)
    here = Worker("d", settings.make_spec(), data, settings.home / "other").execute(asked, blobs)
    there = done(place, asked, action)
    assert isinstance(here.result, Trained)
    assert (there.result, there.blobs) == (here.result, here.blobs)
    assert "torch" in Path(f"/proc/{children()[0].pid}/maps").read_text()
    place.close()


def test_what_an_order_has_spent_is_told_in_the_agents_log(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = msgspec.structs.replace(settings, inference_only=False)
    blobs = Blobs(settings.make_spec())
    ref = blobs.model(3)
    BlobFolder(settings.home / "models").put(blobs[ref.digest])
    privacy = Privacy(clip_norm=1.0, delta=1e-5, participations=1, noise_multiplier=1.0)
    action = TrainDp(starts=(Start(model=ref),), sgd=Sgd(steps=2), privacy=privacy)
    with contextlib.closing(working(settings)) as place, caplog.at_level("INFO", "fedge.agent"):
        done(place, order(action, task=settings.make_spec()), action)
    spent = Ledger(settings.home).compute_spent(1e-5)
    assert f"event=privacy_spent round=1 epsilon={spent:.3f} in_all={spent:.3f} delta=1e-05" in caplog.text


def test_reading_the_samples_is_no_part_of_the_time_that_is_told(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer the more samples are marked."""
    (settings.data.parent / "sitecustomize.py").write_text(
        "import time\nfrom fedge.data import npz\nreal = npz.load_arrays\n"
        "npz.load_arrays = lambda *given: (time.sleep(1.5), real(*given))[1]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(settings.data.parent), prepend=os.pathsep)
    place = working(settings)
    asked, action = draw(settings)
    began = time.monotonic()
    first, took = done(place, asked, action), time.monotonic() - began
    assert 1.5 < first.untimed_s < took
    assert done(place, *draw(settings, number=2)).untimed_s < 1.5
    place.close()


def test_a_process_serves_the_next_order_and_goes_after_a_while(settings: AgentSettings) -> None:
    place = working(msgspec.structs.replace(settings, keep_worker_s=2.0))
    first, second = (done(place, *draw(settings, number=n)).result for n in (1, 2))
    assert first.pid == second.pid == children()[0].pid  # type: ignore[attr-defined]
    assert first.n != second.n, "each order has its own seed"  # type: ignore[attr-defined]
    until(lambda: not children())
    assert done(place, *draw(settings)).result.n == first.n  # type: ignore[attr-defined]
    place.close()


def test_where_memory_is_short_it_goes_at_once(
    place: WorkerProcess, settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace, "ENOUGH_BYTES", 1 << 60)
    done(place, *draw(settings))
    until(lambda: not children())


def test_memory_is_free_up_to_the_limit_of_the_group(tmp_path: Path) -> None:
    for name, text in (("current", "300"), ("stat", "anon 200\ninactive_file 80"), ("max", "1000")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert workplace.read_free_bytes(tmp_path) == 780
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(ValueError, match="max"):
        workplace.read_free_bytes(tmp_path)
    assert 0 < workplace.measure_free_bytes() <= psutil.virtual_memory().total


def test_what_is_killed_in_the_middle_is_done_again(place: WorkerProcess, settings: AgentSettings) -> None:
    def kill() -> None:
        until((settings.home / "begun").exists)
        children()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    found = done(place, *draw(settings, "slow"))
    killer.join()
    assert found.result.n == done(place, *draw(settings)).result.n  # type: ignore[attr-defined]
    children()[0].kill()
    assert done(place, *draw(settings)).result.n == found.result.n  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "why", "reason"),
    [
        ("dies", Why.MEMORY, "ended 2 times: signal 9"),
        ("leaves", Why.ERROR, "ended 2 times: exit 3"),
        ("raises", Why.ERROR, "ZeroDivisionError: a network of the user's"),
    ],
)
def test_an_order_that_brings_its_process_down_fails(
    place: WorkerProcess, settings: AgentSettings, how: str, why: Why, reason: str
) -> None:
    result = done(place, *draw(settings, how)).result
    assert isinstance(result, Failed)
    assert result.why is why
    assert reason in result.reason


def test_a_process_that_lives_reads_samples_anew_when_they_change(
    place: WorkerProcess, settings: AgentSettings
) -> None:
    before = done(place, *draw(settings)).result
    (child,) = children()
    old = settings.data.read_bytes()
    with np.load(settings.data) as file:
        np.savez(settings.data, x=file["x"][::-1], y=file["y"][::-1])
    assert done(place, *draw(settings)).result == before, "it draws, and needs no sample"
    settings.data.write_bytes(old)
    assert done(place, *draw(settings)).result == before
    assert children() == [child]


def test_a_broken_disk_ends_the_agent(place: WorkerProcess, settings: AgentSettings) -> None:
    with pytest.raises(StoreError, match="no space left"):
        done(place, *draw(settings, "full"))


def test_stopping_ends_it_at_once(place: WorkerProcess, settings: AgentSettings) -> None:
    with pytest.raises(StoppedError):
        done(place, *draw(settings, "slow"), stop=(settings.home / "begun").exists)
    assert not children()


def test_what_a_stopped_order_has_begun_to_write_is_removed(place: WorkerProcess, settings: AgentSettings) -> None:
    begun = settings.home / "bundles" / ".unfinished-1"
    with pytest.raises(StoppedError):
        done(place, *draw(settings, "fills"), stop=begun.exists)
    assert not begun.exists()
    begun.mkdir()  # by a process that was killed together with its agent
    done(place, *draw(settings))
    assert not begun.exists()


SLOW_IMPORT = """
import importlib.abc, sys
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            wait()
sys.meta_path.insert(0, Slow())
"""
SLOW_SAMPLES = """
from fedge.data import npz
real = npz.load_arrays
npz.load_arrays = lambda *given: (wait(), real(*given))[1]
"""


@pytest.mark.parametrize("slow", [SLOW_IMPORT, SLOW_SAMPLES])
def test_a_process_that_loads_for_longer_than_an_order_lasts_does_the_next(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """torch and the samples, on a device that trains: only there it takes long."""
    folder = settings.data.parent
    (folder / "sitecustomize.py").write_text(
        "import time\nfrom pathlib import Path\nhere = Path(__file__).parent\n"
        "def wait():\n    (here / 'loading').touch()\n"
        "    while not (here / 'go').exists():\n        time.sleep(0.02)\n" + slow
    )
    monkeypatch.setattr(workplace, "ENOUGH_BYTES", 1 << 60)  # nor does it end for want of memory
    settings = msgspec.structs.replace(settings, inference_only=False)
    with contextlib.closing(working(settings)) as place:
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with pytest.raises(StoppedError):
            done(place, *draw(settings), stop=(folder / "loading").exists)
        (child,) = children()
        (folder / "go").touch()
        assert done(place, *draw(settings)).result.pid == child.pid  # type: ignore[attr-defined]


def test_data_that_cannot_be_read_any_more_fail_the_order(place: WorkerProcess, settings: AgentSettings) -> None:
    settings.data.unlink()
    result = done(place, *draw(settings)).result
    assert isinstance(result, Failed)
    assert "d.npz" in result.reason


def save(settings: AgentSettings, numbers: range, sensitive: range = range(0)) -> None:
    """A source whose samples are numbers, each of its own class."""
    x = np.repeat(np.array(numbers, np.float32), 64).reshape(-1, 8, 8)
    marks = np.isin([*numbers], [*sensitive])
    np.savez(settings.data, x=x, y=np.array(numbers) % 10, sensitive=marks)


def told(place: WorkerProcess, settings: AgentSettings, number: int) -> Told:
    action = load_known_steps(["their_steps:Tell"])["tell"]()
    result = done(place, order(action, number, task=settings.make_spec()), action).result
    assert not isinstance(result, Failed), result.reason
    return Told(*(tuple(getattr(result, name)) for name in Told.__struct_fields__))


class Told(msgspec.Struct, frozen=True):
    train: tuple[float, ...]
    validation: tuple[float, ...]
    marked: tuple[float, ...]


@pytest.fixture
def telling(settings: AgentSettings) -> AgentSettings:
    return msgspec.structs.replace(settings, inference_only=False, steps="their_steps:Tell")


@pytest.mark.parametrize("kept", [True, False])
def test_a_source_that_has_changed_is_read_again_and_no_sample_moves_into_training(
    telling: AgentSettings, kept: bool
) -> None:
    """Neither with the process that lives, nor with one that begins later, nor after the agent's restart."""
    settings = telling if kept else msgspec.structs.replace(telling, keep_worker_s=0.0)
    save(settings, range(40))
    held: set[float] = set()
    seen: set[float] = set()
    with contextlib.closing(working(settings)) as place:
        for number, numbers in enumerate((range(40), range(80), range(79, -1, -1), range(20, 300)), 1):
            save(settings, numbers)
            found = told(place, settings, number)
            assert not held & {*found.train}
            assert not (seen - held) & {*found.validation}, "what has trained examines nothing"
            held |= {*found.validation}
            seen |= {*found.train, *found.validation}
    with contextlib.closing(working(settings)) as place:
        again = told(place, settings, 9)
        assert (again.train, again.validation) == (found.train, found.validation)


def test_the_first_sight_of_a_source_gives_the_split_that_its_seed_draws(telling: AgentSettings) -> None:
    data = read_device_data(telling.make_spec(), telling.data, seed=0)
    with contextlib.closing(working(telling)) as place:
        found = told(place, telling, 1)
    assert found.train == tuple(data.x_train[:, 0, 0, 0].tolist())
    assert found.validation == tuple(data.x_val[:, 0, 0, 0].tolist())


def test_samples_that_come_between_two_orders_take_part_in_the_next(telling: AgentSettings) -> None:
    save(telling, range(40))
    with contextlib.closing(working(telling)) as place:
        before = told(place, telling, 1)
        with SampleStore(telling.home, telling.make_spec()) as store:
            numbers = [store.add(np.full((8, 8), k, np.float32), k % 10, origin="http") for k in (7, 100, 101, 102)]
            store.add(np.full((8, 8), 200, np.float32), 3, origin="http", sensitive=True)
            after = told(place, telling, 2)
            assert after.train[: len(before.train)] == before.train
            assert len(after.train) == len({*after.train}), "a known sample counts once"
            assert len(after.train) + len(after.validation) > 40
            assert {*after.validation} >= {*before.validation}
            store.delete([number for number in numbers if number is not None])
            last = told(place, telling, 3)
        assert {*last.train} <= {*before.train, *last.marked}
        assert {*last.validation} <= {*before.validation} | {*after.validation}


def test_a_source_that_is_just_being_written_is_read_when_it_is_whole(telling: AgentSettings) -> None:
    save(telling, range(40))
    whole = telling.data.read_bytes()
    with contextlib.closing(working(telling)) as place:
        before = told(place, telling, 1)

        def write() -> None:
            for n in (100, 500, 3000, len(whole)):
                telling.data.write_bytes(whole[:n])
                time.sleep(0.3)

        telling.data.write_bytes(whole[:50])
        writer = threading.Thread(target=write)
        writer.start()
        assert told(place, telling, 2) == before
        writer.join()


def test_the_agent_counts_what_is_not_sensitive_and_reads_nothing_itself(telling: AgentSettings) -> None:
    save(telling, range(40))
    with contextlib.closing(SampleWatch(telling)) as watch:
        assert watch.counts == SampleCounts(n_shared=32, data_version=1, n_arrived=40)
        save(telling, range(50), sensitive=range(40, 50))
        watch.refresh()
        assert watch.counts == SampleCounts(n_shared=32, data_version=1, n_arrived=40)
        save(telling, range(60), sensitive=range(40, 50))
        watch.refresh()
        assert (watch.counts.data_version, watch.counts.n_arrived) == (2, 50)
        with SampleStore(telling.home, telling.make_spec()) as store:
            store.add(np.full((8, 8), 500, np.float32), 3, origin="http", sensitive=True)
            watch.refresh()
            assert watch.counts.data_version == 2
            for k in range(600, 620):
                store.add(np.full((8, 8), k, np.float32), 3, origin="http")
        before = watch.counts.n_shared
        watch.refresh()
        assert (watch.counts.data_version, watch.counts.n_arrived) == (22, 70)
        assert before < watch.counts.n_shared < before + 20
        with contextlib.closing(working(telling)) as place:
            found = told(place, telling, 1)
        assert len(found.train) - len(found.marked) == watch.counts.n_shared, "as many as train"


def test_a_source_that_cannot_be_read_is_said_once(telling: AgentSettings, caplog: pytest.LogCaptureFixture) -> None:
    save(telling, range(40))
    with contextlib.closing(SampleWatch(telling)) as watch:
        telling.data.write_bytes(b"torn")
        for _ in range(2):
            watch.refresh()
        assert caplog.text.count("event=samples_unreadable") == 1
        assert watch.counts.n_shared == 32
        save(telling, range(60))
        watch.refresh()
        assert watch.counts.n_arrived == 60


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ndef sleep() -> int:\n    time.sleep(60)\n    return 1\n")
    program = (
        "import threading\nfrom fedge.system.child import Child\nchild = Child('sleeper:sleep')\n"
        "print(child.pid, flush=True)\nchild.call(returns=int)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    gone, _ = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone


def test_the_worker_makes_students_if_the_owner_says_so(settings: AgentSettings) -> None:
    data = DeviceData.from_inputs(np.zeros((1, 1, 8, 8), np.float32))
    assert make_worker(msgspec.structs.replace(settings, student=True), data).student
    assert not make_worker(settings, data).student
