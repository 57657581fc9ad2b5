"""One device's round of FedDyn by hand; the federation is in tests/coordinator/methods/baselines/shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.reversible import pack_vector
from edge_agent.steps.training import train_feddyn
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_feddyn import TrainFedDyn
from fedge.tensors.layers import Layers, make_reversible_layout
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, mixed_data, samples

ONE = Sgd(steps=1, batch_size=32, learning_rate=0.2, momentum=0.0)
DATA = mixed_data(samples(20, 1), samples(12, 2))
D = LAYOUT.n_params


@pytest.mark.parametrize("counted", [1, 2])
def test_the_worked_step(counted: int) -> None:
    """theta = theta_0 - rate (gradient - g), and g+ = g - alpha (theta - theta_0)."""
    now, before = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    action = TrainFedDyn(starts=(Start(model=Blobs().model(0)),), sgd=ONE, alpha=0.5, counted=counted)
    here = device(Path("unused"), action, data=DATA, seed=3)
    mine = Layers(make_reversible_layout(LAYOUT), pack_vector(now, before, 2, LAYOUT))
    learned = train_feddyn.learn(here, action, INITIAL, mine)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *DATA.shared, ONE, np.random.default_rng(3)).run(1)
    g = before if counted == 1 else now
    step = network.dump().params - INITIAL.params + 0.2 * g
    np.testing.assert_allclose(learned.model.params, INITIAL.params + step, atol=1e-5)
    assert learned.kept is not None
    kept = Layers(make_reversible_layout(LAYOUT), learned.kept)
    np.testing.assert_allclose(kept["now"], g - 0.5 * step, atol=1e-5)
    np.testing.assert_array_equal(kept["before"], g)


def test_the_larger_alpha_the_nearer_to_the_start() -> None:
    sgd = Sgd(steps=30, batch_size=8, learning_rate=0.05, momentum=0.0)
    moved = []
    for alpha in (0.01, 1.0, 10.0):
        action = TrainFedDyn(starts=(Start(model=Blobs().model(0)),), sgd=sgd, alpha=alpha)
        here = device(Path("unused"), action, data=DATA, seed=3)
        moved.append(np.linalg.norm(train_feddyn.learn(here, action, INITIAL, None).model.params - INITIAL.params))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.3 * moved[0]
