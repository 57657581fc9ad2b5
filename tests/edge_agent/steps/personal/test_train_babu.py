from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_agent.steps.personal.train_babu import train_base
from fedge.models.training import Network, Trainer
from fedge.steps.personal.train_babu import TrainBabu
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layout import BASE, HEAD
from tests.support.orders import INITIAL, LAYOUT, TASK, Blobs, device, device_data

SGD = Sgd(steps=6, batch_size=8)


def test_the_base_learns_as_beside_a_frozen_head_and_nothing_stays() -> None:
    data, n_base = device_data(30), LAYOUT.select(BASE).n_params
    action = TrainBabu(starts=(Start(model=Blobs().model(0, HEAD)),), sgd=SGD, personal=HEAD)
    learned = train_base(device(Path("unused"), action, data=data, seed=3), action, INITIAL)
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *data.shared, SGD, np.random.default_rng(3), moves="base").run(SGD.steps)
    np.testing.assert_array_equal(learned.model.params, network.dump().params)
    np.testing.assert_array_equal(learned.model.params[n_base:], INITIAL.params[n_base:])
    assert learned.kept is None
    assert action.select_kept(HEAD, LAYOUT) is None
