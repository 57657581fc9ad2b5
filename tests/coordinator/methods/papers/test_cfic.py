"""CFIC (docs/methods/cfic.md) on real workers: registration, clusters, sampling, the step, no answers, bundles."""

import logging

import msgspec
import numpy as np
import pytest

from coordinator.aggregation.protection import Protection
from coordinator.methods.catalogue import make_method
from coordinator.methods.papers.cfic import CficState, group_by_feature
from coordinator.methods.parts.grouping import Description
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, manifests, predicted, rounds

EXACT = {"sgd": Sgd(steps=5), "codec": Codec.FLOAT32, "down": "float32"}


def skewed(home, n: int = 6, seed: int = 0):
    fleet, layout, first, _ = digits(home, n=n, how="dirichlet", alpha=0.1, seed=seed)
    return fleet, layout, first


def majority(worker) -> int:
    return int(np.bincount(worker.data.shared[1], minlength=10).argmax())


async def test_eager_devices_tell_their_majority_label_once_and_before_training(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=3, participation=0.5, **EXACT))
    state = await rounds(method, method.init(layout, first), fleet, 3)
    assert {i: d.label for i, d in state.described.items()} == {i: majority(w) for i, w in fleet.workers.items()}
    asked = [(r, step) for r, step, _ in fleet.asked]
    assert asked.count((1, "describe")) == 6
    assert {step for r, step in asked if r > 1} == {"train"}
    found = method.summarise(state)["clusters"]
    assert sorted(i for members in found.values() for i in members) == sorted(fleet.workers)


async def test_without_correction_and_clusters_it_is_fedavg_bit_for_bit(tmp_path) -> None:
    models = []
    for name, options in (("cfic", {"selection": "uniform", "correction": False}), ("fedavg", {})):
        fleet, layout, first = skewed(tmp_path / name)
        method = make_method(name, MethodSettings(rounds=3, participation=0.5, **EXACT, options=options))
        models.append((await run_rounds(method, method.init(layout, first), fleet)).model)
        assert not any(step.startswith("describe") for _, step, _ in fleet.asked)
    assert models[0] == models[1]


async def test_a_step_is_the_mean_and_the_clusters_direction(tmp_path) -> None:
    """The slow oracle: section 6 on models, one line a formula."""
    fleet, layout, first = skewed(tmp_path)
    options = {"alpha": 0.5, "beta": 0.3}
    mean = {"protection": Protection(average="mean"), **EXACT}
    method = make_method("cfic", MethodSettings(rounds=2, **mean, options=options))
    plain = make_method("fedavg", MethodSettings(rounds=2, **mean))
    state, h = method.init(layout, first), 0.0
    for r in (1, 2):
        w = fleet.get(state.model, layout).params.astype(np.float64)
        after = await rounds(method, state, fleet, 1)
        fleet.round = r
        alone = {}
        for i in fleet.workers:
            fleet.unresponsive = frozenset(fleet.workers) - {i}
            one = await plain.round(msgspec.structs.replace(plain.init(layout, state.model), round=r - 1), fleet)
            alone[i] = fleet.get(one.model, layout).params.astype(np.float64)
        fleet.unresponsive = frozenset()
        n = {i: worker.data.n_shared for i, worker in fleet.workers.items()}
        total = sum(n.values())
        direction = 0.0
        for members in group_by_feature(after, after.described).values():
            n_i = sum(n[i] for i in members)
            d = sum(n[i] / n_i * alone[i] for i in members) - w
            direction = direction + n_i / total * d / np.linalg.norm(d)
        h = 0.5 * h - 0.3 * direction
        expected = sum(n[i] / total * alone[i] for i in alone) - h
        np.testing.assert_allclose(fleet.get(after.model, layout).params, expected, atol=1e-5)
        np.testing.assert_allclose(fleet.get_tensors(after.memory)["h"], h, atol=1e-5)
        state = after


async def test_an_unresponsive_round_changes_neither_model_nor_memory(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=3, **EXACT))
    before = await rounds(method, method.init(layout, first), fleet, 1)
    fleet.unresponsive = frozenset(fleet.workers)
    after = await rounds(method, before, fleet, 1)
    assert (after.model, after.memory) == (before.model, before.memory)
    assert before.memory is not None


async def test_an_unresponsive_device_costs_one_deadline_and_rests(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=4, **EXACT))
    fleet.unresponsive = frozenset(["d02"])
    state = await rounds(method, method.init(layout, first), fleet, 2)
    assert [(r, step) for r, step, i in fleet.asked if i == "d02"] == [(1, "describe")]
    assert "d02" not in state.described
    fleet.unresponsive = frozenset()
    state = await rounds(method, state, fleet, 1)
    assert state.described["d02"].label == majority(fleet.workers["d02"])
    assert state.participations["d02"] == 1


async def test_late_joiners_and_changed_devices_are_asked_and_nobody_else_moves(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=4, participation=0.5, **EXACT))
    late = fleet.workers.pop("d05")
    before = await rounds(method, method.init(layout, first), fleet, 1)
    fleet.workers["d05"] = late
    fleet.incarnations = {"d01": "2"}
    after = await rounds(method, before, fleet, 1)
    assert {i for r, step, i in fleet.asked if (r, step) == (2, "describe")} == {"d01", "d05"}
    stepped = group_by_feature(after, after.described)
    for key, members in group_by_feature(before, before.described).items():
        assert set(members) <= set(stepped[key])
    assert after.described["d01"].incarnation == "2"


async def test_clusters_made_anew_ask_every_device_again(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=4, participation=0.5, **EXACT))
    before = await rounds(method, method.init(layout, first), fleet, 2)
    after = await rounds(method, method.recluster(before), fleet, 1)
    assert {i for r, step, i in fleet.asked if (r, step) == (3, "describe")} == set(fleet.workers)
    assert (after.round, group_by_feature(after, after.described)) == (3, group_by_feature(before, before.described))


async def test_every_round_asks_exactly_its_quota_with_the_base_from_each_cluster(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path, n=12, seed=3)
    method = make_method("cfic", MethodSettings(rounds=6, participation=0.8, **EXACT))
    state = await rounds(method, method.init(layout, first), fleet, 6)
    found = group_by_feature(state, state.described)
    base = {key: min(len(members), 10 // len(found)) for key, members in found.items()}
    for r in range(2, 7):
        cohort = {i for asked, step, i in fleet.asked if (asked, step) == (r, "train")}
        assert len(cohort) == 10
        assert all(len(cohort & set(members)) >= base[key] for key, members in found.items())
    assert set(state.visits.values()) == {6}


async def test_devices_without_samples_are_never_asked(tmp_path) -> None:
    fleet, layout, first = skewed(tmp_path, n=3)
    fleet.workers["d01"].data.sensitive[:] = True
    method = make_method("cfic", MethodSettings(rounds=2, **EXACT))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert {i for r, step, i in fleet.asked if step != "install"} == {"d00", "d02"}
    assert sorted(state.installed) == ["d00", "d01", "d02"]


@pytest.mark.parametrize("options", [{}, {"correction": False}, {"epsilon": 3.0}])
async def test_to_the_end_with_a_bundle_of_the_global_model_on_each_device(tmp_path, options) -> None:
    fleet, layout, first = skewed(tmp_path)
    method = make_method("cfic", MethodSettings(rounds=4, participation=0.5, options=options, sgd=Sgd(steps=10)))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert sorted(state.installed) == sorted(fleet.workers)
    assert decode_state(encode_state(state), CficState) == state
    for worker in fleet.workers.values():
        x = worker.data.x_train
        logits = worker.network.compute_logits(fleet.get(state.model, layout), x)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(predicted(worker, x), p / p.sum(axis=1, keepdims=True), atol=1e-4)


async def test_equal_seeds_give_equal_states_and_fine_tuning_ends_it(tmp_path) -> None:
    states = []
    for name in "ab":
        fleet, layout, first = skewed(tmp_path / name)
        method = make_method("cfic+ft", MethodSettings(rounds=3, participation=0.5, seed=7))
        states.append(await run_rounds(method, method.init(layout, first), fleet))
    assert encode_state(states[0]) == encode_state(states[1])
    assert len({manifest.candidates[0].part for manifest in manifests(fleet, states[1]).values()}) == 6


async def test_a_correction_that_outweighs_training_is_said_once(tmp_path, caplog) -> None:
    fleet, layout, first = skewed(tmp_path, n=2)
    settings = MethodSettings(rounds=12, sgd=Sgd(steps=1, learning_rate=1e-4), options={"beta": 1.0})
    method = make_method("cfic", settings)
    with caplog.at_level(logging.WARNING):
        await rounds(method, method.init(layout, first), fleet, 9)
        assert "event=long_correction" not in caplog.text
        await rounds(method, method.init(layout, first), fleet, 12)
    assert caplog.text.count("event=long_correction") == 1


async def test_a_step_that_is_not_finite_forgets_the_memory(tmp_path, caplog) -> None:
    fleet, layout, first = skewed(tmp_path, n=2)
    method = make_method("cfic", MethodSettings(rounds=3, **EXACT))
    state = await rounds(method, method.init(layout, first), fleet, 1)
    huge = fleet.put({"h": np.full(layout.n_params, -3.4e38, np.float32)})
    state = msgspec.structs.replace(state, memory=huge)
    loud = make_method("cfic", MethodSettings(rounds=3, **EXACT, options={"alpha": 0.99, "beta": 3e38}))
    after = await rounds(loud, state, fleet, 1)
    assert (after.model, after.memory) == (state.model, None)
    assert "event=diverged" in caplog.text


@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"beta": -0.1}, {"epsilon": 0.0}, {"correction": 2}])
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ConfigError, match="option of the method"):
        make_method("cfic", MethodSettings(options=options))


def test_clusters_are_those_with_a_feature_in_ascending_order() -> None:
    features = {"a": 4, "c": 1, "d": -1, "e": 4}
    described = {i: Description(label=f, n_samples=1) for i, f in features.items()}
    method = make_method("cfic", MethodSettings())
    state = msgspec.structs.replace(method.init(None, None), described=described)
    assert list(group_by_feature(state, ["e", "d", "c", "b", "a", "z"]).items()) == [(1, ["c"]), (4, ["a", "e"])]


# ------------------------------------------------------------------------------ parts that are exchanged for others


def cfic(rounds: int = 6, participation: float = 0.5, **options: object):
    return make_method("cfic", MethodSettings(rounds=rounds, participation=participation, **EXACT, options=options))


@pytest.mark.parametrize("clustering", ["aidc", "k-means", "agglomerative", "mctc"])
async def test_clusters_of_profiles_or_updates_are_made_after_a_third_of_the_rounds(clustering, tmp_path) -> None:
    fleet, layout, first, groups = digits(tmp_path, n=12, groups="labels", n_groups=2, alpha=100.0)
    method = cfic(rounds=30, clustering=clustering)
    state = await rounds(method, method.init(layout, first), fleet, 10)
    assert not state.described
    state = await rounds(method, state, fleet, 2)
    assert [(n, i) for n, step, i in fleet.asked if step == "describe"] == [(11, i) for i in sorted(groups)]
    found = group_by_feature(state, state.described)
    for members in found.values():
        assert len({groups[i] for i in members}) == 1, "no cluster has devices of both groups"
    assert set(state.visits) <= set(map(str, found))
    assert msgspec.structs.asdict(decode_state(encode_state(state), CficState)) == msgspec.structs.asdict(state)


@pytest.mark.parametrize("selection", ["ccmab", "fastest"])
async def test_the_selections_of_fedepc_choose_in_each_cluster(selection, tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=10, groups="labels", n_groups=2, alpha=100.0)
    method = cfic(selection=selection)
    state = await rounds(method, method.init(layout, first), fleet, 6)
    assert state.history[-1].loss is not None, "the bandits need the losses"
    found = group_by_feature(state, state.described)
    for k, members in found.items():
        known = set(state.bandits[str(k)].participations)
        assert known <= set(members)
    asked = [[i for n, step, i in fleet.asked if step == "train" and n == r] for r in range(2, 7)]
    assert all(asked)
    if selection == "fastest":  # the deadline keeps the slowest out of every cluster of several
        clocks = {device.id: device.context.cpu_ghz for device in fleet.get_devices()}
        slowest = {min(members, key=clocks.get) for members in found.values() if len(members) > 1}
        assert slowest
        assert not slowest & set(asked[0])


async def test_late_joiners_and_changed_data_make_the_clusters_of_profiles_anew(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=8, groups="labels", n_groups=2, alpha=100.0)
    method = cfic(rounds=9, participation=1.0, clustering="aidc", selection="ccmab")
    fleet.absent = frozenset({"d07"})
    before = await rounds(method, method.init(layout, first), fleet, 5)
    assert "d07" not in before.described
    assert before.bandits
    fleet.absent = frozenset()
    after = await rounds(method, before, fleet, 1)
    assert set(after.described) == set(fleet.workers)
    for key, bandit in after.bandits.items():
        if key in before.bandits and set(bandit.participations) & set(before.bandits[key].participations):
            break
    else:
        pytest.fail("no bandit went along")


def test_a_profile_is_not_what_epsilon_protects() -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        cfic(clustering="aidc", epsilon=1.0)
    with pytest.raises(ConfigError, match="did you mean 'k-means'"):
        cfic(clustering="kmeans")
    with pytest.raises(ConfigError, match="it is one of aidc, mctc, labels"):
        cfic(clustering="optics")
