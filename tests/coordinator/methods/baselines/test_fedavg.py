"""FedAvg against a slow oracle, and what it does when devices are unresponsive."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coordinator.methods.baselines.fedavg import FedAvg, FedAvgState
from coordinator.methods.catalogue import make_method
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from deploy import load as load_bundle
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, predicted, roles

SETTINGS = MethodSettings(rounds=3, sgd=Sgd(steps=5), codec=Codec.FLOAT32, down="float32")


async def test_a_round_is_the_mean_of_the_models_weighted_by_samples(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = FedAvg(SETTINGS)
    fleet.round = 1
    after = await method.advance(method.init(layout, first), fleet)

    start = fleet.get(first, layout).params.astype(np.float64)
    order = Train(starts=(Start(model=first),), sgd=SETTINGS.sgd, codec=Codec.FLOAT32)
    updates = select_updates(await fleet.run("train", {device.id: order for device in fleet.get_devices()}))
    n = np.array([u.n_samples for u in updates.values()])
    trained = np.stack([start + fleet.get(u.update, layout).params for u in updates.values()])
    np.testing.assert_allclose(fleet.get(after.model, layout).params, n @ trained / n.sum(), atol=1e-6)
    assert len(set(n.tolist())) > 1
    assert after.participations == dict.fromkeys(updates, 1)


async def test_an_unresponsive_round_changes_no_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.unresponsive = frozenset(device.id for device in fleet.get_devices())
    after = await FedAvg(SETTINGS).advance(FedAvg(SETTINGS).init(layout, first), fleet)
    assert (after.round, after.model, after.participations) == (1, first, {})
    assert after.history[-1].answered == 0


async def test_a_round_with_too_few_reports_changes_no_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.unresponsive = frozenset(["d00"])
    method = FedAvg(MethodSettings(rounds=3, min_reports=6))
    assert (await method.advance(method.init(layout, first), fleet)).model == first


async def test_equal_seeds_give_equal_states_and_a_bundle_of_the_global_model_on_each_device(tmp_path) -> None:
    states = []
    for turn in range(2):
        fleet, layout, first, _ = digits(tmp_path / str(turn))
        method = FedAvg(MethodSettings(rounds=3, participation=0.5, seed=7))
        states.append(await run_rounds(method, method.init(layout, first), fleet))
    assert encode_state(states[0]) == encode_state(states[1])
    assert set(states[0].installed) == {f"d{i:02d}" for i in range(6)}
    assert {len(found) for found in roles(fleet, states[1]).values()} == {1}
    assert [r.asked for r in states[0].history] == [3, 3, 3]
    x = np.zeros((4, 1, 8, 8), np.float32)
    predictions = [
        load_bundle(tmp_path / "0" / f"d{i:02d}" / "bundles" / "1").predict(x).probabilities for i in range(6)
    ]
    for other in predictions[1:]:
        np.testing.assert_array_equal(predictions[0], other)


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedprox"])
async def test_every_variant_ends_fine_tuned_if_it_is_asked_to(tmp_path, name) -> None:
    """The bundle is at least as good on the device's validation samples as the global model."""
    fleet, layout, first, _ = digits(tmp_path)
    method = make_method(f"{name}+ft", SETTINGS)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert sorted(state.installed) == [device.id for device in fleet.get_devices()]
    assert method.summarise(state)["method"] == f"{name}+ft"
    gains = []
    for worker in fleet.workers.values():
        x, y = worker.data.validation
        tuned = predicted(worker, x)
        before = loss(worker.network.compute_logits(fleet.get(state.model, layout), x), y)
        gains.append(before + np.log(tuned[range(len(y)), y]).mean())
    assert min(gains) > -1e-4
    assert max(gains) > 0.1


def loss(found: np.ndarray, y: np.ndarray) -> float:
    shifted = found - found.max(axis=1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(axis=1)) - shifted[range(len(y)), y]).mean())


async def test_the_fastest_are_asked_again_and_again(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    speed = {f"d{i:02d}": seconds for i, seconds in enumerate([5.0, 1.0, 4.0, 0.5, 3.0, 2.0])}
    fleet._hardware = {i: replace(own, latency_s=speed[i]) for i, own in fleet._hardware.items()}
    method = make_method("fedavg", MethodSettings(rounds=4, participation=0.5, options={"selection": "fastest"}))
    state = await run_rounds(method, method.init(layout, first), fleet)
    # by clock the last three are the quickest (1 to 6 GHz); then what they took counts: 0.5, 3 and 2 s. The median of
    # 0.5 * 4, 3 * 5 and 2 * 6 is 12 cycles, so the others would need 12 / f >= 4 s: nobody else is ever tried.
    assert state.participations == {"d03": 4, "d04": 4, "d05": 4}
    assert state.seconds == {"d03": 0.5, "d04": 3.0, "d05": 2.0}


async def test_a_fast_device_that_stops_answering_is_replaced(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.unresponsive = frozenset(["d05"])
    method = make_method("fedavg", MethodSettings(rounds=2, participation=0.5, options={"selection": "fastest"}))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.seconds["d05"] == math.inf
    assert decode_state(encode_state(state), FedAvgState) == state
    # every other answer took no time; the lowest ids win
    assert "d05" not in state.participations
    assert [line.answered for line in state.history] == [2, 3]


def test_an_unknown_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="option of the method"):
        make_method("fedavg", MethodSettings(options={"selection": "slowest"}))


async def test_clocks_and_times_leave_no_trace_where_nobody_asks_for_the_fastest(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet._hardware = {i: replace(own, latency_s=2.5) for i, own in fleet._hardware.items()}
    method = make_method("fedavg", SETTINGS)
    fleet.round = 1
    assert (await method.advance(method.init(layout, first), fleet)).seconds == {}
