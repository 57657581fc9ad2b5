from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.methods.baselines.fedrod import FedRod
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.learning.evaluation import evaluate_model
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits

SETTINGS = MethodSettings(rounds=3, sgd=Sgd(steps=6), codec=Codec.FLOAT32, down="float32")


async def test_the_global_model_ignores_the_second_heads(tmp_path: Path) -> None:
    """It is the same where the heads learn from other labels: those of the sensitive samples."""
    models = []
    for turn in ("as it is", "other labels"):
        fleet, layout, first, _ = digits(tmp_path / turn, n=4, limit=400)
        for i in fleet.workers if turn == "other labels" else ():
            data = fleet.data(i)
            assert data.sensitive.any()
            fleet.give(i, replace(data, y_train=np.where(data.sensitive, 9 - data.y_train, data.y_train)))
        state = await run_rounds(FedRod(SETTINGS), FedRod(SETTINGS).init(layout, first), fleet)
        served = fleet.get(state.model, layout)
        models.append((state.model, fleet.workers["d00"].make_personal_model(served).params))
    assert models[0][0] == models[1][0]
    assert (models[0][1] != models[1][1]).any()


async def test_the_personal_prediction_fits_the_device_better_than_the_balanced_one(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=5, how="dirichlet", alpha=0.2)
    method = FedRod(MethodSettings(rounds=15, sgd=Sgd(steps=10), codec=Codec.FLOAT32, down="float32"))
    state = await run_rounds(method, method.init(layout, first), fleet)
    served = fleet.get(method.get_model(state, ""), layout)
    losses = np.array(
        [
            [evaluate_model(k, model).loss for model in (served, k.make_personal_model(served))]
            for k in fleet.workers.values()
        ]
    )
    assert (losses[:, 1] < losses[:, 0]).all()
