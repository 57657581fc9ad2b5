"""Methods by name, and which of them answer which kinds of problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import deploy
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.own import Own
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import Segmentation
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.steps.sgd import Sgd
from fedge.system.loading import FINE_TUNED, allow_code
from fedge.tasks import DeviceData
from fedge.tensors.layout import unflatten
from tests.support.own_problem import NEAREST
from tests.support.simulation import Fleet, of_method

N = 30
"""Samples of a device: 20 for training, 10 for validation."""
CLASSED = {
    "cfic": "clusters devices by the class that most of their samples have",
    "fedcoe": "makes its experts from the classes of the server's samples",
    "fedgh": "trains the shared head on the mean features of classes",
    "fedrod": "weighs the classes by a balanced softmax",
    "gpfl": "learns an embedding of each class",
    "haccs": "clusters devices by the shares of their classes",
    "pm-moe": "mixes the confidences of many modules in each class",
}
"""Methods that need the class of each sample, and what for."""
KINDS = ("classification", "multi-label", "regression", "segmentation", "reconstruction", "own")
HEADED = {"dbe", "fedbabu", "fedcp", "fedper", "fedrep", "lg-fedavg", "moon"}
"""Methods that part a network into a base and a head, its last linear layer."""
HEADLESS = {"segmentation", "own"}
"""Kinds whose network here has no linear layer that gives its output."""
settings = MethodSettings(rounds=2, sgd=Sgd(steps=2, batch_size=8))


def task_of(kind: str) -> TaskSpec:
    asked: dict[str, tuple[Any, tuple[int, ...], str]] = {
        "classification": (msgspec.UNSET, (4,), "mlp"),
        "multi-label": (MultiLabel(labels=("a", "b", "c")), (4,), "mlp"),
        "regression": (Regression(targets=("a", "b"), mean=(0.0, 0.0), std=(1.0, 1.0)), (4,), "mlp"),
        "segmentation": (Segmentation(classes=("none", "cat")), (1, 8, 8), "unet"),
        "reconstruction": (Reconstruction(), (6,), "autoencoder"),
        "own": (Own(code=NEAREST, outputs=(1, 2), targets=(2,)), (4,), "mlp"),
    }
    problem, shape, model = asked[kind]
    options = {"mlp": {"hidden": 8}, "unet": {"channels": 2}, "autoencoder": {"hidden": 8, "code": 2}}[model]
    classes = ("a", "b", "c") if problem is msgspec.UNSET else ()
    return TaskSpec(name=kind, classes=classes, input_shape=shape, model=model, model_options=options, asked=problem)


def targets_of(kind: str, x: NDArray[np.float32], rng: np.random.Generator) -> NDArray[Any]:
    flat = x.reshape(len(x), -1)
    return {
        "classification": np.arange(len(x)) % 3,
        "multi-label": (flat[:, :3] > 0).astype(np.int64),
        "regression": (flat[:, :2] + rng.normal(size=(len(x), 2))).astype(np.float32),
        "segmentation": (x[:, 0] > 0).astype(np.int64) if x.ndim == 4 else flat,
        "reconstruction": np.zeros(len(x), np.int64),
        "own": flat[:, :2],
    }[kind]


def federation(kind: str, home: Path, method: str = "fedavg") -> tuple[Fleet, Server]:
    """Four devices with random samples, and a server with as many."""
    allow_code([NEAREST])
    task, workers = of_method(task_of(kind), method.removesuffix(FINE_TUNED)), {}
    rng = np.random.default_rng(0)
    for k in range(5):
        x = rng.normal(size=(N, *task.input_shape)).astype(np.float32)
        y = task.problem.convert_targets(targets_of(kind, x, rng), N, task.input_shape, "y")
        data = DeviceData(x[:20], y[:20], np.zeros(20, np.bool_), x[20:], y[20:], converted=True)
        workers[f"d{k}"] = Worker(f"d{k}", task, data, home / f"d{k}")
    server = workers.pop("d4").data.labelled
    fleet = Fleet(task, build.make_initial_model(task, 0)[0], workers, seed=0)
    return fleet, Server(task, server)


def make(name: str, fleet: Fleet, server: Server) -> tuple[Method[Any], Any]:
    """The method and its first state; a refusal comes here, before the first round."""
    method = make_method(name, settings, server)
    layout, first = build.make_initial_model(fleet.task, 0)
    return method, method.make_first_state(layout, fleet.put(unflatten(first, layout)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*get_installed_methods(), "fedavg+ft"])
async def test_a_method_answers_a_problem_or_names_the_need_that_it_does_not_meet(
    tmp_path: Path, name: str, kind: str
) -> None:
    if name in CLASSED and kind != "classification":
        fleet, server = federation(kind, tmp_path)
        with pytest.raises(ConfigError, match=f"^{name} is for classification, not for .*, since it {CLASSED[name]}"):
            make(name, fleet, server)
        return
    if name in HEADED and kind in HEADLESS:
        with pytest.raises(ConfigError, match="its last layer must be linear"):
            make(name, *federation(kind, tmp_path, name))
        return
    fleet, server = federation(kind, tmp_path, name)
    method, state = make(name, fleet, server)
    state = await run_rounds(method, state, fleet)
    assert set(state.installed) == set(fleet.workers)
    for i, worker in fleet.workers.items():
        runtime = deploy.load(tmp_path / i / "bundles" / str(state.installed[i].release))
        said = runtime.predict(worker.data.x_val)
        shapes = worker.task.problem.get_answer_shapes(worker.task.input_shape)
        assert [answer.shape[1:] for answer in said.answers] == list(shapes)
        assert all(np.isfinite(answer).all() for answer in said.answers)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fedge", {"clustering": "labels"}, "most of their samples have .clustering=labels.: take another clustering"),
        ("scmoe-pfl", {"clustering": "labels"}, "take another clustering, such as mctc"),
        ("fedepc", {"extractor": "server"}, "classes of the server's samples .extractor=server."),
        ("fedge", {"class_means": 0.5}, "means of their classes .class_means.: leave the option out"),
    ],
)
def test_an_option_that_needs_classes_is_refused_for_another_problem(
    tmp_path: Path, name: str, options: dict[str, Any], why: str
) -> None:
    _, server = federation("regression", tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is for classification, not for .*, since it .*{why}"):
        make_method(name, msgspec.structs.replace(settings, options=options), server)


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fedavg, fedavgm, "):
        make_method("nothing", MethodSettings())


def test_a_method_says_at_least_what_a_round_is() -> None:
    with pytest.raises(ConfigError, match="lacks round"):
        load_method_class("coordinator.methods:Method")
