"""FedEPC on real workers: docs/methods/fedepc.md, section 10, as far as it lives in the method."""

import dataclasses
import itertools
import math

import msgspec
import numpy as np
import pytest

from coordinator.aggregation.protection import Protection
from coordinator.methods.baselines.fedprox import FedProx
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.papers.fedepc import (
    GONE_AFTER,
    Cluster,
    FedEpc,
    FedEpcState,
    RoundLoss,
    has_converged,
    inherit_model,
    remove_devices,
)
from coordinator.methods.parts.grouping import Description
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.selection import ccmab
from coordinator.simulation.rounds import run_rounds
from fedge.data import preprocessing
from fedge.errors import ConfigError, FruitlessError
from fedge.models.training import Network
from fedge.steps.descriptions.profile import Profile
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tasks import load_pool
from fedge.tensors.layout import Codec
from tests.support.simulation import Fleet, digits, predicted, rounds

SGD = Sgd(steps=10)


class Unfair(FedEpc):
    """Overdue devices are not asked."""

    def make_bandit_settings(self) -> ccmab.Settings:
        return dataclasses.replace(super().make_bandit_settings(), fairness=False)


def method(
    *, kind: type[FedEpc] = FedEpc, rounds: int = 12, participation: float = 1.0, seed: int = 0, **options
) -> FedEpc:
    settings = MethodSettings(
        rounds=rounds,
        participation=participation,
        seed=seed,
        sgd=SGD,
        codec=Codec.FLOAT32,
        down="float32",
        protection=Protection(average="mean"),  # the paper's
        options={"warm_up": 6} | options,
    )
    return kind(settings)


def four_groups(home, *, n: int = 12):
    """Four groups of labels (0-2, 3-5, 6-7, 8-9), n devices."""
    return digits(home, n=n, alpha=10.0, n_groups=4, groups="labels")


async def warm(fleet: Fleet, layout, first) -> FedEpcState:
    """The state after a warm-up in which everybody took part."""
    of = method()
    return await rounds(of, of.init(layout, first), fleet, 6)


async def clustered(home, of: FedEpc, *, n: int = 12):
    """A federation after its first round with clusters, and the true groups, which the clusters are."""
    fleet, layout, first, groups = four_groups(home, n=n)
    state = await rounds(of, await warm(fleet, layout, first), fleet, 1)
    assert partition_of(state) == truth(groups)
    return fleet, state, groups


def partition_of(state: FedEpcState) -> set[tuple[str, ...]]:
    return {cluster.members for cluster in state.clusters}


def truth(groups: dict[str, int]) -> set[tuple[str, ...]]:
    return {tuple(i for i in groups if groups[i] == g) for g in set(groups.values())}


# ------------------------------------------------------------------------------------------------ the whole of it


async def test_it_finds_planted_groups_and_every_device_installs_the_model_of_its_cluster(tmp_path) -> None:
    fleet, layout, first, groups = four_groups(tmp_path)
    of = method(rounds=9, participation=0.5)
    state = await run_rounds(of, await warm(fleet, layout, first), fleet)
    assert partition_of(state) == truth(groups)
    assert len({cluster.model for cluster in state.clusters}) == 4
    assert set(state.installed) == set(groups)
    for i, worker in fleet.workers.items():
        network = Network(worker.task)
        logits = network.compute_logits(fleet.get(of.get_model(state, i), layout), worker.data.x_val)
        own = predicted(worker, worker.data.x_val)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(own, odds / odds.sum(axis=1, keepdims=True), atol=1e-5)
    assert decode_state(encode_state(state), FedEpcState) == state
    assert of.summarise(state)["clusters"] == {str(k): list(c.members) for k, c in enumerate(state.clusters)}
    assert of.summarise(state)["split"]


async def test_equal_seeds_give_equal_states(tmp_path) -> None:
    states = []
    for turn in range(2):
        of = method(participation=0.3, rounds=8, seed=4, selection="uniform")
        fleet, layout, first, _ = four_groups(tmp_path / str(turn))
        states.append(await run_rounds(of, of.init(layout, first), fleet))
    assert encode_state(states[0]) == encode_state(states[1])


async def test_while_it_warms_up_it_is_fedprox_bit_for_bit(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    of = method(participation=0.5)
    ours = await rounds(of, of.init(layout, first), fleet, 3)
    average = FedProx(MethodSettings(rounds=12, participation=0.5, sgd=SGD, codec=Codec.FLOAT32, down="float32"))
    theirs = average.init(layout, first)
    for _ in range(3):
        fleet.round = theirs.round + 1
        theirs = await average.advance(theirs, fleet)
    assert ours.shared == theirs.model
    assert ours.clusters == ()
    assert of.get_model(ours, "d00") == ours.shared


async def test_a_cluster_model_is_the_mean_of_its_members_models(tmp_path) -> None:
    of = method()
    fleet, state, _ = await clustered(tmp_path, of)
    after = await rounds(of, state, fleet, 1)
    for before, cluster in zip(state.clusters, after.clusters, strict=True):
        w = fleet.get(before.model, state.layout).params.astype(np.float64)
        sgd = msgspec.structs.replace(SGD, proximal_mu=0.01)
        order = Train(starts=(Start(model=before.model),), sgd=sgd, codec=Codec.FLOAT32)
        updates = select_updates(await fleet.run("train", dict.fromkeys(cluster.members, order)))
        trained = np.stack([w + fleet.get(u.update, state.layout).params for u in updates.values()])
        np.testing.assert_allclose(fleet.get(cluster.model, state.layout).params, trained.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("selection", ["ccmab", "uniform", "fastest"])
async def test_clusters_never_influence_each_other_after_the_warm_up(tmp_path, selection) -> None:
    models = []
    for turn in range(2):
        of = method(participation=0.4, selection=selection)
        fleet, state, _ = await clustered(tmp_path / str(turn), of)
        assert len(state.clusters) > 1
        if turn:
            for i in state.clusters[1].members:  # the same number of samples, so that nobody describes them anew
                data = fleet.workers[i].data
                data.y_train[:] = np.random.default_rng(0).permutation(data.y_train)
                data.x_train[:] = -data.x_train
        state = await rounds(of, state, fleet, 4)
        models.append([cluster.model for cluster in state.clusters])
    assert models[0][1] != models[1][1]
    assert [m for k, m in enumerate(models[0]) if k != 1] == [m for k, m in enumerate(models[1]) if k != 1]


# ------------------------------------------------------------------------------------ unresponsive devices, faults


async def test_an_unresponsive_cluster_keeps_its_model_and_the_others_go_on(tmp_path) -> None:
    of = method()
    fleet, state, _ = await clustered(tmp_path, of)
    fleet.unresponsive = frozenset(state.clusters[0].members)
    after = await rounds(of, state, fleet, 1)
    assert after.clusters[0].model == state.clusters[0].model
    assert after.clusters[0].losses == state.clusters[0].losses
    assert all(a.model != b.model for a, b in zip(after.clusters[1:], state.clusters[1:], strict=True))
    assert set(after.unresponsive) == fleet.unresponsive
    fleet.unresponsive = frozenset(i for cluster in state.clusters for i in cluster.members)
    unanswered = await rounds(of, state, fleet, 1)
    assert [c.model for c in unanswered.clusters] == [c.model for c in state.clusters]
    assert unanswered.history[-1].answered == 0


async def test_a_device_that_fails_to_train_is_absent_from_the_mean_and_costs_its_bandit(tmp_path) -> None:
    of = method()
    fleet, state, _ = await clustered(tmp_path, of)
    broken = state.clusters[0].members[0]
    fleet.workers[broken].data.x_train[:] = np.nan
    after = await rounds(of, state, fleet, 1)
    assert np.isfinite(fleet.get(after.clusters[0].model, state.layout).params).all()
    assert after.clusters[0].model != state.clusters[0].model
    assert after.clusters[0].bandit.rewards.count(-1.0) == 1
    assert after.participations[broken] == state.participations[broken]


async def test_without_a_single_device_every_round_of_training_passes(tmp_path) -> None:
    fleet, layout, first, groups = digits(tmp_path, limit=200)
    fleet.absent = frozenset(groups)
    of = method(rounds=3, warm_up=1)
    state = await run_rounds(of, of.init(layout, first), fleet, rounds=2)
    assert (state.shared, state.clusters, state.installed) == (first, (), {})
    with pytest.raises(FruitlessError):
        await run_rounds(of, state, fleet)
    assert fleet.round == 3


async def test_a_device_with_profiles_of_another_length_leaves_when_it_is_outvoted(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, limit=200)
    of = method(rounds=3, warm_up=1)

    def told(q: int) -> Description:
        return Description(n_samples=5, profile=tuple(np.linspace(0, 1, q)), halves=0.1)

    state = of._arrange(of.init(layout, first), {"odd": told(3)}, fleet)
    assert [c.members for c in state.clusters] == [("odd",)]
    state = of._arrange(state, {"a": told(2), "b": told(2)}, fleet)
    assert sorted(state.described) == ["a", "b"]
    assert sorted(i for c in state.clusters for i in c.members) == ["a", "b"]


# --------------------------------------------------------------------------------- server data, noise, local epochs


def with_server_data(home, **options):
    """A federation whose server has 200 labelled samples."""
    fleet, layout, first, groups = four_groups(home)
    apart = load_pool("digits", seed=9, limit=200)
    spec = next(iter(fleet.workers.values())).task
    server_data = preprocessing.preprocess(spec, apart.x), apart.y
    settings = MethodSettings(
        rounds=3, participation=0.5, sgd=SGD, codec=Codec.FLOAT32, options={"extractor": "server"} | options
    )
    return make_method("fedepc", settings, Server(spec, server_data)), fleet, layout, first, groups


async def test_server_data_give_extractor_and_unit_before_anybody_has_learned(tmp_path) -> None:
    of, fleet, layout, first, groups = with_server_data(tmp_path, warm_up=0)
    state = await rounds(of, of.init(layout, first), fleet, 1)
    assert state.extractor not in (None, state.shared)
    assert state.unit is not None
    assert partition_of(state) == truth(groups)
    later = await rounds(of, decode_state(encode_state(state), FedEpcState), fleet, 1)
    assert (later.extractor, later.unit) == (state.extractor, state.unit)
    assert [step for _, step, _ in fleet.asked].count("describe") == len(groups)


async def test_noise_on_the_profiles_is_asked_of_every_device_and_stays_the_same(tmp_path) -> None:
    of, fleet, layout, first, groups = with_server_data(tmp_path, warm_up=0, sigma_dp=0.05)
    state = await rounds(of, of.init(layout, first), fleet, 1)
    assert set(state.described) == set(groups)
    assert state.extractor is not None
    without_noise = await fleet.run("plain", dict.fromkeys(groups, Profile(extractor=state.extractor)))
    again = await fleet.run("again", dict.fromkeys(groups, Profile(extractor=state.extractor, noise=0.05)))
    for i, described in state.described.items():
        assert described.halves is None
        assert described.profile != without_noise[i].result.profile
        assert described.profile == again[i].result.profile


async def test_server_data_that_tell_no_classes_apart_end_the_federation_with_a_reason(tmp_path) -> None:
    of, fleet, layout, first, _ = with_server_data(tmp_path, warm_up=0)
    task, (x, y) = of.server
    of.server = Server(task, (np.zeros_like(x), y))
    with pytest.raises(ConfigError, match="no useful extractor"):
        await rounds(of, of.init(layout, first), fleet, 1)


async def test_a_budget_bounds_the_device_seconds_of_a_cohort(tmp_path) -> None:
    of = method(kind=Unfair, participation=0.9, budget=1e-9)
    _, state, _ = await clustered(tmp_path, of)  # nobody fits
    assert state.history[-1].asked == 0


# ----------------------------------------------------------------------------------------- joins, leaves, changes


async def test_late_joiners_join_the_cluster_of_their_kind_and_nobody_else_moves(tmp_path) -> None:
    of = method(rounds=8)
    fleet, layout, first, groups = four_groups(tmp_path, n=16)
    late = frozenset(["d05", "d14"])
    fleet.absent = late
    before = await rounds(of, await warm(fleet, layout, first), fleet, 2)
    assert partition_of(before) == truth({i: g for i, g in groups.items() if i not in late})
    fleet.absent = frozenset()
    after = await rounds(of, before, fleet, 1)  # the last one: they come just in time to be given their model
    assert partition_of(after) == truth(groups)
    assert after.n_moved == 2
    assert set(after.installed) == set(groups)
    assert [c.model for c in after.clusters] == [c.model for c in before.clusters]


async def test_a_stranger_of_a_new_kind_founds_a_cluster_from_the_nearest_model(tmp_path) -> None:
    of = method(participation=0.2)
    fleet, layout, first, groups = four_groups(tmp_path, n=12)
    kind = groups["d03"]
    fleet.absent = frozenset(i for i, g in groups.items() if g == kind)
    before = await rounds(of, await warm(fleet, layout, first), fleet, 1)
    fleet.absent = fleet.absent - {"d03"}
    after = await of._describe(before, fleet)
    assert after.clusters[:-1] == before.clusters
    assert after.clusters[-1].members == ("d03",)
    assert after.clusters[-1].model in {cluster.model for cluster in before.clusters}


async def test_who_is_gone_for_long_has_left_and_an_empty_cluster_goes_with_its_model(tmp_path) -> None:
    of = method(rounds=40, participation=0.2)
    fleet, state, groups = await clustered(tmp_path, of, n=20)
    first = state.clusters[0].members
    fleet.absent = frozenset([*first[:-1], state.clusters[1].members[0]])
    after = await rounds(of, state, fleet, GONE_AFTER)
    assert partition_of(after) == partition_of(state)
    after = of._without_gone(after, after.round + 1)
    assert after.clusters[0].members == first[-1:]
    assert after.n_moved == 5
    assert not fleet.absent & (after.described.keys() | after.seen.keys())
    assert len(remove_devices(after.clusters, first)) == 3
    fleet.absent = frozenset()
    back = await rounds(of, after, fleet, 1)
    assert partition_of(back) == truth(groups)


async def test_a_device_whose_data_changed_moves_to_the_cluster_of_its_new_kind(tmp_path) -> None:
    of = method()
    fleet, state, groups = await clustered(tmp_path, of)
    sizes = {i: description.n_samples for i, description in state.described.items()}
    mover = "d00"
    model = next(i for i in groups if groups[i] != groups[mover] and sizes[i] != sizes[mover])
    fleet.give(mover, fleet.data(model))
    after = await of._describe(state, fleet)
    assert partition_of(after) == truth(groups | {mover: groups[model]})
    assert after.n_moved == 1
    fleet.asked = []
    await of._describe(after, fleet)
    assert fleet.asked == []  # nothing changed, so nobody is asked again


async def test_many_late_joiners_make_all_clusters_anew_and_models_are_inherited(tmp_path) -> None:
    of = method(participation=0.3)
    fleet, layout, first, groups = four_groups(tmp_path, n=16)
    fleet.absent = frozenset(i for i in groups if int(i[1:]) >= 12)  # a quarter of all
    before = await rounds(of, await warm(fleet, layout, first), fleet, 1)
    fleet.absent = frozenset()
    after = await of._describe(before, fleet)
    assert partition_of(after) == truth(groups)
    assert after.n_moved == 0
    for cluster in after.clusters:
        (old,) = (c for c in before.clusters if set(c.members) <= set(cluster.members))
        assert (cluster.model, cluster.bandit) == (old.model, old.bandit)


async def test_inheritance_has_one_term_per_member(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, limit=200)
    start = fleet.get(first, layout)
    ones = {t.name: np.ones(t.shape, np.float32) for t in layout.tensors}
    zeros = {name: 0 * array for name, array in ones.items()}
    a, b = Cluster(members=("a", "b", "c"), model=fleet.put(ones)), Cluster(members=("d",), model=fleet.put(zeros))
    state = FedEpcState(round=0, layout=layout, shared=first, clusters=(a, b))
    mean = fleet.get(inherit_model(["a", "b", "d", "new"], state, fleet), layout)
    np.testing.assert_allclose(mean.params, 2 / 3, rtol=1e-6)
    np.testing.assert_array_equal(fleet.get(inherit_model(["new"], state, fleet), layout).params, start.params)
    assert inherit_model(["a", "c"], state, fleet) == a.model


async def test_an_extractor_that_tells_nothing_apart_makes_one_cluster_and_the_log_says_so(tmp_path, caplog) -> None:
    of = method(rounds=2, warm_up=0)
    fleet, layout, first, groups = four_groups(tmp_path)
    dead = {t.name: np.full(t.shape, -1.0, np.float32) for t in layout.tensors}
    for worker in fleet.workers.values():
        worker.data.x_train[:] = np.abs(worker.data.x_train)
    state = msgspec.structs.replace(of.init(layout, first), extractor=fleet.put(dead))
    assert partition_of(await rounds(of, state, fleet, 1)) == {tuple(groups)}
    assert "event=one_group" in caplog.text


# --------------------------------------------------------------------------------------------- parts and options


async def test_other_clusterings(tmp_path) -> None:
    for number, options in enumerate(
        [
            {"clustering": "k-means", "n_clusters": 4},
            {"clustering": "agglomerative"},
            {"clustering": "agglomerative", "n_clusters": 4},
            {"clustering": "labels"},
        ]
    ):
        of = method(**options)
        fleet, layout, first, groups = four_groups(tmp_path / str(number), n=16)
        fleet.absent = frozenset(["d09"])
        state = await rounds(of, await warm(fleet, layout, first), fleet, 1)
        fleet.absent = frozenset()
        after = await of._describe(state, fleet)
        assert {c.members for c in remove_devices(after.clusters, {"d09"})} == partition_of(state), options
        if options["clustering"] == "labels":
            majority = {i: int(np.bincount(w.data.shared[1]).argmax()) for i, w in fleet.workers.items()}
            assert partition_of(after) == truth(majority)
        else:
            assert partition_of(after) == truth(groups), options


async def test_selections_ask_their_quota_of_each_cluster(tmp_path) -> None:
    asked = {}
    for selection in ("ccmab", "uniform", "fastest", "stratified"):
        of = method(kind=Unfair, participation=0.3, selection=selection, deadline="none")
        fleet, state, _ = await clustered(tmp_path / selection, of, n=20)
        fleet.asked = []
        state = await rounds(of, state, fleet, 4)
        turns = [[i for n, step, i in fleet.asked if step == "train" and n == 8 + k] for k in range(4)]
        for turn, cluster in itertools.product(turns, state.clusters):
            assert len(set(cluster.members) & set(turn)) == math.ceil(0.3 * len(cluster.members)) or (
                selection == "stratified"
            )
        asked[selection] = [set(turn) for turn in turns]
    assert all(turn == asked["fastest"][0] for turn in asked["fastest"])
    assert len({frozenset(turn) for turn in asked["uniform"]}) > 1
    assert all(len(turn) == 6 for turn in asked["stratified"])


async def test_stratified_clusters_take_turns_when_there_are_more_of_them_than_picks(tmp_path) -> None:
    of = method(participation=0.1, selection="stratified")
    fleet, state, _ = await clustered(tmp_path, of, n=20)
    fleet.asked = []
    await rounds(of, state, fleet, 2)
    asked = [i for _, step, i in fleet.asked if step == "train"]
    assert len(asked) == 4
    assert all(len(set(cluster.members) & set(asked)) == 1 for cluster in state.clusters)


async def test_a_cluster_of_devices_that_are_all_too_slow_skips_three_rounds(tmp_path) -> None:
    of = method(kind=Unfair, participation=0.5, deadline=1e-6)
    fleet, state, _ = await clustered(tmp_path, of)
    fleet.asked = []
    state = await rounds(of, state, fleet, 3)
    train = [(n, i) for n, step, i in fleet.asked if step == "train"]
    assert [n for n, _ in train] == [10] * len(state.clusters)
    fastest_of = {max(cluster.members) for cluster in state.clusters}  # the clock rises with the id
    assert {i for _, i in train} == fastest_of


def test_deadlines() -> None:
    assert method().make_bandit_settings().deadline_s == math.inf
    assert method(participation=0.5).make_bandit_settings().deadline_s is None
    assert method(participation=0.5, deadline="none").make_bandit_settings().deadline_s == math.inf
    assert method(deadline=3).make_bandit_settings().deadline_s == 3.0


@pytest.mark.parametrize(
    "options",
    [
        {"clustering": "kmeans"},
        {"deadline": -1},
        {"clusterings": "aidc"},
        {"sigma_dp": -0.1},
        {"sigma_dp": 0.1},
        {"budget": 0},
        {"budget": 1.0, "selection": "uniform"},
        {"extractor": "server"},
    ],
)
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ConfigError, match="option"):
        method(**options)


def test_a_third_of_the_rounds_warms_up_and_never_more_than_there_are() -> None:
    assert make_method("fedepc", MethodSettings(rounds=31))._warm_up == 10
    assert method(rounds=4)._warm_up == 4


# --------------------------------------------------------------------------------------------------- the stop rule


def losses(*values: float) -> list[RoundLoss]:
    return [RoundLoss(loss=value, n_samples=10) for value in values]


def test_a_cluster_has_converged_when_its_loss_falls_by_less_than_a_thousandth() -> None:
    assert not has_converged(losses(*[1.0] * 9))
    assert has_converged(losses(*[1.0] * 10))
    assert not has_converged(losses(*[1.0] * 5, *[0.998] * 5))
    assert has_converged(losses(*[1.0] * 5, *[0.9991] * 5))
    assert has_converged(losses(*[0.0] * 10))
    heavy = [RoundLoss(loss=1.0, n_samples=10)] * 9 + [RoundLoss(loss=0.0, n_samples=1000)]
    assert not has_converged(heavy)


async def test_a_converged_cluster_rests_until_somebody_joins(tmp_path) -> None:
    of = method(stop=True)
    fleet, layout, first, groups = four_groups(tmp_path, n=16)
    fleet.absent = frozenset(["d04"])
    state = await rounds(of, await warm(fleet, layout, first), fleet, 1)
    settled = tuple(msgspec.structs.replace(c, converged=True, losses=tuple(losses(1.0))) for c in state.clusters)
    state = msgspec.structs.replace(state, clusters=settled)
    fleet.asked = []
    resting = await rounds(of, state, fleet, 1)
    assert fleet.asked == []
    assert resting.clusters == settled
    fleet.absent = frozenset()
    after = await rounds(of, resting, fleet, 1)
    host = {i for i, g in groups.items() if g == groups["d04"]}
    assert {i for _, step, i in fleet.asked if step == "train"} == host
    assert [c.converged for c in after.clusters] == [not set(c.members) & host for c in after.clusters]


# ------------------------------------------------------------------------------------ clusters of updates (MCTC)


async def test_directions_of_the_warm_ups_model_place_late_joiners_and_devices_with_other_data(tmp_path) -> None:
    fleet, layout, first, groups = four_groups(tmp_path)
    of = method(clustering="mctc")
    late, stepped = "d11", "d00"
    fleet.absent = frozenset({late})
    state = await rounds(of, await warm(fleet, layout, first), fleet, 1)
    present = {i: g for i, g in groups.items() if i != late}
    assert partition_of(state) == truth(present)

    fleet.absent = frozenset()
    other = next(i for i in present if groups[i] != groups[stepped])
    own = fleet.data(other)
    kept = np.flatnonzero(~own.sensitive)[:-5]
    fleet.give(
        stepped,
        dataclasses.replace(own, x_train=own.x_train[kept], y_train=own.y_train[kept], sensitive=own.sensitive[kept]),
    )
    state = await rounds(of, state, fleet, 1)
    groups[stepped] = groups[other]
    assert partition_of(state) == truth(groups)
    described = [(r, i) for r, step, i in fleet.asked if step == "describe"]
    assert [i for r, i in described if r == 8] == [stepped, late]
    assert decode_state(encode_state(state), FedEpcState) == state


@pytest.mark.parametrize("clustering", ["labels", "mctc"])
def test_noise_is_of_profiles(clustering) -> None:
    """Whoever asks for noise must not believe that it covers an update or a label feature."""
    with pytest.raises(ConfigError, match=f"clustering={clustering} asks nobody for one"):
        method(clustering=clustering, sigma_dp=0.05)
