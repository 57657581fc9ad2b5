from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_agent.steps.personal import train_apfl
from edge_agent.steps.personal.train_apfl import Mixing
from fedge.models import build
from fedge.models.training import Network, Trainer
from fedge.steps.personal.train_apfl import TrainApfl
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Model
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, mixed_data, samples

ONE = Sgd(steps=1, batch_size=64, learning_rate=0.2, momentum=0.0)
DATA = mixed_data(samples(20, 1), samples(12, 2))
OTHER = build.make_initial_model(TASK, 4)[1].params


def learn(
    sgd: Sgd, mine: tuple[np.ndarray, float] | None = None, alpha: float = 0.5
) -> tuple[np.ndarray, np.ndarray, float]:
    """w_i, v and alpha after a round from INITIAL; `mine`: v and alpha of the rounds before."""
    action = TrainApfl(starts=(Start(model=Blobs().model(0)),), sgd=sgd, alpha=alpha)
    kept = None
    if mine is not None:
        v = np.append(mine[0], np.float32(mine[1])).astype(np.float32)
        kept = Layers(TrainApfl.select_kept((), LAYOUT), Model(v, INITIAL.buffers, INITIAL.counters))
    learned = train_apfl.train_models(device(Path("unused"), action, data=DATA, seed=3), action, INITIAL, kept)
    assert learned.kept is not None
    return learned.model.params, *train_apfl.split_share(learned.kept.params)


def gradient_at(params: np.ndarray) -> np.ndarray:
    """Of the mean loss over all samples, by one plain step of rate 1."""
    network = Network(TASK)
    network.load(Model(params, INITIAL.buffers, INITIAL.counters))
    Trainer(network, *DATA.training, Sgd(learning_rate=1.0, momentum=0.0, batch_size=64), np.random.default_rng(0)).run(
        1
    )
    return params - network.dump().params


def test_the_worked_step_of_the_optimiser() -> None:
    v = torch.tensor([1.0, 3.0])
    mixing = Mixing(Sgd(learning_rate=0.1, momentum=0.0), v, torch.tensor([0.0, 1.0]), 0.5)
    mixing.step(torch.tensor([0.5, 2.0]), torch.ones(2))
    np.testing.assert_allclose(v, [0.95, 2.95])
    assert mixing.alpha == pytest.approx(0.2)
    mixing.step(torch.tensor([0.5, 2.0]), 100 * torch.ones(2))
    assert mixing.alpha == 0.0, "a share stays within 0 and 1"


def test_a_step_is_that_of_the_algorithm() -> None:
    """v - eta alpha g, alpha - eta <g, v - w>, with g at alpha v + (1 - alpha) w on all samples."""
    g = gradient_at(0.3 * OTHER + 0.7 * INITIAL.params)
    _, v, alpha = learn(ONE, (OTHER, 0.3))
    np.testing.assert_allclose(v, OTHER - 0.2 * 0.3 * g, atol=1e-6)
    assert alpha == pytest.approx(np.clip(0.3 - 0.2 * (g @ (OTHER - INITIAL.params)), 0, 1), abs=1e-5)


def test_the_shared_model_is_fedavgs_whatever_the_own_one_does() -> None:
    sgd = Sgd(steps=6, batch_size=8)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *DATA.shared, sgd, np.random.default_rng(3)).run(6)
    for mine in (None, (OTHER, 0.9)):
        w, v, _ = learn(sgd, mine)
        np.testing.assert_array_equal(w, network.dump().params)
        assert (v != w).any()


def test_what_diverges_stays_as_it_was_and_says_nothing() -> None:
    w, v, alpha = learn(ONE, (1e30 * OTHER, 1.0))
    assert np.isfinite(w).all()
    np.testing.assert_array_equal(v, 1e30 * OTHER)
    assert alpha == 1.0


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, INITIAL.params), (1.0, OTHER)])
def test_the_mixture_ends_in_either_model(alpha: float, expected: np.ndarray) -> None:
    kept = Model(np.append(OTHER, np.float32(alpha)), INITIAL.buffers, INITIAL.counters)
    layers = Layers(TrainApfl.select_kept((), LAYOUT), kept)
    np.testing.assert_array_equal(train_apfl.overlay(INITIAL, layers, LAYOUT).params, expected)
