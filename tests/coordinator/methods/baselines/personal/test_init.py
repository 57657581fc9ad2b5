"""What every method of the room does, whatever it learns: no order among devices, one device, no answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.methods.catalogue import get_installed_methods, make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, predicted, rounds

NAMES = [name for name, point in get_installed_methods().items() if ".personal." in point.value]
SETTINGS = MethodSettings(rounds=2, sgd=Sgd(steps=4), codec=Codec.FLOAT32, down="float32")
every = pytest.mark.parametrize("name", NAMES)


@every
async def test_another_sequence_of_devices_gives_the_same_state_and_bundles(tmp_path: Path, name: str) -> None:
    states, said = [], []
    for turn in (1, -1):
        fleet, layout, first, _ = digits(tmp_path / str(turn), n=4, limit=300, method=name)
        fleet.workers = dict(list(fleet.workers.items())[::turn])
        method: Any = make_method(name, SETTINGS)
        states.append(await run_rounds(method, method.init(layout, first), fleet))
        said.append({i: predicted(worker, worker.data.x_val) for i, worker in fleet.workers.items()})
    assert encode_state(states[0]) == encode_state(states[1])
    assert set(states[0].installed) == set(said[0]) == set(said[1])
    for i, own in said[0].items():
        np.testing.assert_array_equal(own, said[1][i])


@every
async def test_a_device_alone_learns_and_a_round_without_answers_changes_nothing(tmp_path: Path, name: str) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=1, limit=200, sensitive=0.0, method=name)
    method: Any = make_method(name, MethodSettings(rounds=8, sgd=Sgd(steps=20)))
    fleet.unresponsive = frozenset(fleet.workers)
    state = await rounds(method, method.init(layout, first), fleet)
    assert (state.whole, state.participations, state.history[-1].answered) == (first, {}, 0)
    fleet.unresponsive = frozenset()
    state = await run_rounds(method, state, fleet)
    assert state.participations == {"d00": 7}
    (worker,) = fleet.workers.values()
    assert (predicted(worker, worker.data.x_train).argmax(axis=1) == worker.data.y_train).mean() > 0.7


@every
def test_noise_and_masks_are_refused_in_a_sentence(name: str) -> None:
    for guard, why in (("dp_noise", "do not combine|cannot have|noise"), ("masking", "sum")):
        protection = {"dp_noise": 1.0} if guard == "dp_noise" else {"masking": True}
        with pytest.raises(ConfigError, match=why):
            make_method(name, MethodSettings(protection=type(SETTINGS.protection)(**protection)))
