from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.methods.baselines.lg_fedavg import LgFedAvg
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import BASE, HEAD, Codec
from tests.support.simulation import digits


async def test_all_devices_have_one_head_and_each_a_base_of_its_own(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = LgFedAvg(MethodSettings(rounds=2, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32"))
    state = await run_rounds(method, method.init(layout, first), fleet)
    models = [
        worker.make_personal_model(fleet.get(method.get_model(state, i), layout)) for i, worker in fleet.workers.items()
    ]
    n_base = layout.select(BASE).n_params
    heads = [model.params[n_base:] for model in models]
    for head in heads:
        np.testing.assert_array_equal(head, fleet.get(state.model, layout.select(HEAD)).params)
    bases = [model.params[:n_base] for model in models]
    assert all((bases[0] != other).any() for other in bases[1:])
