from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.methods.baselines.personal.pfedme import PFedMe
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.tasks import load_task
from fedge.tensors.layout import Model
from fedge.wire.messages import BlobRef
from tests.support.simulation import digits, predicted


def accuracy(network: Network, model: Model, worker: Worker) -> float:
    x, y = worker.data.validation
    return float((network.compute_logits(model, x).argmax(axis=1) == y).mean())


@pytest.mark.statistical
async def test_personal_models_ahead_of_the_global_one(tmp_path: Path) -> None:
    """Dirichlet 0.1, 20 devices, 30 rounds, seed 0, on test samples: 96.0 against 91.2 per cent."""
    fleet, layout, first, _ = digits(tmp_path, n=12, how="dirichlet", alpha=0.1, sensitive=0.0)
    method = PFedMe(MethodSettings(rounds=10))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert len(state.installed) == 12
    network, w = Network(fleet.task), fleet.get(state.model, layout)
    shared = np.mean([accuracy(network, w, worker) for worker in fleet.workers.values()])
    personal = np.mean([accuracy(network, worker.make_personal_model(w), worker) for worker in fleet.workers.values()])
    assert personal > shared + 0.02
    worker = fleet.workers["d00"]
    own = network.compute_logits(worker.make_personal_model(w), worker.data.x_val)
    installed = predicted(worker, worker.data.x_val)
    assert (own.argmax(axis=1) == installed.argmax(axis=1)).all(), "the bundle predicts with theta"


def test_its_options_reach_the_devices() -> None:
    layout = make_initial_model(load_task("digits"), 0)[0]
    method = PFedMe(MethodSettings(options={"inner_steps": 3, "moreau_lambda": 2.0}))
    order = method.make_order(method.init(layout, BlobRef(digest="0" * 64, size_bytes=1)))
    assert isinstance(order, TrainPFedMe)
    assert (order.inner_steps, order.moreau_lambda, order.outer_rate) == (3, 2.0, 0.05)
    with pytest.raises(ConfigError):
        PFedMe(MethodSettings(options={"moreau_lambda": 0.0}))
