"""One device's round of SCAFFOLD by hand; the federation is in tests/coordinator/methods/baselines/shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.reversible import pack_vector
from edge_agent.steps.training import train_scaffold
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_scaffold import TrainScaffold
from fedge.tensors.layers import Layers, make_reversible_layout, select_params
from fedge.tensors.layout import Model, unflatten
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, mixed_data, samples

ONE = Sgd(steps=1, batch_size=32, learning_rate=0.2, momentum=0.0)
DATA = mixed_data(samples(20, 1), samples(12, 2))
D = LAYOUT.n_params


@pytest.mark.parametrize("counted", [1, 2])
def test_the_worked_step(counted: int) -> None:
    """y = x - rate (g - c_i + c) and c_i+ = c_i - c + (x - y) / rate = g: the gradient itself."""
    rng = np.random.default_rng(0)
    c, now, before = rng.normal(size=(3, D)).astype(np.float32)
    blobs, part = Blobs(), select_params(LAYOUT)
    control = blobs.put(unflatten(Model(c, np.zeros(0, np.float32), np.zeros(0, np.int64)), part))
    action = TrainScaffold(starts=(Start(model=blobs.model(0)),), sgd=ONE, control=control, counted=counted)
    here = device(Path("unused"), action, blobs, data=DATA, seed=3)
    mine = Layers(make_reversible_layout(LAYOUT), pack_vector(now, before, 2, LAYOUT))
    learned = train_scaffold.learn(here, action, INITIAL, mine)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *DATA.shared, ONE, np.random.default_rng(3)).run(1)
    gradient = (INITIAL.params - network.dump().params) / 0.2
    c_i = before if counted == 1 else now
    np.testing.assert_allclose(learned.model.params, INITIAL.params - 0.2 * (gradient - c_i + c), atol=1e-5)
    assert learned.kept is not None
    kept = Layers(make_reversible_layout(LAYOUT), learned.kept)
    np.testing.assert_allclose(kept["now"], gradient, atol=1e-4)
    np.testing.assert_array_equal(kept["before"], c_i)
    assert set(learned.report) == {"control"}


def test_without_a_server_variate_both_begin_at_zero() -> None:
    """As in round 1, or when a class has joined, whatever the device has kept."""
    action = TrainScaffold(starts=(Start(model=Blobs().model(0)),), sgd=ONE)
    ones = np.ones(D, np.float32)
    mine = Layers(make_reversible_layout(LAYOUT), pack_vector(ones, ones, 2, LAYOUT))
    plain, kept = (
        train_scaffold.learn(device(Path("unused"), action, data=DATA, seed=3), action, INITIAL, own)
        for own in (None, mine)
    )
    np.testing.assert_array_equal(plain.model.params, kept.model.params)
