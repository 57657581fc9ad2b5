"""SCMoE-PFL (docs/methods/scmoe_pfl.md) on a small fleet: clusters, experts, who sat out, convergence, bundles."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from coordinator.clustering import geometry, mctc
from coordinator.methods.papers.scmoe_pfl import PRESETS, Clusters, ScmoePfl, ScmoeState, find_own_clusters, list_starts
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import RoundSummary, decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from deploy import load as load_bundle
from edge_agent.steps.descriptions.describe_labels import compute_label_feature
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.messages import Role
from tests.support.simulation import digits, manifests, roles, rounds


def method_of(rounds: int = 4, participation: float = 1.0, **options: object) -> ScmoePfl:
    return ScmoePfl(
        MethodSettings(
            rounds=rounds,
            participation=participation,
            sgd=Sgd(steps=5),
            codec=Codec.FLOAT32,
            down="float32",
            options=options,
        )
    )


async def test_the_experts_are_the_means_of_their_members_models(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    method = method_of()
    after = await rounds(method, method.init(layout, first), fleet, 1)
    order = Train(starts=(Start(model=first),), sgd=method.settings.sgd, codec=Codec.FLOAT32)
    fleet.round = 1
    updates = select_updates(await fleet.run("train", {device.id: order for device in fleet.get_devices()}))
    start = fleet.get(first, layout).params.astype(np.float64)
    models = {i: start + fleet.get(u.update, layout).params for i, u in updates.items()}
    assert after.clusters is not None
    assert len(after.experts) == len(after.clusters.members) > 1
    for expert, members in zip(after.experts, after.clusters.members, strict=True):
        n = np.array([updates[i].n_samples for i in members])
        expected = n @ np.stack([models[i] for i in members]) / n.sum()
        np.testing.assert_allclose(fleet.get(expert, layout).params, expected, atol=1e-6)
    z = geometry.embed_gram(geometry.compute_gram(np.stack([models[i] - start for i in updates]).astype(np.float32)))
    found = mctc.mctc(z)
    assert after.clusters.members == tuple(tuple(list(updates)[i] for i in c) for c in found.clusters)


async def test_clusters_are_frozen_after_three_rounds_and_the_paper_makes_them_each_round(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    for method, made in ((method_of(9), 3), (method_of(9, preset="paper"), 5)):
        after = await rounds(method, method.init(layout, first), fleet, 5)
        assert after.clusters is not None
        assert after.clusters.made == made


async def test_one_cluster_is_fedavg(tmp_path) -> None:
    """Section 6.6: K = 1 gives one cluster of everybody."""
    from coordinator.methods.baselines.fedavg import FedAvg

    fleet, layout, first, _ = digits(tmp_path)
    method = method_of(n_clusters=1)
    after = await rounds(method, method.init(layout, first), fleet, 2)
    fedavg = FedAvg(MethodSettings(rounds=4, sgd=Sgd(steps=5), codec=Codec.FLOAT32, down="float32"))
    plain = fedavg.init(layout, first)
    for _ in range(2):
        fleet.round = plain.round + 1
        plain = await fedavg.advance(plain, fleet)
    (expert,) = after.experts
    np.testing.assert_allclose(fleet.get(expert, layout).params, fleet.get(plain.model, layout).params, atol=1e-6)


async def test_who_sat_out_is_attached_and_changes_no_expert(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=8)
    method = method_of(rounds=8)
    fleet.unresponsive = frozenset({"d07"})
    state = await rounds(method, method.init(layout, first), fleet, 3)
    assert state.clusters is not None
    assert "d07" not in {i for members in state.clusters.members for i in members}
    assert len(list_starts(state, "d07")) == len(state.experts), "unknown: all experts"
    fleet.unresponsive = frozenset()
    after = await rounds(method, state, fleet, 1)
    assert after.clusters == state.clusters
    assert after.attached["d07"]
    assert {s.cluster for s in list_starts(after, "d07")} == set(after.attached["d07"])


async def test_a_stored_direction_goes_stale(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6)
    method = method_of(rounds=20)
    state = await rounds(method, method.init(layout, first), fleet, 1)
    assert state.clusters is not None
    without = tuple(tuple(i for i in members if i != "d00") for members in state.clusters.members)
    clusters = msgspec.structs.replace(state.clusters, members=tuple(m for m in without if m))
    fresh = msgspec.structs.replace(state, clusters=clusters, seen=state.seen | {"d01": 6})
    assert "d00" in method._attach(fresh, fleet).attached
    stale = msgspec.structs.replace(fresh, seen=state.seen | {"d01": 7})
    assert method._attach(stale, fleet).attached == {}


async def test_a_cluster_without_members_this_round_keeps_its_expert(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6)
    method = method_of(rounds=9)
    state = await rounds(method, method.init(layout, first), fleet, 3)
    assert state.clusters is not None
    fleet.unresponsive = frozenset(state.clusters.members[0])
    after = await rounds(method, state, fleet, 1)
    assert after.experts[0] == state.experts[0]
    assert any(a != b for a, b in zip(after.experts, state.experts, strict=True))


async def test_an_unresponsive_round_changes_nothing_but_the_count(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path)
    fleet.unresponsive = frozenset(device.id for device in fleet.get_devices())
    method = method_of()
    after = await rounds(method, method.init(layout, first), fleet, 1)
    assert (after.round, after.experts, after.clusters, after.directions) == (1, (), None, None)


def state_with(layout, first, accuracy, **fields) -> ScmoeState:
    history = (RoundSummary(round=1, asked=1, answered=1, accuracy=accuracy, loss=None),)
    return ScmoeState(round=5, layout=layout, initial_model=first, history=history, **fields)


async def test_ten_rounds_without_progress_end_it_with_the_best_experts(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = method_of(rounds=50)
    other = fleet.put(unflatten(dataclasses.replace(fleet.get(first, layout)), layout))
    clusters = Clusters(made=1, members=(("d00",),), tau=0.5, separability=None, silhouette=0.0)
    before = state_with(layout, first, 0.5, experts=(first,), clusters=clusters)
    better = method._record_best(state_with(layout, first, 0.8, experts=(other,), clusters=clusters), before)
    assert (better.best, better.best_accuracy, better.since_best) == ((first,), 0.8, 0)
    state = better
    for _ in range(9):
        state = method._record_best(msgspec.structs.replace(state, round=6), state)
        assert state.round == 6
    last = method._record_best(state, state)
    assert last.round == 50
    assert last.experts == better.best


async def test_the_best_experts_come_back_with_the_clusters_that_devices_were_attached_to_then(tmp_path) -> None:
    """Later clusters have other numbers, and there may be more of them."""
    _, layout, first, _ = digits(tmp_path, n=4)
    method = method_of(rounds=50, freeze_after=0)

    def made(*members: tuple[str, ...]) -> Clusters:
        return Clusters(made=1, members=members, tau=0.5, separability=None, silhouette=0.0)

    good = state_with(layout, first, 0.5, experts=(first,), clusters=made(("d00", "d01")), attached={"d03": (0,)})
    later = state_with(
        layout, first, 0.8, experts=(first,) * 3, clusters=made(("d00",), ("d01",), ("d02",)), attached={"d03": (2,)}
    )
    state = method._record_best(later, good)
    for _ in range(10):
        state = method._record_best(state, state)
    assert (state.round, len(state.experts)) == (50, 1)
    assert find_own_clusters(state, "d03") == (0,)
    assert list_starts(state, "d03") == (Start(model=first, cluster=0),)


@pytest.mark.parametrize(
    "options",
    [{}, {"preset": "paper"}, {"clustering": "k-means"}],
)
async def test_it_ends_in_a_mixture_on_every_device(tmp_path, options) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    method = method_of(rounds=3, participation=0.75, **options)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert decode_state(encode_state(state), ScmoeState) == state
    assert set(state.installed) == {f"d{i:02d}" for i in range(4)}
    for device_id, manifest in manifests(fleet, state).items():
        found = roles(fleet, state)[device_id]
        assert found[0] is Role.PRIVATE
        assert len(found) > 1
        assert manifest.max_abs_diff < 1e-4
        prediction = load_bundle(tmp_path / device_id / "bundles" / "1").predict(np.zeros((2, 1, 8, 8), np.float32))
        np.testing.assert_allclose(prediction.probabilities.sum(axis=1), 1, atol=1e-5)
    if options.get("clustering") == "k-means":
        assert all(len(find_own_clusters(state, i)) == 1 for members in state.clusters.members for i in members)
    assert method.summarise(state)["clusters"]


@pytest.mark.parametrize("clustering", ["k-means", "agglomerative"])
async def test_a_rival_makes_as_many_clusters_as_it_is_told_or_as_mctc(tmp_path, clustering) -> None:
    """The number of a preset is MCTC's upper bound, not theirs."""
    fleet, layout, first, _ = digits(tmp_path, n=8, limit=400)
    for options in ({}, {"preset": "paper"}):
        method = method_of(3, clustering=clustering, n_clusters=5, **options)
        told = await rounds(method, method.init(layout, first), fleet, 1)
        assert len(told.clusters.members) == 5
        own, rival = method_of(3, **options), method_of(3, clustering=clustering, **options)
        counts = [(await rounds(of, of.init(layout, first), fleet, 1)).clusters for of in (own, rival)]
        assert len(counts[0].members) == len(counts[1].members)


async def test_label_features_make_the_clusters_and_who_comes_late_joins_its_own(tmp_path) -> None:
    """Each device tells its label once; who sat out joins the cluster of its label, whatever its direction."""
    fleet, layout, first, _ = digits(tmp_path, n=8, how="dirichlet", alpha=0.1, limit=600)
    psi = {
        i: compute_label_feature(np.bincount(w.data.shared[1], minlength=10).tolist()) for i, w in fleet.workers.items()
    }
    late = next(i for i in psi if list(psi.values()).count(psi[i]) > 1)
    fleet.absent = frozenset({late})
    method = method_of(8, clustering="labels")
    state = await rounds(method, method.init(layout, first), fleet, 4)
    present = [i for i in psi if i != late]
    by_label = {frozenset(i for i in present if psi[i] == label) for label in {psi[i] for i in present}}
    assert set(map(frozenset, state.clusters.members)) == by_label
    fleet.absent = frozenset()
    state = await rounds(method, state, fleet, 1)
    (k,) = state.attached[late]
    assert {psi[i] for i in state.clusters.members[k]} == {psi[late]}
    assert sorted(i for _, step, i in fleet.asked if step == "labels") == sorted(psi)


async def test_uploads_do_not_depend_on_sensitive_samples(tmp_path) -> None:
    """Section 16, property 16: labels of D_H permuted leave every uploaded byte the same."""
    digests = []
    for turn in range(2):
        fleet, _, first, _ = digits(tmp_path / str(turn), n=3, limit=300)
        for worker in fleet.workers.values() if turn else ():
            data = worker.data
            y = data.y_train.copy()
            y[data.sensitive] = np.roll(y[data.sensitive], 1)
            worker.data = dataclasses.replace(data, y_train=y)
        order = Train(starts=(Start(model=first),), sgd=Sgd(steps=5), choose="accuracy")
        updates = select_updates(await fleet.run("train", {device.id: order for device in fleet.get_devices()}))
        digests.append([u.update.digest for u in updates.values()])
    assert digests[0] == digests[1]


def test_more_experts_than_an_order_holds_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"n_clusters.*<= 64"):
        method_of(n_clusters=70)
    assert method_of(n_clusters=64).options.n_clusters == 64


async def test_of_more_experts_than_an_order_holds_a_device_without_cluster_is_offered_the_largest(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    members = tuple((f"x{k}", f"y{k}")[: 1 + (k >= 6)] for k in range(70))
    made = Clusters(made=1, members=members, tau=0.5, separability=None, silhouette=0.0)
    method = method_of(clustering="labels")
    state = msgspec.structs.replace(method.init(layout, first), round=4, clusters=made, experts=(first,) * 70)
    assert [start.cluster for start in list_starts(state, "d00")] == list(range(6, 70))
    assert [start.cluster for start in list_starts(state, "x3")] == [3]
    fleet.round = 5
    assert select_updates(await fleet.run("train", {"d00": method._make_order(state, "d00")}))


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'preset'"):
        method_of(presett="paper")
    with pytest.raises(ConfigError, match="n_clusters"):
        method_of(n_clusters=0)


def test_what_is_given_stands_above_the_preset() -> None:
    assert method_of(preset="paper").make_parameters() == PRESETS["paper"]
    given = method_of(
        preset="paper", n_clusters=3, freeze_after=2, private_data="all", private_steps=0
    ).make_parameters()
    expected = {"n_clusters": 3, "freeze_after": 2, "private_data": "all", "private_steps": 0}
    assert given == msgspec.structs.replace(PRESETS["paper"], **expected)
