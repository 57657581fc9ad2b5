from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_agent.steps.training import train_ditto
from fedge.models import build
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_ditto import TrainDitto
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Model
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, mixed_data, samples

SGD = Sgd(steps=6, batch_size=8)
DATA = mixed_data(samples(20, 1), samples(12, 2))
OTHER = build.make_initial_model(TASK, 4)[1]


def learn(w: Model, mine: Model | None, proximal_lambda: float, sgd: Sgd = SGD, seed: int = 3) -> tuple[Model, Model]:
    action = TrainDitto(starts=(Start(model=Blobs().model(0)),), sgd=sgd, proximal_lambda=proximal_lambda)
    here = device(Path("unused"), action, data=DATA, seed=seed)
    learned = train_ditto.train_models(here, action, w, None if mine is None else Layers(LAYOUT, mine))
    assert learned.kept is not None
    return learned.model, learned.kept


def trained(start: Model, samples_: tuple, *seed: int, sgd: Sgd = SGD) -> np.ndarray:
    network = Network(TASK)
    network.load(start)
    Trainer(network, *samples_, sgd, np.random.default_rng(seed if len(seed) > 1 else seed[0])).run(sgd.steps)
    return network.dump().params


def test_with_lambda_0_the_personal_model_trains_alone_over_the_rounds() -> None:
    """Whatever the global model does."""
    v, expected = None, INITIAL
    for number in range(3):
        w = INITIAL if number == 0 else build.make_initial_model(TASK, number)[1]
        _, personal = learn(w, v, 0.0, seed=10 * number)
        expected = Model(trained(expected, DATA.training, 10 * number, 1), INITIAL.buffers, INITIAL.counters)
        v = personal
        np.testing.assert_array_equal(personal.params, expected.params)


@pytest.mark.parametrize("proximal_lambda", [0.0, 0.1, 3.0])
def test_the_shared_model_is_fedavgs_whatever_the_personal_one_does(proximal_lambda: float) -> None:
    shared, personal = learn(INITIAL, OTHER, proximal_lambda)
    np.testing.assert_array_equal(shared.params, trained(INITIAL, DATA.shared, 3))
    assert (personal.params != shared.params).any()


def test_the_worked_step() -> None:
    """One step of plain SGD: v - rate (gradient of the loss at v + lambda (v - w))."""
    one = Sgd(steps=1, batch_size=32, learning_rate=0.2, momentum=0.0)
    _, alone = learn(INITIAL, OTHER, 0.0, one)
    _, drawn = learn(INITIAL, OTHER, 0.7, one)
    np.testing.assert_allclose(drawn.params, alone.params - 0.2 * 0.7 * (OTHER.params - INITIAL.params), atol=1e-6)


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_the_stronger_the_pull_the_nearer_to_the_global_model(mu: float) -> None:
    """The shared model's own proximal term (FedProx) does not act on the personal one."""
    sgd = msgspec.structs.replace(SGD, steps=30, momentum=0.0, proximal_mu=mu)
    distances = []
    for proximal_lambda in (0.0, 0.1, 1.0, 10.0):
        _, personal = learn(INITIAL, OTHER, proximal_lambda, sgd)
        distances.append(float(np.linalg.norm(personal.params - INITIAL.params)))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.2 * distances[0]
    _, plain = learn(INITIAL, OTHER, 1.0, msgspec.structs.replace(sgd, proximal_mu=0.0))
    _, same = learn(INITIAL, OTHER, 1.0, sgd)
    np.testing.assert_array_equal(plain.params, same.params)


def test_the_first_personal_model_begins_at_the_global_one() -> None:
    _, first = learn(OTHER, None, 0.5)
    _, told = learn(OTHER, OTHER, 0.5)
    np.testing.assert_array_equal(first.params, told.params)
