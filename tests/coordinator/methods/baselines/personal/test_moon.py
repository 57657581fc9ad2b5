from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.personal.moon import Moon
from coordinator.methods.method import Method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from fedge.wire.messages import Role
from tests.support.simulation import digits, roles, rounds


def settings(**options: float) -> MethodSettings:
    return MethodSettings(rounds=3, sgd=Sgd(steps=6), codec=Codec.FLOAT32, down="float32", options=dict(options))


async def test_without_weight_it_is_fedavg_and_with_it_only_from_the_second_round_on_another(tmp_path: Path) -> None:
    found: list[list[np.ndarray]] = []
    methods: tuple[Method[Any], ...] = (FedAvg(settings()), Moon(settings(mu=0.0)), Moon(settings(mu=5.0)))
    for method in methods:
        fleet, layout, first, _ = digits(tmp_path / str(len(found)), n=3, limit=300)
        state = method.init(layout, first)
        models = []
        for _ in range(3):
            state = await rounds(method, state, fleet)
            models.append(fleet.get(state.model, layout).params)
        found.append(models)
    fedavg, weightless, moon = found
    np.testing.assert_allclose(weightless, fedavg, atol=1e-6)
    np.testing.assert_allclose(moon[0], fedavg[0], atol=1e-6)
    assert np.abs(moon[1] - fedavg[1]).max() > 1e-4


async def test_every_device_installs_the_global_model(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=300)
    method = Moon(settings())
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(roles(fleet, state).values()) == {(Role.GLOBAL,)}
