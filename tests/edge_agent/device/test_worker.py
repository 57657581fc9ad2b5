"""One order, whatever it asks: what the device knows, what it declines, what fails, and what ends the agent."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from edge_agent.device.device import Device, FailedError
from edge_agent.device.worker import FinishedOrder, Worker
from fedge.errors import ConfigError, ProtocolError, StoreError
from fedge.steps.contract import Action, Declined, Failed, Result, Reveals, Unsupported, load_installed_steps
from fedge.steps.descriptions.mean_features import FeaturesMeasured, MeanFeatures
from fedge.steps.descriptions.route import Route
from fedge.system.stopping import StoppedError
from fedge.tasks import DeviceData
from fedge.wire.messages import BlobRef, Why
from tests.support.orders import TASK, Blobs, device_data, order, worker


class Counted(Result, frozen=True, kw_only=True):
    REVEALS: ClassVar = {"n": Reveals.COUNT, "drawn": Reveals.NOTHING}
    n: int
    drawn: float = 0.0


class CountSamples(Action, frozen=True, kw_only=True):
    """A step of somebody else's."""

    STEP: ClassVar = "count_samples"
    RESULT: ClassVar = Counted
    DEVICE: ClassVar = "steps_of_a_user"

    times: int = 1


class CountUnlabelled(CountSamples, frozen=True, kw_only=True):
    STEP: ClassVar = "count_unlabelled"
    TRAINS: ClassVar = False


@pytest.fixture
def half(own_module: Callable[..., ModuleType]) -> ModuleType:
    """The device half of the step; what it does is said by the test."""
    return own_module("steps_of_a_user", run=lambda device, action: Counted(n=action.times * device.data.n_train))


def done(home: Path, action: Action, own: Worker | None = None, **fields: object) -> FinishedOrder:
    return (own or worker(home)).execute(msgspec.structs.replace(order(action), **fields), Blobs(), action=None)


def knowing(home: Path, *, trains: bool = True) -> Worker:
    steps = {kind.STEP: kind for kind in (CountSamples, CountUnlabelled, MeanFeatures)}
    return Worker("d", TASK, device_data(), home, steps=steps, trains=trains)


def test_a_step_of_the_owners_is_done(tmp_path: Path, half: ModuleType) -> None:
    assert done(tmp_path, CountSamples(times=2), knowing(tmp_path)).result == Counted(n=80)


def test_what_the_device_does_not_know_is_unsupported(tmp_path: Path, half: ModuleType) -> None:
    result = done(tmp_path, CountSamples()).result
    assert isinstance(result, Unsupported)
    assert "step count_samples version 1: this device has none of that name" in result.reason
    newer = done(tmp_path, CountSamples(), knowing(tmp_path), version=2).result
    assert newer == Unsupported(reason="step count_samples version 2: this device has version 1")
    without = done(tmp_path, Route(gate=Blobs().model(0)), knowing(tmp_path)).result
    assert isinstance(without, Unsupported)


def test_a_worker_of_this_process_learns_a_step_with_its_action(tmp_path: Path, half: ModuleType) -> None:
    """As the simulated fleet hands it out; one that was made for some steps knows no others."""
    own, action = worker(tmp_path), CountSamples()
    assert own.versions is None
    assert own.execute(order(action), Blobs(), action=action).result == Counted(n=40)
    assert knowing(tmp_path).versions == {"count_samples": 1, "count_unlabelled": 1, "mean_features": 1, "recipe": 2}


@pytest.mark.parametrize("body", [b"", b"nonsense", msgspec.msgpack.encode({"model": 3})])
def test_a_body_that_is_no_action_fails(tmp_path: Path, body: bytes) -> None:
    result = done(tmp_path, MeanFeatures(model=Blobs().model(0)), body=body).result
    assert isinstance(result, Failed)
    assert "malformed" in result.reason


def test_a_device_that_does_not_train_declines_what_needs_labels_or_torch(tmp_path: Path, half: ModuleType) -> None:
    own = knowing(tmp_path, trains=False)
    assert done(tmp_path, CountSamples(), own).result == Declined(why=Why.NO_TRAINING)
    assert done(tmp_path, CountUnlabelled(), own).result == Counted(n=40)


def raising(error: Exception) -> object:
    def run(device: Device, action: Action) -> Result:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "why", "reason"),
    [
        (ConfigError("no such layer"), Why.UNFIT, "no such layer"),
        (ValueError("odd"), Why.UNFIT, "odd"),
        (FailedError("strange"), Why.UNFIT, "strange"),
        (ProtocolError("not-finite", "NaN"), Why.NOT_FINITE, "not-finite: NaN"),
        (ProtocolError("layout", "other"), Why.MALFORMED, "layout: other"),
        (KeyError("x"), Why.ERROR, "KeyError: 'x'"),
    ],
)
def test_whatever_a_step_raises_is_a_failure(
    tmp_path: Path, half: ModuleType, caplog: pytest.LogCaptureFixture, error: Exception, why: Why, reason: str
) -> None:
    half.run = raising(error)
    assert done(tmp_path, CountSamples(), knowing(tmp_path)).result == Failed(why=why, reason=reason)
    assert ("event=work_failed device=d" in caplog.text) == isinstance(error, KeyError)


class Measured(Counted, frozen=True, kw_only=True):
    REVEALS: ClassVar = {**Counted.REVEALS, "file": Reveals.UPDATE}
    file: BlobRef | None = None


class Measure(CountSamples, frozen=True, kw_only=True):
    STEP: ClassVar = "measure"
    RESULT: ClassVar = Measured


ELSEWHERE = BlobRef(digest="0" * 64, size_bytes=3)


@pytest.mark.parametrize(
    ("returned", "why", "says"),
    [
        (None, Why.UNFIT, "step measure returned NoneType instead of Measured"),
        (Counted(n=3), Why.UNFIT, "step measure returned Counted instead of Measured"),
        (Measured(n=np.int64(3)), Why.UNFIT, "returned a Measured that no report holds: .*numpy.int64"),
        (Measured(n="three"), Why.UNFIT, "returned a Measured that no report holds: Expected `int`, got `str`"),
        (Measured(n=3, drawn=np.nan), Why.NOT_FINITE, "holds a number that is not finite"),
        (Measured(n=3, file=ELSEWHERE), Why.UNFIT, r"tensors that it never sent \(00000000\): take the reference that"),
    ],
)
def test_a_result_that_the_coordinator_could_not_take_is_a_failure_with_its_reason(
    tmp_path: Path, half: ModuleType, returned: object, why: Why, says: str
) -> None:
    half.run = lambda device, action: returned
    own = worker(tmp_path)
    result = own.execute(order(Measure()), Blobs(), action=Measure()).result
    assert isinstance(result, Failed)
    assert result.why is why
    assert re.search(says, result.reason), result.reason


def test_a_result_that_fits_into_no_report_is_a_failure(tmp_path: Path, half: ModuleType) -> None:
    class Long(Counted, frozen=True, kw_only=True):
        REVEALS: ClassVar = {**Counted.REVEALS, "text": Reveals.TEXT}
        text: str

    class Tell(CountSamples, frozen=True, kw_only=True):
        STEP: ClassVar = "tell"
        RESULT: ClassVar = Long

    half.run = lambda device, action: Long(n=3, text="x" * 60_000)
    result = worker(tmp_path).execute(order(Tell()), Blobs(), action=Tell()).result
    assert isinstance(result, Failed)
    assert "and a report holds 53248: send large parts with device.send" in result.reason


@pytest.mark.parametrize("error", [StoreError("the disk is full"), StoppedError()])
def test_a_broken_disk_and_a_stop_are_nobodys_answer(tmp_path: Path, half: ModuleType, error: Exception) -> None:
    half.run = raising(error)
    with pytest.raises(type(error)):
        done(tmp_path, CountSamples(), knowing(tmp_path))


def test_a_network_that_draws_draws_from_the_order(tmp_path: Path, half: ModuleType) -> None:
    import torch

    half.run = lambda device, action: Counted(n=1, drawn=float(torch.rand(1)))
    own = knowing(tmp_path)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, other = (done(tmp_path, CountSamples(), own, seed=seed).result for seed in (1, 2))
    assert first == done(tmp_path, CountSamples(), own, seed=1).result != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("field", ["y_train", "y_val"])
def test_a_label_that_the_task_does_not_have_is_refused_at_the_start(tmp_path: Path, field: str) -> None:
    data = device_data()
    with pytest.raises(ConfigError, match=r"holds \d\.\.3, and class numbers are 0\.\.2 here"):
        Worker("d", TASK, replace(data, **{field: getattr(data, field) + 1}), tmp_path)


def test_an_order_that_was_handed_over_is_done_as_if_it_had_been_read(tmp_path: Path) -> None:
    blobs = Blobs()
    action = MeanFeatures(model=blobs.model(1))
    read, handed = (worker(tmp_path).execute(order(action), blobs, action=known) for known in (None, action))
    assert isinstance(read.result, FeaturesMeasured)
    assert read == handed


def test_a_step_that_needs_no_torch_loads_none() -> None:
    program = (
        "import sys, numpy as np, pathlib\n"
        "from edge_agent.device.worker import Worker\n"
        "from fedge.wire.messages import Order\n"
        "from fedge.data.task import TaskSpec\n"
        "from fedge.tasks.data import DeviceData\n"
        "from fedge.steps.contract import encode_body\n"
        "from fedge.wire.messages import BlobRef\n"
        "from fedge.steps.descriptions.route import Route\n"
        "task = TaskSpec(name='t', classes=('a', 'b'), input_shape=(2,), model='mlp')\n"
        "data = DeviceData.from_inputs(np.zeros((3, 2), np.float32))\n"
        "own = Worker('d', task, data, pathlib.Path('unused'), trains=False)\n"
        "body = encode_body(Route(gate=BlobRef(digest='0' * 64, size_bytes=1)))\n"
        "order = Order(id='a', device_id='d', run='r', round=1, label='l', seed=0, task_fingerprint='',\n"
        "              left_s=60.0, step='route', body=body)\n"
        "print(type(own.execute(order, lambda _: b'no graph').result).__name__)\n"
        "print([m for m in ('torch', 'sklearn', 'onnx') if m in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["Failed", "[]"]


def test_steps_are_those_that_are_installed_unless_said_otherwise(tmp_path: Path) -> None:
    data = DeviceData.from_inputs(np.zeros((3, 6), np.float32))
    own = Worker("d", TASK, data, tmp_path)
    assert set(own.make_device(order(Route(gate=Blobs().model(0))), Blobs()).steps) == set(load_installed_steps())
