"""The default method on real workers: docs/methods/fedge.md, section 16, as far as it lives in the method."""

import dataclasses
import json

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from benchmarks import default_method
from coordinator.fleet.fleet import require_sendable
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.papers import fedge as module
from coordinator.methods.papers import fedge_groups, fedge_mixture
from coordinator.methods.papers.fedge import Fedge, train_experts, train_shared
from coordinator.methods.papers.fedge_experts import list_offered_experts, list_starts
from coordinator.methods.papers.fedge_groups import group_devices, is_outdated
from coordinator.methods.papers.fedge_state import FedgeState, PrimaryExpert, TrialOutcome
from coordinator.methods.parts.asynchronous import compute_discount
from coordinator.methods.parts.grouping import Description
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.selection import ccmab
from coordinator.simulation.reports.outcome import RunOutcome
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from coordinator.store.records import Device
from edge_agent.device.worker import Worker
from edge_agent.learning.candidates import FittedModels
from edge_agent.learning.evaluation import fit_final_offset
from edge_agent.steps.descriptions.describe_labels import compute_label_feature
from fedge.bundle.manifest import read_bundle
from fedge.errors import ConfigError
from fedge.steps.mixture.fit_candidates import CandidatesFitted
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Codec, Layout, Model, TensorInfo, flatten, from_bytes, unflatten
from fedge.wire.messages import Role
from tests.support.simulation import Fleet, digits, manifests, predicted, rounds
from tests.support.simulation import roles as roles_of
from tests.support.tables import calibrated

BOUND = 11
"""Rounds within which every reachable device is asked: F + ceil(N_k / ceil(m/4)) + 1 (FedEPC section 5.5), N_k <= 6."""
EXACT = MethodSettings(rounds=10, sgd=Sgd(steps=5), codec=Codec.FLOAT32, down="float32")


def with_clusters(state: FedgeState, fleet: Fleet, *clusters: tuple[str, ...]) -> FedgeState:
    """The state after a split into these clusters."""
    trial = TrialOutcome(
        ids=tuple(sorted({i for cluster in clusters for i in cluster})),
        clusters=clusters,
        tau=0.5,
        separability=0.9,
        statistic=2.0,
        deltas={},
        split=True,
    )
    return msgspec.structs.replace(
        state, trial=trial, experts=tuple(ServerModel(model=state.shared.model) for _ in clusters)
    )


# ---------------------------------------------------------------------------------------------- shared rounds


async def test_without_momentum_and_split_the_model_is_fedavgs_bit_for_bit(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    plain = Fedge(msgspec.structs.replace(EXACT, options={"gamma": 0.0}))
    ours = await rounds(plain, plain.init(layout, first), fleet, 3)
    theirs = await rounds(FedAvg(EXACT), FedAvg(EXACT).init(layout, first), fleet, 3)
    assert ours.shared.model == theirs.model


async def test_momentum_adds_half_of_the_last_step(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(EXACT)
    one = await rounds(method, method.init(layout, first), fleet, 1)
    two = await rounds(method, one, fleet, 1)
    w0, w1, w2 = (fleet.get(ref, layout).params for ref in (first, one.shared.model, two.shared.model))
    fleet.unresponsive = frozenset()
    plain = await rounds(
        FedAvg(EXACT), msgspec.structs.replace(FedAvg(EXACT).init(layout, one.shared.model), round=1), fleet, 1
    )
    mean_change = fleet.get(plain.model, layout).params - w1
    np.testing.assert_allclose(w2 - w1, mean_change + 0.5 * (w1 - w0), atol=1e-6)


async def test_an_unresponsive_round_changes_neither_model_nor_velocity(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(EXACT)
    before = await rounds(method, method.init(layout, first), fleet, 2)
    fleet.unresponsive = frozenset(device.id for device in fleet.get_devices())
    assert (await rounds(method, before, fleet, 1)).shared == before.shared


async def test_own_class_means_are_asked_for_from_the_second_round_on(tmp_path) -> None:
    """Section 4.1: not in the first, whose model knows nothing, nor without a head; by default with convolutions."""
    _, layout, first, _ = digits(tmp_path, n=4, limit=160)

    def asked(method: Fedge, layout: Layout) -> list[object]:
        state = method.init(layout, first)
        return [method._make_order(state, "d00", r, measure=False).class_means for r in (1, 2, 9)]

    drawn = Fedge(msgspec.structs.replace(EXACT, options={"class_means": 0.1}))
    assert asked(drawn, layout) == [UNSET, 0.1, 0.1]
    assert asked(Fedge(EXACT), layout) == [UNSET] * 3
    kernel = TensorInfo(name="conv", shape=(4, 1, 3, 3), layer="conv")
    convolutional = Layout(tensors=(kernel, *layout.tensors))
    assert asked(Fedge(EXACT), convolutional) == [UNSET, 0.1, 0.1]
    mean = TensorInfo(name="norm.running_mean", shape=(4,), layer="norm", kind="buffer")
    assert asked(Fedge(EXACT), Layout(tensors=(*convolutional.tensors, mean))) == [UNSET] * 3
    assert asked(Fedge(msgspec.structs.replace(EXACT, options={"class_means": 0})), convolutional) == [UNSET] * 3
    headless = Layout(tensors=tuple(msgspec.structs.replace(info, layer="") for info in layout.tensors))
    assert asked(drawn, headless) == [UNSET] * 3


# -------------------------------------------------------------------------------------- asynchronous rounds


async def test_worked_step_of_stale_updates(tmp_path) -> None:
    """fedge.md section 16: an update is three steps old; before the split, and of an expert with four members."""
    fleet, layout, _, _ = digits(tmp_path, n=2, limit=80)

    def vector(x: float, y: float) -> np.ndarray:
        return np.float32([x, y, *[0] * (layout.n_params - 2)])

    def put(params: np.ndarray):
        return fleet.put(unflatten(Model(params, np.zeros(0, np.float32), np.zeros(0, np.int64)), layout))

    method = Fedge(EXACT)
    shared = ServerModel(model=put(vector(0, 0)), velocity=fleet.put({"v": vector(0.4, 0)}))
    state = msgspec.structs.replace(method.init(layout, shared.model), shared=shared)
    updates = {
        "a/0": Trained(update=put(vector(1, 0)), n_samples=1),
        "b/1": Trained(update=put(vector(0, 2)), n_samples=3),
    }
    discounts = {"a/0": compute_discount(0), "b/1": compute_discount(3)}
    after = (await train_shared(method, state, updates, fleet, (), discounts)).shared
    np.testing.assert_allclose(fleet.get(after.model, layout).params[:2], [0.4, 0.75], atol=1e-7)
    split = with_clusters(state, fleet, ("a", "b", "c", "d"), ("c", "d"))
    split = msgspec.structs.replace(split, experts=(shared, shared))
    first, other = (await train_experts(method, split, updates, fleet, discounts=discounts)).experts
    np.testing.assert_allclose(fleet.get(first.model, layout).params[:2], [0.275, 0.375], atol=1e-7)
    assert other == shared


async def test_before_and_after_the_split_nobody_waits_and_in_between_everybody_does(tmp_path) -> None:
    """The slow one's updates count, late; the run can be interrupted between any two rounds."""
    fleet, layout, first, _ = digits(tmp_path, n=8, n_groups=2, limit=480)
    slow = "d07"
    fleet._hardware[slow] = dataclasses.replace(fleet._hardware[slow], latency_s=50.0)
    for i in fleet.workers.keys() - {slow}:
        fleet._hardware[i] = dataclasses.replace(fleet._hardware[i], latency_s=1.0)
    method = Fedge(MethodSettings(rounds=30, options={"buffer": 6, "split": "always"}))
    state, took = method.init(layout, first), {}
    while not method.is_done(state):
        fleet.round, before = state.round + 1, fleet.seconds
        state = decode_state(encode_state(await method.advance(state, fleet)), FedgeState)
        took[state.round] = fleet.seconds - before
    assert {number for number, seconds in took.items() if seconds > 10} == {10, 11, 12, 31}
    assert [line.answered for line in state.history] == [8 if n in {10, 11, 12} else 6 for n in range(1, 31)]
    assert 3 < state.participations[slow] < 10
    assert len(state.experts) == len(state.trial.clusters) > 1
    assert state.installed.keys() == fleet.workers.keys()
    assert not state.groups


def test_nobody_is_chosen_for_a_round_that_waits_for_nobody() -> None:
    with pytest.raises(ConfigError, match="leave out selection"):
        Fedge(MethodSettings(options={"buffer": 5, "selection": "ccmab"}))


# ---------------------------------------------------------------------------------------------- trial and split


@pytest.mark.parametrize("seed", [0, 1])
async def test_turned_cameras_are_split_into_their_groups_and_label_skew_is_not(tmp_path, seed) -> None:
    settings = MethodSettings(rounds=30, participation=0.75, seed=seed)
    fleet, layout, first, groups = digits(tmp_path / "groups", n=12, seed=seed)
    state = await rounds(Fedge(settings), Fedge(settings).init(layout, first), fleet, 12)
    assert state.trial is not None
    assert state.trial.split
    assert {groups[i] for cluster in state.trial.clusters for i in cluster} == {0, 1, 2}
    assert all(len({groups[i] for i in cluster}) == 1 for cluster in state.trial.clusters)
    assert state.directions is None
    assert state.last == {}

    fleet, layout, first, _ = digits(tmp_path / "dirichlet", n=12, how="dirichlet", seed=seed)
    state = await rounds(Fedge(settings), Fedge(settings).init(layout, first), fleet, 12)
    assert state.trial is not None
    assert not state.trial.split
    assert state.experts == ()


@pytest.mark.parametrize("alpha", [100.0, 1.0, 0.5, 0.3, 0.1])
async def test_devices_without_groups_are_not_split_whatever_their_label_skew(tmp_path, alpha) -> None:
    settings = MethodSettings(rounds=30)
    for seed in range(3):
        fleet, layout, first, _ = digits(tmp_path / str(seed), n=12, how="dirichlet", alpha=alpha, seed=seed)
        state = await rounds(Fedge(settings), Fedge(settings).init(layout, first), fleet, 12)
        assert state.trial is not None
        assert not state.trial.split


def test_on_equal_devices_it_is_the_momentum_method_with_or_without_prior(tmp_path) -> None:
    """Section 16, property 10; 300 test samples: one standard error is about a point and a half."""
    kind = {"partition": "iid", "hardware": "none", "evaluate_every": 99}
    equal = Scenario(devices=10, samples=1200, rounds=10, **kind)

    def outcome(method: str) -> RunOutcome:
        return simulate(equal, method, {}, 0, tmp_path / method, lambda _: None, method)

    ours, plain, momentum = map(outcome, ("fedge", "benchmarks.default_method:NoPrior", "fedavgm"))
    assert not ours.split
    assert ours.sample_accuracy == pytest.approx(momentum.sample_accuracy, abs=0.03)
    assert ours.sample_accuracy == pytest.approx(plain.sample_accuracy, abs=0.015)


@pytest.mark.parametrize("seed", [0, 3])
async def test_turned_cameras_are_split_into_their_groups_when_few_take_part_in_a_round(tmp_path, seed) -> None:
    settings = MethodSettings(rounds=80, participation=0.25, seed=seed)
    fleet, layout, first, groups = digits(tmp_path, n=20, n_groups=4, seed=seed)
    state = await rounds(Fedge(settings), Fedge(settings).init(layout, first), fleet, 32)
    assert state.trial is not None
    assert state.trial.split
    assert {groups[i] for cluster in state.trial.clusters for i in cluster} == {0, 1, 2, 3}
    assert all(len({groups[i] for i in cluster}) == 1 for cluster in state.trial.clusters)


async def test_clusters_and_trial_rest_on_rounds_with_everybody(tmp_path) -> None:
    settings = MethodSettings(rounds=30, participation=0.5, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(settings)
    state = await rounds(method, method.init(layout, first), fleet, module.WARM_UP)
    after = await rounds(method, state, fleet, 5)
    assert [line.asked for line in after.history[: module.WARM_UP]] == [6] * module.WARM_UP
    assert all(line.asked < 6 for line in after.history[module.WARM_UP :])
    assert (after.directions, after.last) == (state.directions, state.last)
    after = await rounds(method, after, fleet, 2)
    assert after.history[11].asked == 6, "the round of the trial"
    assert after.history[12].asked < 6
    assert after.trial is not None
    assert after.trial.ids == tuple(f"d{i:02d}" for i in range(6))


@pytest.fixture
def panel_of_four(monkeypatch) -> None:
    monkeypatch.setattr(module, "PANEL", 4)


@pytest.mark.usefixtures("panel_of_four")
async def test_of_very_many_devices_a_panel_is_everybody(tmp_path) -> None:
    settings = MethodSettings(rounds=20, participation=0.5, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(settings)
    state = await rounds(method, method.init(layout, first), fleet, module.WARM_UP)
    panel = tuple(state.participations)
    assert (len(panel), set(state.participations.values())) == (4, {module.WARM_UP})
    state = await rounds(method, state, fleet, 2)
    assert len(state.profiles) == 6, "groups are of all devices"
    assert state.trial is not None
    assert state.trial.ids == panel
    assert state.history[-1].asked == 4


@pytest.mark.usefixtures("panel_of_four")
async def test_with_full_participation_directions_are_the_panels_alone(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(MethodSettings(rounds=20, sgd=Sgd(steps=2)))
    state = await rounds(method, method.init(layout, first), fleet, module.WARM_UP + 1)
    assert len(state.participations) == 6
    assert len(state.last) == len(fleet.get_tensors(state.directions)) == 4


async def test_what_a_trial_leaves_grows_with_the_devices_not_with_their_pairs(tmp_path, monkeypatch) -> None:
    async def untried(_, state, *__: object):
        return state, {}

    monkeypatch.setattr(module, "run_trial", untried)
    fleet, layout, first, _ = digits(tmp_path, n=4)
    method = Fedge(EXACT)
    before = method.init(layout, first)
    left = []
    for n in (200, 400):
        directions = np.random.default_rng(n).normal(size=(n, 8)).astype(np.float32)
        held = fleet.put({f"d{i:03}": direction for i, direction in enumerate(directions)})
        state = msgspec.structs.replace(before, directions=held)
        state = await method._split(state, fleet, 4)
        assert state.trial is not None
        assert len(state.trial.places) == n
        left.append([len(encode_state(state)), len(json.dumps(method.summarise(state), indent=1))])
    assert (np.diff(left, axis=0) < 200 * 400).all(), "bytes of the state and of summary.json"


@pytest.mark.parametrize("n", [64, 70])
async def test_a_device_without_cluster_is_offered_as_many_experts_as_an_order_holds(tmp_path, n) -> None:
    """By labels or profiles there may be more clusters than that: it chooses among the largest."""
    fleet, layout, first, _ = digits(tmp_path, n=4)
    clusters = [(f"x{k}", f"y{k}") if k == 65 else (f"x{k}",) for k in range(n)]
    state = with_clusters(Fedge(EXACT).init(layout, first), fleet, *clusters)
    order = Train(starts=list_starts(state, "d00", 8), sgd=EXACT.sgd)
    fit = Fedge(EXACT).make_fit_order(state, fleet.get_devices()[0], local=False)
    require_sendable([order, fit])
    assert [start.cluster for start in order.starts] == [*range(63), 63 if n == 64 else 65]
    assert [start.cluster for start in list_starts(state, "x63", 8)] == [63]


async def test_fewer_than_four_devices_are_never_split(tmp_path) -> None:
    settings = MethodSettings(rounds=10)
    fleet, layout, first, _ = digits(tmp_path, n=3)
    state = await rounds(Fedge(settings), Fedge(settings).init(layout, first), fleet, 4)
    assert state.trial is not None
    assert not state.trial.split


async def test_a_change_enters_every_cluster_of_its_device_and_no_other_and_w_stays(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = Fedge(EXACT)
    state = with_clusters(method.init(layout, first), fleet, ("d00", "d01"), ("d01",), ("d02",))
    order = Train(starts=(Start(model=first, cluster=0),), sgd=EXACT.sgd, codec=Codec.FLOAT32)
    answers = await fleet.run("train", dict.fromkeys(("d00", "d01"), order))
    updates = {i: answer.result for i, answer in answers.items()}
    after = await train_experts(method, state, updates, fleet)

    n = {i: update.n_samples for i, update in updates.items()}
    change = {i: fleet.get(update.update, layout).params.astype(np.float64) for i, update in updates.items()}
    w = fleet.get(first, layout).params
    both = (n["d00"] * change["d00"] + n["d01"] * change["d01"]) / (n["d00"] + n["d01"])
    np.testing.assert_allclose(fleet.get(after.experts[0].model, layout).params, w + both, atol=1e-6)
    np.testing.assert_allclose(fleet.get(after.experts[1].model, layout).params, w + change["d01"], atol=1e-6)
    assert after.experts[2] == state.experts[2]
    assert after.shared == state.shared


async def test_after_a_split_the_global_model_is_frozen_and_experts_move(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(EXACT)
    split = with_clusters(method.init(layout, first), fleet, ("d00", "d03"), ("d01", "d04"))
    after = await rounds(method, msgspec.structs.replace(split, round=4), fleet, 2)
    assert after.shared == split.shared
    assert all(new.model != old.model for new, old in zip(after.experts, split.experts, strict=True))
    assert after.primary["d00"].cluster == 0
    assert after.primary["d02"].cluster in {0, 1}  # in no cluster: it may take any
    assert {primary.round for primary in after.primary.values()} == {5}  # looked up once in five rounds


def test_what_a_device_may_start_from(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    state = Fedge(EXACT).init(layout, first)
    assert list_starts(state, "d00", 1) == (Start(model=first),)
    state = with_clusters(state, fleet, ("d00", "d01"), ("d01",))
    assert [start.cluster for start in list_starts(state, "d00", 5)] == [0]
    assert [start.cluster for start in list_starts(state, "d01", 5)] == [0, 1]
    assert [start.cluster for start in list_offered_experts(state, "stranger")] == [0, 1]
    state = msgspec.structs.replace(state, primary={"d01": PrimaryExpert(cluster=1, round=5)})
    assert [start.cluster for start in list_starts(state, "d01", 9)] == [1]
    assert [start.cluster for start in list_starts(state, "d01", 10)] == [0, 1]


# ---------------------------------------------------------------------------------------------- selection


async def test_groups_are_made_anew_before_the_split_and_not_after_it(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(MethodSettings(rounds=20, participation=0.5, sgd=Sgd(steps=5)))
    before = await rounds(method, method.init(layout, first), fleet, module.WARM_UP + 1)
    assert before.groups
    anew = method.recluster(before)
    assert anew is not None
    assert not anew.groups
    assert anew.shared == before.shared
    asked = len(fleet.asked)
    after = await rounds(method, anew, fleet, 1)
    assert {i for _, step, i in fleet.asked[asked:] if step == "profile"} == set(fleet.workers)
    assert after.groups
    assert method.recluster(with_clusters(before, fleet, tuple(fleet.workers))) is None


async def test_everybody_takes_part_until_there_are_profiles_then_the_bandit_chooses(tmp_path) -> None:
    settings = MethodSettings(rounds=20, participation=0.5, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(settings)
    state = await rounds(method, method.init(layout, first), fleet, module.WARM_UP)
    assert set(state.participations.values()) == {module.WARM_UP}
    assert state.groups == ()
    state = await rounds(method, state, fleet, 1)
    assert sorted(i for members in state.groups for i in members) == [f"d{i:02d}" for i in range(6)]
    assert sum(step == "profile" for _, step, _ in fleet.asked) == 6
    assert state.history[-1].asked < 6
    state = await rounds(method, state, fleet, 1)
    assert sum(step == "profile" for _, step, _ in fleet.asked) == 6  # nobody is asked twice


async def test_a_device_that_never_answers_costs_few_deadlines(tmp_path) -> None:
    settings = MethodSettings(rounds=100, participation=0.5, sgd=Sgd(steps=2))
    fleet, layout, first, _ = digits(tmp_path, how="dirichlet")
    fleet.unresponsive = frozenset(["d02"])
    method = Fedge(settings)
    state = await rounds(method, method.init(layout, first), fleet, 32)
    assert [(r, step) for r, step, device in fleet.asked if device == "d02"] == [
        (1, "train"), (3, "train"), (7, "profile"), (15, "profile"), (31, "profile"),
    ]  # fmt: skip
    assert all(state.participations[i] > module.WARM_UP for i in ("d00", "d01", "d03", "d04", "d05"))
    assert "d02" not in state.participations

    fleet.unresponsive = frozenset()
    fleet.asked = []
    state = await rounds(method, state, fleet, 20)
    assert (47, "profile", "d02") in fleet.asked, "after 16 rounds it is tried again"
    assert "d02" in state.profiles
    assert state.participations["d02"] > 0
    assert state.unresponsive == {}


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
async def test_an_unresponsive_device_is_selected_less_and_less(tmp_path, seed, participation) -> None:
    settings = MethodSettings(rounds=200, participation=participation, seed=seed, sgd=Sgd(steps=3))
    fleet, layout, first, _ = digits(tmp_path, how="dirichlet", seed=seed)
    method = Fedge(settings)
    state = await rounds(method, method.init(layout, first), fleet, module.WARM_UP + 1)
    fleet.unresponsive = frozenset(["d02"])
    fleet.asked = []
    state = await rounds(method, state, fleet, 60)
    asked = [r for r, _, device in fleet.asked if device == "d02"]
    rests = [2, 4, 8, 16, 16]
    assert all(gap >= rest for gap, rest in zip(np.diff(asked), rests, strict=False))
    assert all(gap <= 16 + BOUND for gap in np.diff(asked)), "it does not starve either"
    others = [sum(d == f"d{i:02d}" for _, _, d in fleet.asked) for i in range(6) if i != 2]
    assert len(asked) <= 1 + len(rests)
    assert np.mean(others) >= 60 * participation - len(asked), "and the others as often as ever"

    fleet.unresponsive = frozenset()
    state = await rounds(method, state, fleet, 16 + BOUND)
    assert state.unresponsive == {}
    fleet.asked = []
    await rounds(method, state, fleet, 40)
    asked = [r for r, _, device in fleet.asked if device == "d02"]
    assert all(gap <= BOUND for gap in np.diff(asked)), "as soon as it answers it is one of them again"
    assert len(asked) >= 40 // BOUND


def thrice(step: str) -> list[tuple[int, str]]:
    """A step of round 6 in which a device is asked in vain and asked again."""
    return [(6, step), (6, f"{step}-2"), (6, f"{step}-3")]


@pytest.mark.parametrize("step", ["train", "trial", "candidates", "weights-1", "energy"])
async def test_a_device_that_stops_answering_in_any_step_costs_its_deadline_once(tmp_path, step) -> None:
    """But for the steps at the very end, if it had taken part: without a mixture all of its work was for nothing."""
    settings = MethodSettings(rounds=5, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path)
    in_vain = []

    def stops_answering(name, actions):
        if name == step:
            fleet.unresponsive = frozenset(["d02"])
        in_vain.extend((fleet.round, name) for device in actions if device in fleet.unresponsive)

    fleet.before = stops_answering
    method = Fedge(settings)
    await run_rounds(method, method.init(layout, first), fleet)
    assert (
        in_vain
        == {
            "train": [(1, "train"), (3, "train")],
            "trial": [(2, "trial"), (4, "train"), *thrice("candidates")],
            "candidates": thrice("candidates"),
            "weights-1": [(6, "weights-1"), *thrice("gate")],
            "energy": [(6, "energy"), *thrice("gate")],
        }[step]
    )


@pytest.mark.parametrize("step", ["candidates", "gate"])
async def test_where_everybody_misses_a_step_at_the_end_it_ends_in_mixtures_all_the_same(tmp_path, step) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    everybody = frozenset(fleet.workers)

    def misses_one(name, _):
        fleet.unresponsive = everybody if name == step else frozenset()

    fleet.before = misses_one
    method = Fedge(MethodSettings(rounds=2, sgd=Sgd(steps=5)))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.installed.keys() == everybody


async def test_a_device_that_is_born_again_is_asked_at_once_unless_it_fails_and_fails(tmp_path) -> None:
    settings = MethodSettings(rounds=100, sgd=Sgd(steps=2))
    fleet, layout, first, _ = digits(tmp_path, n=3)
    fleet.unresponsive = frozenset(["d02"])
    method = Fedge(settings)
    state = method.init(layout, first)
    for r in range(1, 12):  # started again and again, and dies of every order
        fleet.incarnations = {"d02": str(r)}
        state = await rounds(method, state, fleet, 1)
    assert [r for r, _, device in fleet.asked if device == "d02"] == [1, 2, 4, 7, 11]


async def test_where_all_are_unresponsive_all_are_asked(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    fleet.unresponsive = frozenset(device.id for device in fleet.get_devices())
    method = Fedge(EXACT)
    state = await rounds(method, method.init(layout, first), fleet, 2)
    fleet.unresponsive = frozenset()
    state = await rounds(method, state, fleet, 1)
    assert [line.asked for line in state.history] == [3, 3, 3]
    assert state.history[-1].answered == 3


# ---------------------------------------------------------------------------------------------- changed data


def profiled(first: float, n_samples: int = 10) -> Description:
    """A profile of two units; such as differ little in `first` are of one group. The unit of distance is 1."""
    return Description(profile=(first, 1 - first), halves=1 / 6, n_samples=n_samples)


@pytest.fixture
def grouped(tmp_path) -> FedgeState:
    """Two groups of three and one of one, each with a bandit that has held as many rounds as the group is large."""
    _, layout, first, _ = digits(tmp_path, n=3)
    ids = "abcdefg"
    state = group_devices(
        Fedge(EXACT).init(layout, first), dict(zip(ids, map(profiled, (0, 0, 0, 1, 1, 1, 0.5)), strict=True))
    )
    assert state.groups == (("a", "b", "c"), ("d", "e", "f"), ("g",))
    return msgspec.structs.replace(state, bandits=tuple(ccmab.State(round=len(members)) for members in state.groups))


def test_who_is_profiled() -> None:
    known = profiled(0.5, n_samples=10)
    assert is_outdated(None, Device("a", 10))
    assert not is_outdated(known, Device("a", 10))
    assert is_outdated(known, Device("a", 11))
    assert not is_outdated(None, Device("a", 0)), "it has nothing to make a profile of"


def test_a_device_whose_data_changed_goes_where_they_belong_and_all_others_stay(grouped) -> None:
    after = group_devices(grouped, {"c": profiled(1, n_samples=20)})
    assert after.groups == (("a", "b"), ("c", "d", "e", "f"), ("g",))
    assert after.bandits == grouped.bandits
    assert after.profiles["c"].n_samples == 20


def test_a_device_whose_data_became_more_of_the_same_stays(grouped) -> None:
    after = group_devices(grouped, {"c": profiled(0.05, n_samples=20)})
    assert (after.groups, after.bandits, after.n_moved) == (grouped.groups, grouped.bandits, 0)
    assert after.profiles["c"].n_samples == 20


def test_a_group_that_its_last_device_leaves_is_gone_with_its_bandit(grouped) -> None:
    after = group_devices(grouped, {"g": profiled(0)})
    assert after.groups == (("a", "b", "c", "g"), ("d", "e", "f"))
    assert after.bandits == grouped.bandits[:2]


def test_a_device_that_is_like_no_other_founds_a_group(grouped) -> None:
    after = group_devices(
        msgspec.structs.replace(group_devices(grouped, {"g": profiled(0)}), n_moved=0), {"f": profiled(0.5)}
    )
    assert after.groups == (("a", "b", "c", "g"), ("d", "e"), ("f",))
    assert after.bandits == (*grouped.bandits[:2], ccmab.State())


def test_after_many_changes_all_groups_are_made_anew_and_inherit_bandits(grouped) -> None:
    """2 of 7 are more than 20 %: new and changed devices count alike. By placing alone b, c would have stayed."""
    after = group_devices(grouped, {"b": profiled(1), "c": profiled(1)})
    assert after.groups == (("a",), ("b", "c", "d", "e", "f"), ("g",))
    assert after.bandits == grouped.bandits
    assert after.n_moved == 0
    assert group_devices(grouped, {"g": profiled(0)}).n_moved == 1


async def test_a_device_with_other_data_is_profiled_anew_and_nobody_else(tmp_path) -> None:
    settings = MethodSettings(rounds=20, participation=0.5, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(settings)
    before = await rounds(method, method.init(layout, first), fleet, module.WARM_UP + 1)
    fleet.asked = []
    fleet.give("d02", fleet.data("d03"))
    assert len({device.n_samples for device in fleet.get_devices() if device.id in {"d02", "d03"}}) == 1
    assert before.profiles["d02"].n_samples != before.profiles["d03"].n_samples
    after = await rounds(method, before, fleet, 3)
    assert [(r, i) for r, step, i in fleet.asked if step == "profile"] == [(module.WARM_UP + 2, "d02")]
    assert after.profiles["d02"].profile == before.profiles["d03"].profile
    assert any({"d02", "d03"} <= set(members) for members in after.groups)


# ---------------------------------------------------------------------------------------------- personalisation


def test_few_validation_samples_leave_the_defaults() -> None:
    few = [CandidatesFitted(losses={Role.GLOBAL: (1.0,) * 15 + (0.0,)}, n_validation=29)]
    calibrate = Fedge(EXACT).calibrate
    assert calibrate(Role.GLOBAL, few, pooling=False).kappa == 1
    assert calibrate(Role.PRIVATE, few, pooling=False).kappa == 0
    chosen = calibrate(Role.GLOBAL, few, pooling=True)
    assert (chosen.temperature, chosen.kappa) == (2.8, 1.5)


def test_without_the_prior_or_with_all_of_it_nothing_else_is_chosen() -> None:
    """Section 15.4's noprior and fixedprior: T is still pooled, or nothing is."""
    losses = tuple(float(x) for x in (9, 1, 1, 1, 5, 0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0))
    found = [CandidatesFitted(losses=dict.fromkeys((Role.GLOBAL, Role.PRIVATE), losses), n_validation=40)]
    for role, whole in ((Role.GLOBAL, 1.0), (Role.PRIVATE, 0.0)):
        none = default_method.NoPrior(EXACT).calibrate(role, found, pooling=True)
        assert (none.temperature, none.kappa) == (1.4, 0.0)
        fixed = default_method.FixedPrior(EXACT).calibrate(role, found, pooling=True)
        assert (fixed.temperature, fixed.kappa) == (1.0, whole)
        assert default_method.NoPrior(EXACT).calibrate(role, found, pooling=False).kappa == 0


def test_a_prior_of_the_shared_models_and_no_temperature_leave_the_rest_of_the_grid() -> None:
    """Section 15.4's nokv and notemp."""
    losses = tuple(float(x) for x in (9, 8, 3, 8, 5, 0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0))
    found = [CandidatesFitted(losses=dict.fromkeys(Role, losses), n_validation=40)]
    for role in Role:
        shared = role in {Role.GLOBAL, Role.EXPERT}
        kept = default_method.SharedPrior(EXACT).calibrate(role, found, pooling=True)
        assert (kept.temperature, kept.kappa) == (1.4, 0.5 if shared else 0.0)
        plain = default_method.NoTemperature(EXACT).calibrate(role, found, pooling=True)
        assert (plain.temperature, plain.kappa) == (1.0, 1.0 if shared else 0.6)


@pytest.mark.parametrize("rho", [0.0, 0.2, 0.5, 1.0])
async def test_the_trial_is_held_after_the_share_of_the_rounds(tmp_path, rho) -> None:
    settings = MethodSettings(rounds=10, sgd=Sgd(steps=1), options={"rho": rho})
    fleet, layout, first, _ = digits(tmp_path)
    method = Fedge(settings)
    state, held = method.init(layout, first), []
    for r in range(1, 11):
        state = await rounds(method, state, fleet, 1)
        if state.trial is not None:
            held.append(r)
    assert held[:1] == ([round(10 * rho)] if rho else [])


def variant(*kinds: type[Fedge]) -> type[Fedge]:
    """Several rows of the ablation at once."""
    return type("Variant", kinds, {})


@pytest.mark.parametrize(("row", "roles"), [(default_method.NoLocal, 2), (default_method.AlwaysLocal, 3)])
async def test_the_local_model_can_be_kept_out_or_in_and_the_energy_off(tmp_path, row, roles) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    kind = variant(row, default_method.NoEnergy, default_method.PooledWeights)
    method = kind(MethodSettings(rounds=2, sgd=Sgd(steps=3), options={"split": "never"}))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.pool is not None
    assert (state.pool.local, state.pool.beta) == (roles == 3, 0.0)
    assert {len(found) for found in roles_of(fleet, state).values()} == {roles}
    assert {Role.LOCAL in found for found in roles_of(fleet, state).values()} == {roles == 3}
    for i in state.installed:  # so strong a shrinkage leaves the pooled weights
        manifest = read_bundle(tmp_path / i / "bundles" / "1").manifest
        for candidate in manifest.candidates:
            assert candidate.weight == pytest.approx(state.pool.weights[candidate.role], abs=1e-5)


NO_GLOBAL_OR_LOCAL = variant(default_method.NoGlobal, default_method.NoLocal)


@pytest.mark.parametrize(
    ("kind", "options", "roles"),
    [
        (default_method.PrivateAlone, {"split": "always"}, (Role.PRIVATE,)),
        (default_method.GlobalAlone, {"split": "always"}, (Role.GLOBAL,)),
        (default_method.ExpertAlone, {"split": "always"}, (Role.EXPERT,)),
        (default_method.ExpertAlone, {"split": "never"}, (Role.GLOBAL,)),
        (NO_GLOBAL_OR_LOCAL, {"split": "always"}, (Role.PRIVATE, Role.EXPERT)),
        (NO_GLOBAL_OR_LOCAL, {"rho": 0.0}, (Role.PRIVATE, Role.GLOBAL)),
    ],
)
async def test_candidates_may_be_left_out_of_the_mixture(tmp_path, kind, options, roles) -> None:
    """Section 15.4's privonly, globonly, exponly, noglobal; without a split the global model is the expert."""
    fleet, layout, first, _ = digits(tmp_path, limit=400)
    method = with_options(kind=kind, rounds=4, **options)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.pool is not None
    assert bool(state.experts) == (options.get("split") == "always")
    assert set(roles_of(fleet, state).values()) == {roles}
    assert tuple(state.pool.weights) == roles


def fitted_on(worker: Worker) -> FittedModels:
    """The candidates that it keeps."""
    (file,) = (worker.home / "kept").glob("*/candidates/*")
    return msgspec.msgpack.decode(file.read_bytes(), type=FittedModels)


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        (Role.PRIVATE, variant(default_method.PrivateAlone, default_method.NoFinalFit)),
        (Role.GLOBAL, default_method.GlobalAlone),
    ],
)
async def test_one_model_alone_is_its_own_prediction_with_prior_and_temperature(tmp_path, role, kind) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400, sensitive=0.0)  # no shadows
    method = with_options(kind=kind, rounds=3)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.pool is not None
    for i, worker in fleet.workers.items():
        x = worker.data.x_val
        model = flatten(from_bytes(fitted_on(worker).models[role]), layout)
        logits, prior = worker.network.compute_logits(model, x), fit_final_offset(worker, model)
        q = calibrated(logits, prior, state.pool.calibration[role])
        np.testing.assert_allclose(predicted(worker, x), np.exp(q), atol=1e-4)
        assert manifests(fleet, state)[i].fusion.guard is None


async def test_a_device_that_lacks_the_one_candidate_takes_the_global_model(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    data = fleet.data("d00")
    one = {name: getattr(data, name)[:1] for name in ("x_train", "y_train", "sensitive")}
    fleet.give("d00", dataclasses.replace(data, **one))
    method = with_options(kind=default_method.PrivateAlone, rounds=1)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert roles_of(fleet, state) == {"d00": (Role.GLOBAL,)} | dict.fromkeys(("d01", "d02", "d03"), (Role.PRIVATE,))


async def test_uniform_weights_are_uniform_and_learned_ones_are_not(tmp_path) -> None:
    weights = {}
    for which, kind in (("learned", Fedge), ("uniform", default_method.UniformWeights)):
        fleet, layout, first, _ = digits(tmp_path / which, limit=400)
        method = with_options(kind=kind, rounds=2)
        state = await run_rounds(method, method.init(layout, first), fleet)
        steps = {step for _, step, _ in fleet.asked}
        assert ("weights-1" in steps) == (which == "learned")
        manifests = [read_bundle(tmp_path / which / i / "bundles" / "1").manifest for i in state.installed]
        weights[which] = [c.weight * len(m.candidates) for m in manifests for c in m.candidates]
    assert weights["uniform"] == pytest.approx([1.0] * len(weights["uniform"]), abs=1e-6)
    assert max(weights["learned"]) > 1.05


async def test_a_whole_run_leaves_a_mixture_on_each_device_and_can_be_interrupted_anywhere(tmp_path) -> None:
    settings = MethodSettings(rounds=10, participation=0.75, sgd=Sgd(steps=5))
    fleet, layout, first, _ = digits(tmp_path / "straight")
    method = Fedge(settings)
    straight = await run_rounds(method, method.init(layout, first), fleet)
    assert set(straight.installed) == {f"d{i:02d}" for i in range(6)}
    assert all(Role.GLOBAL in found for found in roles_of(fleet, straight).values())
    assert all(manifest.max_abs_diff < 1e-4 for manifest in manifests(fleet, straight).values())
    assert straight.pool is not None
    assert sum(straight.pool.weights.values()) == pytest.approx(1)
    summary = method.summarise(straight)
    assert summary["done"]
    msgspec.json.encode(summary)

    fleet, layout, first, _ = digits(tmp_path / "interrupted")
    state = method.init(layout, first)
    while not method.is_done(state):
        fleet.round = state.round + 1
        await method.advance(state, fleet)  # killed before its state was committed
        state = decode_state(encode_state(await method.advance(state, fleet)), FedgeState)
    assert encode_state(state) == encode_state(straight)


# ---------------------------------------------------------------------------------------------------- options


def with_options(
    rounds: int = 10, participation: float = 1.0, *, kind: type[Fedge] = Fedge, **options: object
) -> Fedge:
    return kind(
        MethodSettings(rounds=rounds, participation=participation, sgd=Sgd(steps=5), options=options)  # type: ignore[arg-type]
    )


async def test_only_the_first_model_travels_whole_and_no_difference_twice(tmp_path) -> None:
    """30 rounds are more than the models that a device keeps: what the end needs of the beginning is at hand."""
    fleet, layout, first, _ = digits(tmp_path, n=4)
    method = Fedge(MethodSettings(rounds=30, sgd=Sgd(steps=1), options={"split": "never"}))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.trial is not None
    n_models = 30 + 2  # of the rounds, and what the trial adds: G and an expert
    assert len(state.installed) == 4
    assert fleet.bytes_down / 4 < first.size_bytes * (1 + n_models / 4)


async def test_a_split_can_be_forced_or_forbidden(tmp_path) -> None:
    for wanted, how in (("never", "groups"), ("always", "dirichlet")):
        fleet, layout, first, _ = digits(tmp_path / wanted, n=6, how=how)
        method = with_options(split=wanted)
        state = await rounds(method, method.init(layout, first), fleet, 4)
        assert state.trial is not None
        assert state.trial.split == bool(state.experts) == (wanted == "always")


@pytest.mark.parametrize(("kind", "slope"), [(Fedge, 20), (default_method.ByStatistic, 0)])
async def test_the_trial_may_decide_by_its_statistic_alone(tmp_path, kind, slope) -> None:
    """Section 5's rule, and section 15.4's tsplit; these cameras are split (t = 0.9, eta = 0.72) by the first alone."""
    fleet, layout, first, _ = digits(tmp_path, n=8, seed=1)
    method = with_options(rounds=5, kind=kind)
    state = await rounds(method, method.init(layout, first), fleet, 2)
    trial = state.trial
    assert trial is not None
    assert trial.statistic is not None
    assert len(trial.clusters) > 1
    assert trial.split == bool(state.experts) == (trial.statistic + slope * (trial.separability - 0.7) > 1)


async def test_without_the_bandit_the_cohort_is_drawn_within_the_groups(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6)
    method = with_options(participation=0.5, selection="uniform")
    state = await rounds(method, method.init(layout, first), fleet, 10)
    assert state.groups
    assert [line.asked for line in state.history[: module.WARM_UP]] == [6] * module.WARM_UP
    expected = sum(max(1, int(len(group) / 2 + 0.5)) for group in state.groups)
    assert state.history[-1].asked == expected
    assert all(bandit == ccmab.State() for bandit in state.bandits)


async def test_shift_installs_the_shared_model_alone(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = with_options(rounds=3, mode="shift")
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(roles_of(fleet, state).values()) == {(Role.GLOBAL,)}
    assert len(state.installed) == 4


async def test_a_late_joiner_after_the_end_gets_a_mixture_with_what_was_pooled(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=5, limit=500)
    fleet.unresponsive = frozenset({"d04"})
    method = with_options(rounds=3)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert set(state.installed) == {"d00", "d01", "d02", "d03"}
    fleet.unresponsive = frozenset()
    fleet.incarnations = {"d04": "2"}
    fleet.asked.clear()
    fleet.round = state.round + 1
    after = await method.serve_late_joiners(state, fleet)
    assert set(after.installed) == {"d00", "d01", "d02", "d03", "d04"}
    assert roles_of(fleet, after)["d04"][0] is Role.PRIVATE
    assert {device for _, _, device in fleet.asked} == {"d04"}
    assert after.pool == state.pool
    assert await method.serve_late_joiners(after, fleet) == after


async def test_a_device_that_drifts_after_the_end_gets_a_newer_bundle(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = with_options(rounds=2)
    state = await run_rounds(method, method.init(layout, first), fleet)
    fleet.drifting = frozenset(["d02"])
    fleet.asked.clear()
    fleet.round = state.round + 1
    after = await method.serve_late_joiners(state, fleet)
    assert [(step, device) for _, step, device in fleet.asked] == [
        ("profile", "d02"), ("candidates", "d02"), ("gate", "d02"),
    ]  # fmt: skip
    assert after.profiles.keys() >= {"d02"}
    assert any("d02" in members for members in after.groups)
    assert after.installed["d02"] != state.installed["d02"]
    assert {i for i in after.installed if after.installed[i] == state.installed[i]} == {"d00", "d01", "d03"}


def test_a_device_that_drifts_is_profiled_anew() -> None:
    profiled = Description(profile=(0.5,), n_samples=5)
    assert not fedge_groups.is_outdated(profiled, Device("a", 5))
    assert fedge_groups.is_outdated(profiled, Device("a", 5, drift=True))
    assert not fedge_groups.is_outdated(profiled, Device("a", 0, drift=True))


@pytest.mark.parametrize("kind", [default_method.NoFinalFit, default_method.NoGuard])
async def test_final_fit_and_guard_can_be_switched_off(tmp_path, kind) -> None:
    parts = []
    for on in (True, False):
        fleet, layout, first, _ = digits(tmp_path / str(on), n=4, limit=400)
        method = with_options(rounds=2, kind=Fedge if on else kind)
        state = await run_rounds(method, method.init(layout, first), fleet)
        found = manifests(fleet, state).values()
        parts.append([candidate.part for manifest in found for candidate in manifest.candidates])
        if not on and kind is default_method.NoGuard:
            assert all(manifest.fusion.guard is None for manifest in found)
    assert kind is default_method.NoGuard or parts[0] != parts[1]


@pytest.mark.parametrize("selection", ["fastest", "stratified"])
async def test_other_selections_keep_to_the_groups_and_the_quota(selection, tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=12, groups="labels", n_groups=2, alpha=100.0)
    method = with_options(rounds=24, participation=0.5, selection=selection)
    state = await rounds(method, method.init(layout, first), fleet, 9)
    asked = [[i for n, step, i in fleet.asked if step == "train" and n == r] for r in (7, 8, 9)]
    if selection == "fastest":
        quotas = [len(members) - len(members) // 2 for members in state.groups]
        assert all(
            len(set(members) & set(cohort)) <= quota
            for cohort in asked
            for members, quota in zip(state.groups, quotas, strict=True)
        )
    assert all(0 < len(cohort) <= 7 for cohort in asked)


def by_majority_label(fleet: Fleet) -> tuple[tuple[str, ...], ...]:
    """CFIC's groups, from the devices' samples themselves."""
    psi = {
        i: compute_label_feature(np.bincount(worker.data.shared[1], minlength=10).tolist())
        for i, worker in fleet.workers.items()
    }
    return tuple(sorted((tuple(sorted(i for i in psi if psi[i] == label)) for label in set(psi.values())), key=min))


@pytest.mark.parametrize("clustering", ["k-means", "agglomerative", "aidc", "labels"])
async def test_other_clusterings_make_the_experts(clustering, tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=9, n_groups=3)
    method = with_options(rounds=8, clustering=clustering, split="always")
    state = await rounds(method, method.init(layout, first), fleet, 4)
    assert state.trial is not None
    own = with_options(rounds=8, split="always")
    fleet.asked = []
    mctc = await rounds(own, own.init(layout, first), fleet, 4)
    members = sorted(i for cluster in state.trial.clusters for i in cluster)
    assert members == sorted(fleet.workers), "each device in one cluster"
    if clustering == "aidc":
        assert state.trial.clusters == state.groups
    elif clustering == "labels":
        assert state.trial.clusters == by_majority_label(fleet)
    else:
        assert len(state.trial.clusters) == len(mctc.trial.clusters)
    assert state.trial.separability == mctc.trial.separability


@pytest.mark.parametrize(("groups", "comes_in"), [("labels", False), ("codes", True)])
async def test_with_pilots_the_others_fit_a_local_model_only_if_it_comes_in(
    tmp_path, monkeypatch, groups, comes_in
) -> None:
    monkeypatch.setattr(fedge_mixture, "PILOTS", 2)
    fleet, layout, first, _ = digits(tmp_path, n=6, alpha=10.0, n_groups=1, groups=groups)
    settings = MethodSettings(rounds=10, options={"local_pilot": True, "split": "never"})
    method = Fedge(settings)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.pool is not None
    assert state.pool.local == comes_in
    have_one = {i for i, worker in fleet.workers.items() if Role.LOCAL in fitted_on(worker).models}
    asked_late = {device for _, step, device in fleet.asked if step == "local"}
    assert len(have_one) == (6 if comes_in else 2)
    assert len(asked_late) == (4 if comes_in else 0)
    assert all((Role.LOCAL in found) == comes_in for found in roles_of(fleet, state).values())
    assert len(state.installed) == 6
