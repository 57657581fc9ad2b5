"""Devices that learn alone: budget, data, nothing sent, bundles."""

import math

import numpy as np
import pytest

from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import ModelState, decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.models.training import Network, Trainer
from fedge.steps.mixture.install import Install
from fedge.steps.sgd import Sgd
from tests.support.simulation import digits, predicted


@pytest.mark.parametrize(
    ("rounds", "participation", "budget"), [(30, 1.0, 300), (30, 0.25, 75), (1, 0.01, 1), (0, 1.0, 1), (3, 0.55, 16)]
)
async def test_the_budget_is_what_a_device_would_have_had(tmp_path, rounds, participation, budget) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=2, limit=60)
    method = make_method("local", MethodSettings(rounds=rounds, participation=participation, sgd=Sgd(steps=10)))
    await method.advance(method.init(layout, first), fleet)
    assert {action.fine_tune.checkpoints for action in fleet.sent(Install).values()} == {(budget,)}


async def test_passes_over_a_devices_own_samples_give_each_its_own_budget(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=120)
    method = make_method("local", MethodSettings(rounds=4, sgd=Sgd(epochs=2, batch_size=8)))
    await method.advance(method.init(layout, first), fleet)
    expected = [4 * math.ceil(2 * device.n_samples / 8) for device in fleet.get_devices()]
    assert [action.fine_tune.checkpoints for action in fleet.sent(Install).values()] == [(steps,) for steps in expected]


async def test_a_device_whose_samples_are_all_sensitive_takes_a_batch_in_each_pass(tmp_path) -> None:
    """It says 0 samples; with one step alone it would be no baseline."""
    fleet, layout, first, _ = digits(tmp_path, n=2, limit=60, sensitive=1.0)
    method = make_method("local", MethodSettings(rounds=4, sgd=Sgd(epochs=2, batch_size=8)))
    await method.advance(method.init(layout, first), fleet)
    assert [device.n_samples for device in fleet.get_devices()] == [0, 0]
    assert {action.fine_tune.checkpoints for action in fleet.sent(Install).values()} == {(4 * 2,)}


async def test_every_device_installs_what_it_learned_from_all_its_samples_and_sends_nothing(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = make_method("local", MethodSettings(rounds=5, sgd=Sgd(steps=10)))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert sorted(state.installed) == [device.id for device in fleet.get_devices()]
    assert method.is_done(state)
    assert state.participations == {}
    assert fleet.bytes_up == 0
    for worker in fleet.workers.values():
        data = worker.data
        x = data.x_train
        found = predicted(worker, x)
        right = found.argmax(axis=1) == data.y_train
        assert right[data.sensitive].mean() > 0.8
        network = Network(worker.task)
        network.load(fleet.get(first, layout))
        trainer = Trainer(network, x, data.y_train, Sgd(), np.random.default_rng(0))
        trainer.run(50)
        alike = (network.compute_logits(network.dump(), x).argmax(axis=1) == found.argmax(axis=1)).mean()
        assert alike > 0.9
    assert decode_state(encode_state(state), ModelState) == state


async def test_an_unresponsive_device_has_no_bundle(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=90)
    fleet.unresponsive = frozenset(["d01"])
    method = make_method("local", MethodSettings(rounds=1))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert sorted(state.installed) == ["d00", "d02"]


@pytest.mark.parametrize("method", ["local", "fedge", "pm-moe", "scmoe-pfl"])
def test_fine_tuning_is_refused_by_name_where_it_would_do_nothing(method: str) -> None:
    with pytest.raises(ConfigError, match=r"\+ft"):
        make_method(f"{method}+ft", MethodSettings())


def test_a_fedge_of_one_shared_model_can_be_fine_tuned() -> None:
    assert make_method("fedge+ft", MethodSettings(options={"mode": "shift"})).settings.fine_tune
