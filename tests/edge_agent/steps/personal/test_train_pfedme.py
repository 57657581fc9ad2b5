from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_agent.steps.personal.train_pfedme import train_models
from fedge.models.training import Network, Trainer
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layout import Model
from tests.support.orders import INITIAL, TASK, Blobs, device, device_data

DATA = device_data(30)


def learn(steps: int, k: int, tie: float = 5.0, eta: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    sgd = Sgd(steps=steps, batch_size=64, learning_rate=0.02, momentum=0.0)
    action = TrainPFedMe(
        starts=(Start(model=Blobs().model(0)),), sgd=sgd, inner_steps=k, moreau_lambda=tie, outer_rate=eta
    )
    learned = train_models(device(Path("unused"), action, data=DATA, seed=3), action, INITIAL)
    assert learned.kept is not None
    return learned.model.params, learned.kept.params


def gradient_at(params: np.ndarray) -> np.ndarray:
    network = Network(TASK)
    network.load(Model(params, INITIAL.buffers, INITIAL.counters))
    Trainer(network, *DATA.shared, Sgd(learning_rate=1.0, momentum=0.0, batch_size=64), np.random.default_rng(0)).run(1)
    return params - network.dump().params


def test_two_rounds_by_hand() -> None:
    """All samples are one batch: K = 2 steps of theta towards w, then w towards theta; theta goes on where it was."""
    w = theta = INITIAL.params
    for _ in range(2):
        for _ in range(2):
            theta = theta - 0.02 * (gradient_at(theta) + 5.0 * (theta - w))
        w = w - 0.1 * 5.0 * (w - theta)
    found, kept = learn(2, 2)
    np.testing.assert_allclose(kept, theta, atol=1e-5)
    np.testing.assert_allclose(found, w, atol=1e-5)


def test_the_tie_holds_theta_near_the_shared_model() -> None:
    distances = [float(np.linalg.norm(np.subtract(*learn(6, 5, tie, 0.01)))) for tie in (0.1, 5.0, 40.0)]
    assert distances == sorted(distances, reverse=True)
