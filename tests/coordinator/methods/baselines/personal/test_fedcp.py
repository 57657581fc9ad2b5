"""FedCP and GPFL, which both put a module of their own into the place of the network's head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.methods.baselines.personal.fedcp import FedCp
from coordinator.methods.baselines.personal.gpfl import Gpfl
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from fedge.steps.sgd import Sgd
from fedge.tensors.layers import cut
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, predicted, rounds

pytestmark = pytest.mark.parametrize("kind", [FedCp, Gpfl], ids=lambda kind: kind.name)


async def test_a_round_is_the_mean_of_what_travels_and_own_heads_stay(
    tmp_path: Path, kind: type[FedCp] | type[Gpfl]
) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=300, method=kind.name)
    method = kind(MethodSettings(sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32"))
    state = await rounds(method, method.init(layout, first), fleet)
    travels = layout.without(kind.personal)
    updates = select_updates({answer.device_id: answer for answer in fleet.heard})
    changes = [fleet.get(update.update, travels).params for update in updates.values()]
    shares = [update.n_samples for update in updates.values()]
    start = cut(fleet.get(first, layout), layout, travels).params
    moved = fleet.get(state.model, travels).params
    np.testing.assert_allclose(moved, start + np.average(changes, axis=0, weights=shares), atol=1e-6)


async def test_devices_learn_their_own_classes(tmp_path: Path, kind: type[FedCp] | type[Gpfl]) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=800, how="dirichlet", alpha=0.2, method=kind.name)
    method = kind(MethodSettings(rounds=8, sgd=Sgd(steps=10)))
    state = await rounds(method, method.init(layout, first), fleet, 9)
    assert set(state.installed) == set(fleet.workers)
    right = [
        (predicted(worker, worker.data.x_val).argmax(axis=1) == worker.data.y_val).mean()
        for worker in fleet.workers.values()
    ]
    assert np.mean(right) > 0.7
