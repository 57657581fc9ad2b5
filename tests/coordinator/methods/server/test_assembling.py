"""Bundles that the coordinator makes: of one model, and FedCoE's global model; others are in test_learning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import deploy
from coordinator.methods.server.assembling import make_child_bundle, make_files, make_mixture
from coordinator.methods.server.learning import Gate, ServerData
from export import parity
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.tasks import load_pool, load_task
from fedge.wire.messages import Role

TASK = load_task("digits")


def test_the_child_makes_what_this_process_would_make_and_it_predicts_what_the_model_does(tmp_path: Path) -> None:
    layout, model = build.make_initial_model(TASK, 3)
    alone = make_mixture(TASK, [model], [1.0])
    files = make_child_bundle(TASK, layout, alone, release=2, method="fedavg")
    none = np.zeros((0, *TASK.input_shape), np.float32)
    assert files == make_files(alone, none, task=TASK, layout=layout, release=2, method="fedavg")
    runtime = deploy.load(written(tmp_path, files))
    assert (runtime.manifest.release, runtime.manifest.method) == (2, "fedavg")
    assert [(c.role, c.kappa) for c in runtime.manifest.candidates] == [(Role.GLOBAL, 0.0)]
    x = load_pool("digits", seed=0, limit=50).x
    (logits,) = parity.compute_logits(TASK, layout, [model], preprocessing.preprocess(TASK, x))
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(runtime.predict(x).probabilities, expected, atol=1e-4)


def test_a_network_that_cannot_be_built_says_why() -> None:
    layout, model = build.make_initial_model(TASK, 3)
    strange = msgspec.structs.replace(TASK, model="no_such_package:net")
    with pytest.raises(ConfigError, match=r"no bundle of the network of task digits.*no_such_package"):
        make_child_bundle(strange, layout, make_mixture(TASK, [model], [1.0]), release=1, method="fedavg")


def mixed(p: NDArray[np.floating], probabilities: NDArray[np.floating], top: int) -> NDArray[np.floating]:
    """E13 of fedcoe.md, sample by sample: `p` (n, K) of the gate, `probabilities` (K, n, C) of the experts."""
    rows = []
    for n, gate in enumerate(p):
        best = sorted(range(len(gate)), key=lambda j: -gate[j])[:top]
        rows.append(sum(gate[j] * probabilities[j, n] for j in best) / sum(gate[j] for j in best))
    return np.stack(rows)


@pytest.mark.parametrize("input_shape", [(1, 14, 13), (7,)])
def test_the_global_model_is_equation_4_on_every_engine(tmp_path: Path, input_shape: tuple[int, ...]) -> None:
    """With the gate's own convolutions and, for other inputs, without; the gate is another one for each sample."""
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=input_shape, model="mlp")
    experts = [build.make_initial_model(task, seed)[1] for seed in range(4)]
    layout = build.make_initial_model(task, 0)[0]
    torch.manual_seed(0)
    tensors = {name: 3 * value.numpy() for name, value in Gate(input_shape, 4).state_dict().items()}
    x = np.random.default_rng(0).normal(size=(40, *input_shape)).astype(np.float32)
    server_data = ServerData(task, x, np.arange(40) % 3)
    expected = mixed(
        server_data.compute_routing(tensors), np.stack([server_data.compute_probabilities(e) for e in experts]), 2
    )
    assert len({tuple(np.argsort(-row)[:2]) for row in server_data.compute_routing(tensors)}) > 2

    mixture = make_mixture(task, experts, [1.0] * 4, gate=tensors, top=2)
    folder = written(tmp_path, make_child_bundle(task, layout, mixture, release=1, method="fedcoe"))
    for engine in ("fused", "separate", "lazy"):
        found = deploy.load(folder, engine=engine).predict_inputs(x)
        np.testing.assert_allclose(found.probabilities, expected, atol=2e-6 if engine != "lazy" else 0.01)
        assert ((found.weights > 0).sum(axis=1) <= 2).all()
    with pytest.raises(ConfigError, match="the gate alone"):
        deploy.load(folder, mode="shift")


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    """The folder of a bundle with these files."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
