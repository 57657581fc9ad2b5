"""What FedCoE's server computes on its server data (docs/methods/fedcoe.md)."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import deploy
from coordinator.aggregation import correlation
from coordinator.methods.server.assembling import make_mixture
from coordinator.methods.server.learning import ServerData
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.steps.sgd import Sgd
from fedge.tasks import load_pool, load_task
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import Role

TASK = load_task("digits")
SGD = Sgd(learning_rate=0.1)
K = 5
GROUPS = correlation.assign_classes(10, K)


@pytest.fixture(scope="module")
def server_data() -> ServerData:
    samples = load_pool("digits", seed=0)
    rng = np.random.default_rng(0)
    own = np.concatenate([rng.permutation(np.flatnonzero(samples.y == c))[:40] for c in range(10)])
    return ServerData(TASK, preprocessing.preprocess(TASK, samples.x[own]), samples.y[own])


@pytest.fixture(scope="module")
def first() -> tuple[Layout, Model]:
    return build.make_initial_model(TASK, 0)


@pytest.fixture(scope="module")
def experts(server_data: ServerData, first: tuple[Layout, Model]) -> list[Model]:
    return server_data.pretrain(first[1], GROUPS, K, epochs=30, sgd=SGD, seed=0)


def nan_model(model: Model) -> Model:
    return Model(np.full_like(model.params, np.nan), model.buffers, model.counters)


def test_each_expert_is_sure_about_its_own_classes_alone(server_data: ServerData, experts: list[Model]) -> None:
    q = server_data.compute_scores(experts)
    own = np.array(GROUPS)[server_data.y]
    assert q.shape == (400, K)
    assert q[np.arange(400), own].mean() > 0.95
    assert (q.sum(axis=1) - q[np.arange(400), own]).mean() < 0.05


def test_the_gate_learns_the_classes_of_the_experts_with_a_sharp_temperature(
    server_data: ServerData, experts: list[Model]
) -> None:
    """Section 3: with T_s = 1 it can never be sharper than 0.4046."""
    own = np.array(GROUPS)[server_data.y]
    for temperature, low, high in ((0.1, 0.9, 1.0), (1.0, 0.3, 0.4046)):
        s = correlation.compute_suitability(server_data.compute_scores(experts), temperature)
        p = server_data.compute_routing(server_data.train_gate(s, None, trunk="auto", epochs=30, seed=0))
        np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-6)
        assert (p.argmax(axis=1) == own).mean() > 0.9
        assert low < p.max(axis=1).mean() <= high + 0.05
    divergence = (s * np.log(s / p)).sum(axis=1)
    assert (divergence >= 0).all()


def test_a_gate_goes_on_from_where_it_was(server_data: ServerData, experts: list[Model]) -> None:
    s = correlation.compute_suitability(server_data.compute_scores(experts), 0.1)

    def divergence(gate: dict) -> float:
        return float((s * np.log(s / server_data.compute_routing(gate))).sum(axis=1).mean())

    once = server_data.train_gate(s, None, trunk="auto", epochs=3, seed=0)
    again = server_data.train_gate(s, once, trunk="auto", epochs=3, seed=1)
    assert divergence(again) < divergence(once)
    same = server_data.train_gate(s, None, trunk="auto", epochs=3, seed=0)
    assert all(np.array_equal(same[name], once[name]) for name in once)
    vector = server_data.train_gate(s, None, trunk="vector", epochs=1, seed=0)
    assert set(vector) == {"hidden.weight", "hidden.bias", "out.weight"}
    assert server_data.compute_routing(vector).shape == (400, K)


def test_equal_seeds_give_equal_experts(server_data: ServerData, first: tuple[Layout, Model]) -> None:
    one, other = (server_data.pretrain(first[1], GROUPS, K, epochs=1, sgd=SGD, seed=3) for _ in range(2))
    assert all(np.array_equal(a.params, b.params) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0].params, one[1].params)


def test_an_expert_without_samples_stays_at_the_start(
    server_data: ServerData, first: tuple[Layout, Model], caplog: pytest.LogCaptureFixture
) -> None:
    groups = correlation.assign_classes(10, 15)
    found = server_data.pretrain(first[1], groups, 15, epochs=1, sgd=SGD, seed=0)
    without = [j for j in range(15) if j not in groups]
    assert without
    assert [j for j in range(15) if np.array_equal(found[j].params, first[1].params)] == without
    assert caplog.text.count("expert_without_samples") == len(without)


def test_a_model_that_is_not_finite_scores_nothing(server_data: ServerData, first: tuple[Layout, Model]) -> None:
    a = server_data.compute_scores([first[1], nan_model(first[1])])
    assert (a[:, 0] > 0).all()
    assert (a[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((0, 1, 8, 8)), np.zeros(0, int), "empty"),
        (np.zeros((2, 1, 8, 9)), np.array([0, 1]), "does not fit"),
        (np.zeros((2, 1, 8, 8)), np.array([0, 10]), "does not fit"),
        (np.zeros((2, 1, 8, 8)), np.array([-1, 1]), "does not fit"),
        (np.zeros((3, 1, 8, 8)), np.array([0, 1]), "does not fit"),
    ],
)
def test_an_unfit_reserved_set_is_refused(x: np.ndarray, y: np.ndarray, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerData(TASK, x.astype(np.float32), y)


def test_missing_classes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ServerData(TASK, np.zeros((8, 1, 8, 8), np.float32), np.arange(8))
    assert "no sample of classes [8, 9]" in caplog.text


# -------------------------------------------------------------------------------------------------------- the bundle


def write(folder: Path, files: dict[str, bytes]) -> deploy.runtime.Runtime:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return deploy.load(folder)


def raw(task: TaskSpec, x: np.ndarray) -> np.ndarray:
    pre = task.preprocessing
    return (x * pre.std + pre.mean) * pre.scale


def test_an_assembled_model_becomes_a_bundle_whose_classes_are_weighted(
    tmp_path: Path, server_data: ServerData, experts: list[Model], first: tuple[Layout, Model]
) -> None:
    t = correlation.compute_profile_prior(np.array([0.6, 0.1, 0.1, 0.1, 0.1]), np.full(5, 0.2), GROUPS, 0.02)
    for prior, factor in ((t, np.exp(t)), (None, 1.0)):
        mixture = make_mixture(TASK, [experts[0]], [1.0], prior)
        files = server_data.make_bundle(mixture, layout=first[0], release=3, method="fedcoe")
        runtime = write(tmp_path / str(prior is None), files)
        expected = server_data.compute_probabilities(experts[0]) * factor
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(runtime.predict(raw(TASK, server_data.x)).probabilities, expected, atol=1e-4)
        assert (runtime.manifest.release, runtime.manifest.method) == (3, "fedcoe")
        assert [c.role for c in runtime.manifest.candidates] == [Role.GLOBAL]


def test_outputs_of_experts_are_mixed_by_their_shares(
    tmp_path: Path, server_data: ServerData, experts: list[Model], first: tuple[Layout, Model]
) -> None:
    shares = [0.5, 0.3, 0.2]
    mixture = make_mixture(TASK, experts[:3], shares)
    files = server_data.make_bundle(mixture, layout=first[0], release=1, method="fedcoe")
    expected = sum(share * server_data.compute_probabilities(e) for share, e in zip(shares, experts, strict=False))
    runtime = write(tmp_path / "bundle", files)
    np.testing.assert_allclose(runtime.predict(raw(TASK, server_data.x)).probabilities, expected, atol=1e-4)
    assert [c.role for c in runtime.manifest.candidates] == [Role.EXPERT] * 3
