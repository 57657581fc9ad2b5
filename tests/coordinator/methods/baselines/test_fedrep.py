from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.methods.baselines.fedrep import FedRep
from coordinator.methods.settings import MethodSettings
from edge_agent.device.worker import Worker
from fedge.models.training import compute_loss_and_gradient_norm
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import BASE, HEAD, Codec, Model
from tests.support.simulation import digits


def loss(worker: Worker, model: Model) -> float:
    worker.network.load(model)
    return compute_loss_and_gradient_norm(worker.network, *worker.data.shared)[0]


async def test_without_steps_of_the_base_the_shared_part_stands_still_and_the_heads_learn(tmp_path: Path) -> None:
    """With sgd.steps = 0 only the head's phase is left, and it touches nothing that is shared."""
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    settings = MethodSettings(
        rounds=2, sgd=Sgd(steps=0), codec=Codec.FLOAT32, down="float32", options={"head_steps": 20}
    )
    method = FedRep(settings)
    state = method.init(layout, first)
    assert (method.personal, method.make_order(state).head_steps) == (HEAD, 20)
    losses = []
    for number in (1, 2):
        fleet.round = number
        state = await method.advance(state, fleet)
        served = fleet.get(state.whole, layout)
        losses.append(np.mean([loss(worker, worker.make_personal_model(served)) for worker in fleet.workers.values()]))
    n_base = layout.select(BASE).n_params
    np.testing.assert_array_equal(
        fleet.get(state.model, layout.select(BASE)).params, fleet.get(first, layout).params[:n_base]
    )
    assert losses[1] < losses[0]
