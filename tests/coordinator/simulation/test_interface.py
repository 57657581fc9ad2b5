"""`import fedge` as in a script and as in a notebook."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import fedge
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.simulation.run import LOOK_S, run_to_end
from coordinator.simulation.settings import CompareSettings, SimulationSettings, TuneSettings
from fedge.errors import ConfigError

RNG = np.random.default_rng(0)
X = RNG.random((240, 5)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)
SMALL = {"devices": 3, "samples": 200, "rounds": 2, "progress": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    ("function", "settings"), [("simulate", SimulationSettings), ("compare", CompareSettings), ("tune", TuneSettings)]
)
def test_names_and_defaults_are_those_of_the_command(function: str, settings: type[msgspec.Struct]) -> None:
    parameters = inspect.signature(getattr(fedge, function)).parameters
    for field in msgspec.structs.fields(settings):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
    assert all(name in getattr(fedge, function).__doc__ for name in parameters)


def test_a_task_of_arrays_with_a_network_of_ones_own_ends_in_bundles_that_predict() -> None:
    task = fedge.Task.from_arrays(X, Y, model=Net, classes=["a", "b", "c"])
    told: list[str] = []
    found = fedge.simulate(task=task, method="fedavg+ft", devices=4, rounds=5, learning_rate=0.3, progress=told.append)
    assert found.accuracy > 0.6
    assert told[-1].startswith("the devices' bundles")
    bundle = found.get_bundle("device-0")
    prediction = fedge.load(bundle).predict(X[:50])
    assert set(prediction.class_name) <= {"a", "b", "c"}
    assert (prediction.class_index == Y[:50]).mean() > 0.5
    with pytest.raises(ConfigError, match=r"^no bundle of 'device-9': there are device-0, device-1, device-2, dev"):
        found.get_bundle("device-9")
    home = found.home
    del found
    gc.collect()
    assert not home.exists(), "it lived as long as the result"


def test_equal_arguments_give_equal_figures_and_a_folder_stays(tmp_path: Path) -> None:
    one = fedge.simulate(method="fedprox", options={"proximal_mu": 0.1}, out=tmp_path / "out", **SMALL)
    two = fedge.simulate(method="fedprox:proximal_mu=0.1", target=0.05, **SMALL)
    assert one.cost is None
    assert two.cost is not None
    assert "until 5.0 %" in two._repr_html_()
    assert "until 5.0 %" in str(two) == repr(two)
    assert [device.score for device in one.devices] == [device.score for device in two.devices]
    assert one.home == tmp_path / "out"
    assert (one.home / "report.html").exists()
    assert one.get_bundle("device-1").is_dir()
    with pytest.raises(ConfigError, match="not empty"):
        fedge.simulate(out=tmp_path / "out", **SMALL)


async def test_inside_a_running_event_loop() -> None:
    assert fedge.simulate(method="fedavg", **SMALL).bundles == 3
    found = fedge.compare(methods=["local", "fedavg"], seeds=[0], jobs=1, **SMALL)
    assert [run.method for run in found.runs] == ["local", "fedavg"]


async def test_ctrl_c_in_a_notebook_ends_the_work_in_its_thread() -> None:
    ended: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(2 * LOOK_S)  # nobody presses it while the thread is made
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_to_end(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_methods_and_seeds_may_be_lists_and_rows_are_typed(tmp_path: Path) -> None:
    task = fedge.Task.from_arrays(X, Y, model=Net)
    told: list[str] = []
    given = SMALL | {"progress": told.append}
    found = fedge.compare(task=task, methods=["local", "fedavg"], seeds=range(2), out=tmp_path / "out", **given)
    assert [(row["method"], row["seed"]) for row in found.to_rows()] == [
        ("local", 0), ("fedavg", 0), ("local", 1), ("fedavg", 1)
    ]  # fmt: skip
    assert told[-1].startswith("4/4  fedavg  seed 1  accuracy")
    assert found.methods[0].accuracy.mean == pytest.approx(np.mean([run.accuracy for run in found.runs[::2]]))
    told.clear()
    assert len((tmp_path / "out" / "figures.csv").read_text().splitlines()) == 5
    other = fedge.Task.from_arrays(X, (Y + 1) % 3, model=Net)
    with pytest.raises(ConfigError, match="another task"):
        fedge.compare(task=other, methods=["local", "fedavg"], seeds=range(2), out=tmp_path / "out", **given)


def test_whose_samples_are_whose_is_not_ignored() -> None:
    task = fedge.Task.from_arrays(X, Y, users=np.arange(len(Y)) % 3)
    for run in (fedge.simulate, fedge.compare):
        with pytest.raises(ConfigError, match=r'says whose each sample is \(users\): say partition="natural"'):
            run(task=task, rounds=1)
    found = fedge.simulate(task=task, partition="natural", method="fedavg", rounds=1, progress=None)
    assert [device.id for device in found.devices] == ["device-0", "device-1", "device-2"]
    assert fedge.simulate(task=task, partition="iid", devices=2, method="fedavg", rounds=1, progress=None).bundles == 2


SCRIPT = """
import fedge
print("begun")
found = fedge.compare(methods=["local", "fedavg"], seeds=[0], devices=3, samples=200, rounds=1, jobs=2, progress=None)
print(len(found.runs))
"""


@pytest.mark.process
def test_a_search_finds_the_best_of_its_trials() -> None:
    found = fedge.tune(
        method="fedavg", task="digits", devices=2, samples=200, rounds=2, search=["learning_rate=0.001,0.1"], trials=2
    )
    assert found.best.accuracy == max(one.accuracy for one in found.trials if one.rounds == 2)
    assert {one.values["learning_rate"] for one in found.trials} <= {0.05, 0.001, 0.1}


@pytest.mark.process
def test_a_script_needs_no_guard_for_the_processes_of_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("begun\n2\n", "")


LONG = "fedge.simulate(method='fedavg', devices=3, samples=200, rounds=100000, evaluate_every=2)"


@pytest.mark.process
def test_ctrl_c_ends_the_processes_of_a_comparison_inside_a_running_event_loop(tmp_path: Path) -> None:
    compare = (
        "fedge.compare(methods='local,fedge', seeds='0', devices=4, samples=300, rounds=600, local_steps=1, jobs=2)"
    )
    code = f"import asyncio, fedge\nasync def main(): {compare}\nasyncio.run(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as run:
        assert run.stderr is not None
        assert any("1/2  local" in line for line in iter(run.stderr.readline, ""))
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=300) != 0
        assert "KeyboardInterrupt" in run.stderr.read()
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.parametrize(
    "code", [LONG, f"import asyncio\nasync def main(): {LONG}\nasyncio.run(main())"], ids=["script", "event loop"]
)
def test_ctrl_c_ends_a_script_and_leaves_nothing(code: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import fedge\n{code}"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as run:
        assert run.stderr is not None
        assert any("round 0" in line for line in iter(run.stderr.readline, ""))
        assert "round 2" in run.stderr.readline()
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=300) != 0
        assert "KeyboardInterrupt" in run.stderr.read()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devcies": 3}, "unknown key devcies in the arguments (did you mean devices?)"),
        ({"rounds": -1}, "rounds: Expected `int` >= 0"),
        ({"task": "digitz"}, "did you mean digits?"),
        ({"method": "fedegg"}, "no method 'fedegg'"),
        ({"method": "ditto", "options": {"proximal_lamda": 1}}, "did you mean 'proximal_lambda'"),
        ({"alpha": 0.1, "partition": "iid"}, "changes nothing"),
        ({"model": 3}, "a network is a name"),
        ({"method": 3}, "method: Expected `str`, got `int`"),
        ({"method": dict}, "is no method: it must be a subclass of coordinator.methods.method.Method"),
        ({"optimiser": "adam"}, "unknown key optimiser in the arguments: it is called optimizer: sgd, adam or adamw"),
        (
            {"loss": "mse"},
            "unknown key loss in the arguments: the problem says it; with classes it is cross-entropy, with label_",
        ),
        ({"augmentation": "flip"}, "unknown key augmentation in the arguments: it is called augment: flip, crop"),
        ({"early_stopping": 3}, "unknown key early_stopping in the arguments: it is called patience: training ends"),
        ({"metrics": "f1"}, "unknown key metrics in the arguments: results have the usual figures; for others give"),
        ({"x_test": 3}, "unknown key x_test in the arguments: give x_test and y_test to fedge.Task.from_arrays"),
        ({"patiense": 3}, "unknown key patiense in the arguments (did you mean patience?)"),
        ({"lr": 0.1}, "unknown key lr in the arguments: it is called learning_rate"),
        ({"progres": None}, "unknown key progres in the arguments (did you mean progress?)"),
        ({"option": {"proximal_mu": 1}}, "unknown key option in the arguments (did you mean options?)"),
        ({"qwertz": 1}, "unknown key qwertz in the arguments"),
    ],
)
def test_what_cannot_be_had_is_refused_as_on_the_command_line(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        fedge.simulate(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"seeds": 0},
            "seeds must be a list, or a text with commas, not 0: write seeds=[3] for this one, seeds=range(3)",
        ),
        ({"seeds": [0.5]}, "seeds are whole numbers with commas between them, not '0.5'"),
        ({"methods": 3}, "methods must be a list"),
    ],
)
def test_several_that_are_no_list_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        fedge.compare(**arguments)


class Mine(FedAvg):
    """A method of a notebook."""

    name = "mine"


def test_a_method_may_be_a_class() -> None:
    given: dict[str, Any] = {"task": "digits", "samples": 90, "devices": 3, "rounds": 1, "local_steps": 1}
    run = fedge.simulate(method=Mine, **given, progress=None)
    assert run.method == "mine"
    assert run.accuracy == fedge.simulate(method="fedavg", **given, progress=None).accuracy
    table = fedge.compare(methods=[Mine, "fedavg"], seeds=[0], **given, progress=None)
    assert [own.accuracy.mean for own in table.methods] == [run.accuracy] * 2


def test_a_run_that_is_refused_leaves_its_folder_free(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="too few for"):
            fedge.simulate(method="local", task="digits", samples=30, devices=20, out=tmp_path / "out")


def test_threads_of_torch_are_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fedge.simulate(method="local", **SMALL)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_pandas_is_used_where_it_is_and_missed_with_words(
    not_installed: Callable[..., None], own_module: Callable[..., object]
) -> None:
    found = fedge.simulate(method="local", **SMALL)
    not_installed("pandas")
    with pytest.raises(ConfigError, match="pip install pandas"):
        found.to_pandas()
    own_module("pandas", DataFrame=list)  # the tests do not bring it
    assert [row["device"] for row in found.to_pandas()] == ["device-0", "device-1", "device-2"]
    assert "<svg" in found._repr_html_()


def test_training_samples_are_changed_by_names_and_by_functions_of_ones_own() -> None:
    images = fedge.Task.from_arrays(RNG.random((120, 1, 8, 8)).astype(np.float32), np.arange(120) % 3)
    seen: list[tuple[int, ...]] = []

    def look(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        seen.append(x.shape)
        return x

    small: dict[str, Any] = {"task": images, "devices": 2, "rounds": 1, "local_steps": 3, "progress": None}
    plain = fedge.simulate(**small, method="fedavg")
    changed, again = (fedge.simulate(**small, method="fedavg", augment="flip,noise") for _ in range(2))
    said = [result.devices[0].predictions.probabilities.tobytes() for result in (plain, changed, again)]
    assert said[1] == said[2] != said[0]
    fedge.simulate(**small, method="local", augment=["crop", look])
    assert {shape[1:] for shape in seen} == {(1, 8, 8)}


def test_changes_that_do_not_suit_are_refused_before_the_first_round() -> None:
    task = fedge.Task.from_arrays(X, Y)
    with pytest.raises(ConfigError, match="the augmentation flip is for images"):
        fedge.simulate(task=task, augment="flip", **SMALL)
    with pytest.raises(ConfigError, match=r"unknown augmentation noize \(did you mean noise"):
        fedge.simulate(task=task, augment="noize", **SMALL)
    with pytest.raises(ConfigError, match="with differential privacy each sample is changed by itself"):
        fedge.simulate(task=task, augment=lambda x, _: x, dp_epsilon=8.0, method="fedavg", **SMALL)
    with pytest.raises(ConfigError, match="the augmentation <lambda> fails with ZeroDivisionError"):
        fedge.simulate(task=task, augment=lambda _x, _rng: 1 / 0, method="fedavg", **SMALL)


def test_functions_of_this_process_go_with_a_comparison_and_not_to_ray() -> None:
    task = fedge.Task.from_arrays(X, Y)
    own: dict[str, Any] = {"augment": ["noise", lambda x, _: x], "metric": lambda _said, y: len(y)}
    found = fedge.compare(task=task, methods=["local", "fedavg"], seeds=[0], **own, **SMALL)
    assert found.methods[0].metrics["<lambda>"].mean == found.methods[1].metrics["<lambda>"].mean > 0
    with pytest.raises(ConfigError, match="function of this Python process cannot go to Ray"):
        fedge.simulate(task="digits", engine="ray", augment=lambda x, _: x, **SMALL)
