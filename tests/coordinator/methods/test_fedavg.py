"""FedAvg against a slow oracle, and what it does when devices are silent."""

import numpy as np

from coordinator.fleet.simulated import run
from coordinator.methods import MethodSettings, accepted, dump
from coordinator.methods.fedavg import FedAvg
from deploy import load as load_bundle
from fedge.messages import Codec, Sgd, Start, Train
from tests.support.simulation import digits

SETTINGS = MethodSettings(rounds=3, sgd=Sgd(steps=5), codec=Codec.FLOAT32)


async def test_a_round_is_the_mean_of_the_models_weighted_by_samples(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = FedAvg(SETTINGS)
    fleet.round = 1
    after = await method.round(method.initial(layout, first), fleet)

    start = fleet.get(first, layout).params.astype(np.float64)
    order = Train(starts=(Start(model=first),), sgd=SETTINGS.sgd, codec=Codec.FLOAT32)
    updates = accepted(await fleet.run("train", {device.id: order for device in fleet.devices()}))
    n = np.array([u.n_samples for u in updates.values()])
    trained = np.stack([start + fleet.get(u.update, layout).params for u in updates.values()])
    np.testing.assert_allclose(fleet.get(after.model, layout).params, n @ trained / n.sum(), atol=1e-6)
    assert len(set(n.tolist())) > 1
    assert after.participations == dict.fromkeys(updates, 1)


async def test_a_silent_round_changes_no_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.silent = frozenset(device.id for device in fleet.devices())
    after = await FedAvg(SETTINGS).round(FedAvg(SETTINGS).initial(layout, first), fleet)
    assert (after.round, after.model, after.participations) == (1, first, {})
    assert after.history[-1].answered == 0


async def test_a_round_with_too_few_reports_changes_no_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.silent = frozenset(["d00"])
    method = FedAvg(MethodSettings(rounds=3, min_reports=6))
    assert (await method.round(method.initial(layout, first), fleet)).model == first


async def test_equal_seeds_give_equal_states_and_a_bundle_of_the_global_model_on_each_device(tmp_path) -> None:
    states = []
    for turn in range(2):
        fleet, layout, first, _ = digits(tmp_path / str(turn))
        method = FedAvg(MethodSettings(rounds=3, participation=0.5, seed=7))
        states.append(await run(method, method.initial(layout, first), fleet))
    assert dump(states[0]) == dump(states[1])
    assert set(states[0].installed) == {f"d{i:02d}" for i in range(6)}
    assert {len(result.roles) for result in states[0].installed.values()} == {1}
    assert [r.asked for r in states[0].history] == [3, 3, 3]
    x = np.zeros((4, 1, 8, 8), np.float32)
    predictions = [
        load_bundle(tmp_path / "0" / f"d{i:02d}" / "bundles" / "1").predict(x).probabilities for i in range(6)
    ]
    for other in predictions[1:]:
        np.testing.assert_array_equal(predictions[0], other)
