"""What all methods share whose devices keep something: the battery runs over each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.fedper import FedPer
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.catalogue import make_method
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from edge_agent.learning.evaluation import fit_own_offset
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model
from fedge.steps.contract import Declined, Failed
from fedge.steps.mixture.install import Install
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train, Trained
from fedge.steps.training.train_ditto import TrainDitto
from fedge.tasks import load_task
from fedge.tensors.layout import BASE, HEAD, Codec, Layout, TensorInfo
from fedge.wire.messages import BlobRef, Role, iterate_blobs
from tests.support.simulation import Fleet, digits, predicted, roles, rounds
from tests.support.tables import calibrated

NAMES = ("apfl", "dbe", "ditto", "fedper", "fedrep", "fedrod", "lg-fedavg", "pfedme")
WHOLE = {"apfl", "ditto", "pfedme"}
"""Those whose devices keep a whole network."""
every = pytest.mark.parametrize("name", NAMES)


def settings(rounds: int = 3, **changes: Any) -> MethodSettings:
    return MethodSettings(
        **({"rounds": rounds, "sgd": Sgd(steps=4), "codec": Codec.FLOAT32, "down": "float32"} | changes)
    )


def federation(home: Path, name: str, **changes: Any) -> tuple[Fleet, Layout, PersonalLayers[Any], PersonalState]:
    fleet, layout, first, _ = digits(home, n=5, limit=400)
    method: Any = make_method(name, settings(**changes))
    return fleet, layout, method, method.init(layout, first)


@every
async def test_runs_to_bundles_that_predict_what_torch_does(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name)
    state = await run_rounds(method, state, fleet)
    assert method.is_done(state)
    assert set(state.installed) == {f"d{i:02d}" for i in range(5)}
    for i in state.installed:
        assert roles(fleet, state)[i] == (Role.PRIVATE,)
        device = fleet.workers[i]
        served = fleet.get(method.get_model(state, i), layout)
        found = device.network.compute_logits(device.make_personal_model(served), device.data.x_val)
        expected = np.exp(calibrated(found, fit_own_offset(device, served)))
        np.testing.assert_allclose(predicted(device, device.data.x_val), expected, atol=1e-4)
        alone = device.network.compute_logits(served, device.data.x_val)
        assert np.abs(found - alone).max() > 1e-3  # what it kept matters
    assert [(r.asked, r.answered) for r in state.history] == [(5, 5)] * 3
    assert method.summarise(state)["method"] == name


@every
async def test_equal_seeds_give_equal_states_also_through_dump_and_load(tmp_path: Path, name: str) -> None:
    one, _, method, state = federation(tmp_path / "1", name, participation=0.6, seed=7)
    whole = await run_rounds(method, state, one)
    two, _, method, state = federation(tmp_path / "2", name, participation=0.6, seed=7)
    while not method.is_done(state):
        state = await rounds(method, decode_state(encode_state(state), type(state)), two)
        two.remove_others({ref.digest for ref in iterate_blobs(state)})
    assert encode_state(state) == encode_state(whole)
    assert [r.asked for r in whole.history] == [3, 3, 3]


@every
async def test_what_travels_is_the_part_alone_and_what_is_private_never_does(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name)
    part = {t.name for t in layout.without(method.personal).tensors}
    while not method.is_done(state):
        before, first = len(fleet.orders), state.initial
        state = await rounds(method, state, fleet)
        for _, _, _, action in fleet.orders[before:]:
            if isinstance(action, Train):
                (start,) = action.starts
                assert set(fleet.get_tensors(start.model)) == part
                assert action.personal == method.personal
                assert action.initial == (first if method.personal else None)
            if isinstance(action, Install):
                assert set(fleet.get_tensors(action.model)) == part
                assert (action.personal, action.kept_by) == (method.personal, method.find_kept_step(state))
    sent = [answer.result for answer in fleet.heard if answer.result is not None]
    blobs = [ref for result in sent for ref in iterate_blobs(result) if isinstance(result, Trained)]
    assert len(blobs) == 15
    assert sum(1 for result in sent for _ in iterate_blobs(result)) == 15  # nothing else carries tensors
    for ref in blobs:
        assert set(fleet.get_tensors(ref)) == part


@every
async def test_the_shared_part_is_the_mean_of_the_parts_weighted_by_samples(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name)
    for _ in range(2):
        state = await rounds(method, state, fleet)
    fleet.heard.clear()
    part = layout.without(method.personal)
    start = fleet.get(state.model, part).params.astype(np.float64)
    after = await rounds(method, state, fleet)
    updates = select_updates({a.device_id: a for a in fleet.heard})
    n = np.array([u.n_samples for u in updates.values()])
    parts = np.stack([start + fleet.get(u.update, part).params for u in updates.values()])
    np.testing.assert_allclose(fleet.get(after.model, part).params, n @ parts / n.sum(), atol=1e-6)
    assert len(set(n.tolist())) > 1


@every
async def test_what_is_served_is_the_initial_model_with_the_shared_part_over_it(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name)
    first = fleet.get_tensors(state.initial)
    assert method.get_model(state, "d00") == state.initial
    state = await rounds(method, state, fleet)
    served, shared = fleet.get_tensors(method.get_model(state, "d00")), fleet.get_tensors(state.model)
    assert set(shared) == {t.name for t in layout.without(method.personal).tensors}
    for tensor, value in served.items():
        np.testing.assert_array_equal(value, shared.get(tensor, first[tensor]))


@every
async def test_an_unresponsive_round_changes_no_model(tmp_path: Path, name: str) -> None:
    fleet, _, method, state = federation(tmp_path, name)
    state = await rounds(method, state, fleet)
    fleet.unresponsive = frozenset(fleet.workers)
    after = await rounds(method, state, fleet)
    assert (after.model, after.whole, after.round) == (state.model, state.whole, 2)
    fleet.unresponsive = frozenset(["d00", "d01"])
    strict: Any = make_method(name, settings(min_reports=4))
    after = await rounds(strict, state, fleet)
    assert (after.model, after.whole, after.history[-1].answered) == (state.model, state.whole, 3)


@every
async def test_a_device_that_comes_late_goes_away_or_never_trains_ends_with_a_bundle(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name, rounds=4)
    fleet.absent, fleet.unresponsive = frozenset(["d00"]), frozenset(["d04"])
    for _ in range(2):
        state = await rounds(method, state, fleet)
    fleet.absent = frozenset(["d01"])  # d00 has come, d01 has gone
    for _ in range(2):
        state = await rounds(method, state, fleet)
    fleet.absent = fleet.unresponsive = frozenset()
    state = await rounds(method, state, fleet)
    assert state.participations == {"d00": 2, "d01": 2, "d02": 4, "d03": 4}
    assert set(state.installed) == set(fleet.workers)
    for i, device in fleet.workers.items():
        served = fleet.get(method.get_model(state, i), layout)
        mine = device.make_personal_model(served)
        assert (mine is served) == (i == "d04")  # it kept nothing: the initial model stands in
        found = device.network.compute_logits(mine, device.data.x_val)
        expected = np.exp(calibrated(found, fit_own_offset(device, mine)))
        np.testing.assert_allclose(predicted(device, device.data.x_val), expected, atol=1e-4)


@every
async def test_refusals_failures_and_updates_of_nothing_count_as_absent(tmp_path: Path, name: str) -> None:
    fleet, _, method, state = federation(tmp_path, name)
    state = await rounds(method, state, fleet)

    def some_fail(step: str, answers: dict[str, Answer]) -> None:
        if step != "train":
            return
        nothing = answers["d02"].result
        assert isinstance(nothing, Trained)
        changed = {"d00": Declined(reason="hot"), "d01": Failed(reason="disk"), "d03": None}
        answers.update({i: Answer(i, result) for i, result in changed.items()})

    fleet.change = some_fail
    after = await rounds(method, state, fleet)
    assert (after.history[-1].asked, after.history[-1].answered) == (5, 2)
    assert after.participations["d00"] == 1
    assert after.participations["d02"] == 2
    assert after.model != state.model


@every
async def test_without_rounds_the_initial_model_is_installed(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, name, rounds=0)
    state = await run_rounds(method, state, fleet)
    device = fleet.workers["d00"]
    first = fleet.get(state.initial, layout)
    found = device.network.compute_logits(first, device.data.x_val)
    expected = np.exp(calibrated(found, fit_own_offset(device, first)))
    np.testing.assert_allclose(predicted(device, device.data.x_val), expected, atol=1e-4)


@every
async def test_fine_tuning_starts_from_what_the_device_uses(tmp_path: Path, name: str) -> None:
    fleet, layout, method, state = federation(tmp_path, f"{name}+ft")
    state = await run_rounds(method, state, fleet)
    tuned = fleet.sent(Install).values()
    assert all(action.fine_tune is not None and action.kept_by == method.find_kept_step(state) for action in tuned)
    losses = {}
    for i, device in fleet.workers.items():
        x, y = device.data.x_val, device.data.y_val
        mine = device.make_personal_model(fleet.get(method.get_model(state, i), layout))
        found = calibrated(device.network.compute_logits(mine, x), fit_own_offset(device, mine))
        before = -found[np.arange(len(y)), y].mean()
        losses[i] = -np.log(predicted(device, x)[np.arange(len(y)), y]).mean() - before
    assert max(losses.values()) < 1e-4  # 0 steps compete: it never gets worse on the validation samples
    assert min(losses.values()) < -0.01


@pytest.mark.parametrize("name", sorted({*NAMES} - WHOLE))
def test_a_network_without_a_head_is_refused_before_the_first_round_if_it_is_to_be_split(name: str) -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(3, 3)), TensorInfo(name="g", shape=(3,))))
    method: Any = make_method(name, settings())
    with pytest.raises(ConfigError, match="last layer"):
        method.init(layout, None)


class Everything(FedPer):
    """FedPer with nothing private."""

    personal = ()


async def test_with_nothing_private_it_is_fedavg(tmp_path: Path) -> None:
    one, layout, first, _ = digits(tmp_path / "1", n=5, limit=400)
    two, _, _, _ = digits(tmp_path / "2", n=5, limit=400)
    given = settings(participation=0.6)
    fedavg = await run_rounds(FedAvg(given), FedAvg(given).init(layout, first), one)
    keeping = await run_rounds(Everything(given), Everything(given).init(layout, first), two)
    assert keeping.model == keeping.whole == fedavg.model
    assert (keeping.history, keeping.participations) == (fedavg.history, fedavg.participations)
    x = np.random.default_rng(0).random((9, 1, 8, 8), np.float32)
    for i in fedavg.installed:
        np.testing.assert_array_equal(predicted(one.workers[i], x), predicted(two.workers[i], x))


async def test_bytes_up_are_those_of_the_part(tmp_path: Path) -> None:
    """Digits, 64-32-10: the base has 2,080 numbers, the head 330."""
    up = {}
    for name in ("fedper", "lg-fedavg", "ditto"):
        fleet, _, method, state = federation(tmp_path / name, name, rounds=2)
        await run_rounds(method, state, fleet)
        up[name] = fleet.bytes_up
    headers = 10 * 300
    assert 10 * 4 * 2080 < up["fedper"] < 10 * 4 * 2080 + headers
    assert 10 * 4 * 330 < up["lg-fedavg"] < 10 * 4 * 330 + headers
    assert 10 * 4 * 2410 < up["ditto"] < 10 * 4 * 2410 + headers


async def test_the_initial_model_travels_once_to_each_device(tmp_path: Path) -> None:
    fleet, _, method, state = federation(tmp_path, "lg-fedavg", rounds=4)
    await run_rounds(method, state, fleet)
    whole, part = 4 * 2410, 4 * 330
    assert 5 * (whole + 5 * part) < fleet.bytes_down < 5 * (whole + 5 * part) + 30 * 400


@pytest.mark.parametrize(
    ("name", "option", "good", "bad"),
    [
        ("ditto", "proximal_lambda", 0.0, -0.1),
        ("fedrep", "head_steps", 3, 0),
        ("dbe", "kappa", 50.0, -1.0),
        ("fedper", "selection", "fastest", "best"),
    ],
)
def test_options(name: str, option: str, good: Any, bad: Any) -> None:
    make_method(name, settings(options={option: good}))
    with pytest.raises(ConfigError):
        make_method(name, settings(options={option: bad}))
    with pytest.raises(ConfigError, match="no option"):
        make_method(name, settings(options={option + "s": good}))


def test_defaults_are_those_of_the_specification() -> None:
    layout = make_initial_model(load_task("digits"), 0)[0]

    def order(name: str) -> Train:
        method: Any = make_method(name, settings())
        return method.make_order(method.init(layout, BlobRef(digest="0" * 64, size_bytes=1)))  # type: ignore[no-any-return]

    ditto = order("ditto")
    assert isinstance(ditto, TrainDitto)
    assert ditto.proximal_lambda == 0.1
    assert (order("fedper").personal, order("fedper").head_steps) == (HEAD, 0)
    assert (order("lg-fedavg").personal, order("lg-fedavg").head_steps) == (BASE, 0)
    assert (order("fedrep").personal, order("fedrep").head_steps) == (HEAD, 10)
