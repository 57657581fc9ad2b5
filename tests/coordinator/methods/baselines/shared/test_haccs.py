"""HACCS: its weights, who is drawn and chosen, clusters on the paper's deals, a round, noise, and who is asked anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import OPTICS
from sklearn.metrics import adjusted_rand_score

from coordinator.fleet.fleet import Answer
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.baselines.shared.haccs import (
    Haccs,
    choose_fastest,
    compute_weights,
    find_alike,
    group,
)
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from fedge.errors import ConfigError
from fedge.privacy.egress import PRESETS, Rules
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import Codec
from tests.support.simulation import digits, rounds

EXACT = {"sgd": Sgd(steps=4), "codec": Codec.FLOAT32, "down": "float32"}


def made(home: Path, *, n: int = 6, options: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, ...]:
    fleet, layout, first, group_of = digits(home, n=n, limit=600, alpha=100.0, n_groups=3, groups="labels")
    method = Haccs(MethodSettings(**{"rounds": 3, "options": options or {}, **EXACT, **changes}))
    return fleet, layout, method, method.init(layout, first), group_of


# -------------------------------------------------------------------------------------------- Eqs. (6) and (7)


def test_the_weights_by_hand() -> None:
    """Losses 1, 3 and unknown (so 3) of 7; seconds 10, 5 and 0 of 10."""
    losses, seconds = np.array([1.0, 3.0, np.nan]), np.array([10.0, 5.0, 0.0])
    np.testing.assert_allclose(compute_weights(losses, seconds, rho=0.2), [0.8 / 7, 0.1 + 2.4 / 7, 0.2 + 2.4 / 7])
    np.testing.assert_allclose(compute_weights(losses, seconds, rho=1.0), [0, 0.5, 1])
    np.testing.assert_allclose(compute_weights(np.full(2, np.nan), seconds[:2], rho=0.0), [0.5, 0.5])
    np.testing.assert_allclose(compute_weights(np.zeros(2), np.zeros(2), rho=0.5), [0.25, 0.25])


def test_clusters_are_drawn_as_often_as_their_weights_say() -> None:
    """Algorithm 1: k draws with replacement, so one draw of three clusters has the shares theta."""
    clusters, seconds = [["a", "b"], ["c"], ["d", "e"]], {"a": 4.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 0.0}
    losses = {"a": 2.0, "b": 4.0, "c": 1.0, "d": 1.0}
    theta = compute_weights(np.array([3.0, 1.0, 1.0]), np.array([4.0, 2.0, 0.5]), rho=0.5)
    rng, n = np.random.default_rng(0), 4000
    drawn = Counter(choose_fastest(clusters, losses, seconds, 1, rho=0.5, rng=rng)[0] for _ in range(n))
    assert set(drawn) == {"a", "c", "e"}, "the fastest of each, the lowest id on a tie"
    for i, p in zip(("a", "c", "e"), theta / theta.sum(), strict=True):
        assert abs(drawn[i] - n * p) < 5 * np.sqrt(n * p * (1 - p))


def test_a_cluster_that_is_used_up_is_drawn_no_more() -> None:
    clusters, seconds = [["a"], ["b", "c", "d"]], {"a": 1.0, "b": 3.0, "c": 2.0, "d": 1.5}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert set(choose_fastest(clusters, {"a": 9.0}, seconds, 4, rho=0.5, rng=rng)) == set(seconds)
        three = choose_fastest(clusters, {}, seconds, 3, rho=1.0, rng=rng)
        assert set(three) in ({"a", "d", "c"}, {"d", "c", "b"})
    assert choose_fastest(clusters, {}, seconds, 9, rho=0.0, rng=np.random.default_rng(0)) == ["a", "d", "c", "b"]


def test_a_claimed_loss_counts_as_ten_times_the_median_at_most() -> None:
    clusters, seconds = [["a"], ["b"], ["c"], ["liar"]], dict.fromkeys(("a", "b", "c", "liar"), 1.0)
    losses = {"a": 1.0, "b": 1.0, "c": 1.0, "liar": 1e9}
    rng = np.random.default_rng(0)
    drawn = Counter(choose_fastest(clusters, losses, seconds, 1, rho=0.0, rng=rng)[0] for _ in range(2000))
    assert drawn["liar"] / 2000 == pytest.approx(10 / 13, abs=0.05)


# -------------------------------------------------------------------------------------------------- clusters


def deal(majority: float, others: tuple[float, ...], n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The paper's deal: device i has the label i mod 10 most often, and three others drawn at random."""
    shares = np.zeros((n, 10))
    for i in range(n):
        shares[i, i % 10] = majority
        shares[i, rng.permutation(np.delete(np.arange(10), i % 10))[:3]] = others
    return shares


def rand_index(labels: NDArray[np.intp], n: int) -> float:
    alone = np.where(labels < 0, 100 + np.arange(n), labels)
    return float(adjusted_rand_score(np.arange(n) % 10, alone))


def test_clusters_are_the_majority_labels_of_the_papers_deals_and_the_printed_distance_parts_them() -> None:
    """Sections V-A (75 / 12 / 7 / 6 %, 50 devices) and V-D (70 / 10 / 10 / 10 %, 20 devices), ten draws each."""
    for majority, others, n in ((0.75, (0.12, 0.07, 0.06), 50), (0.7, (0.1, 0.1, 0.1), 20)):
        found, printed = [], []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            shares = deal(majority, others, n, rng)
            told = np.stack([rng.multinomial(300, p) / 300 for p in shares])
            labels = np.empty(n, np.intp)
            for k, members in enumerate(find_alike(told)):
                labels[list(members)] = k
            found.append(rand_index(labels, n))
            hellinger = np.sqrt(told / 2)  # whose Euclidean distances are those of Eq. (3)
            printed.append(rand_index(OPTICS(min_samples=2).fit_predict(hellinger), n))
        assert np.mean(found) > 0.9
        assert np.mean(found) > np.mean(printed)


def test_devices_that_are_not_there_or_told_nothing() -> None:
    assert group((("a", "c"), ("b",)), ["c", "d", "a", "e"]) == [["a", "c"], ["d"], ["e"]]
    assert group((), ["b", "a"]) == [["b"], ["a"]]


# ------------------------------------------------------------------------------------------------ whole rounds


async def test_it_clusters_devices_of_equal_labels_and_takes_the_fastest_of_each(tmp_path: Path) -> None:
    fleet, _, method, state, group_of = made(tmp_path, participation=1 / 3, rounds=8)
    seconds: list[Mapping[str, float]] = []
    fleet.on_event = lambda event, fields: seconds.append(fields["seconds"]) if event == "chosen" else None
    state = await rounds(method, state, fleet, 8)
    for members in state.clusters:
        assert len({group_of[i] for i in members}) == 1
    assert len(state.clusters) < len(fleet.workers)
    assert sorted(i for members in state.clusters for i in members) == sorted(fleet.workers)
    assert method.summarise(state)["clusters"] == {str(k): list(ids) for k, ids in enumerate(state.clusters)}
    cohorts = [{i for r, step, i in fleet.asked if (r, step) == (number, "train")} for number in range(1, 9)]
    for cohort, expected in zip(cohorts, seconds, strict=True):
        assert len(cohort) == 2
        for members in state.clusters:
            drawn = cohort.intersection(members)
            assert drawn == set(sorted(members, key=lambda i: (expected[i], i))[: len(drawn)])
    assert len(set().union(*cohorts)) > 2, "not always the same clusters"


async def test_losses_are_those_of_the_last_training_and_a_round_is_fedavg_of_the_cohort(tmp_path: Path) -> None:
    fleet, layout, method, state, _ = made(tmp_path, participation=0.5)
    first = fleet.get(state.model, layout).params
    after = await rounds(method, state, fleet, 1)
    updates = {a.device_id: a.result for a in fleet.heard if isinstance(a.result, Trained)}
    assert after.losses == {i: u.loss_before for i, u in updates.items()}
    assert len(updates) == 3
    n = np.array([u.n_samples for u in updates.values()])
    deltas = np.stack([fleet.get(u.update, layout).params for u in updates.values()])
    np.testing.assert_allclose(fleet.get(after.model, layout).params, first + n @ deltas / n.sum(), atol=1e-6)
    (order,) = {id(a): a for _, _, _, a in fleet.orders if isinstance(a, Train)}.values()
    assert order.measure


async def test_with_everybody_it_is_fedavg(tmp_path: Path) -> None:
    fleet, layout, method, state, _ = made(tmp_path / "a")
    other, _, first, _ = digits(tmp_path / "b", limit=600, alpha=100.0, n_groups=3, groups="labels")
    fedavg = FedAvg(MethodSettings(rounds=3, **EXACT))  # type: ignore[arg-type]
    one, two = await run_rounds(method, state, fleet), await run_rounds(fedavg, fedavg.init(layout, first), other)
    assert one.model == two.model


async def test_who_comes_later_or_has_changed_is_asked_and_who_never_answers_rests(tmp_path: Path) -> None:
    fleet, layout, method, state, _ = made(tmp_path, rounds=4)
    fleet.absent, fleet.unresponsive = frozenset({"d05"}), frozenset({"d02"})
    before = await rounds(method, state, fleet, 1)
    assert set(before.described) == {"d00", "d01", "d03", "d04"}
    assert [step for _, step, i in fleet.asked if i == "d02"] == ["describe"]
    fleet.absent, fleet.unresponsive = frozenset(), frozenset()
    fleet.asked.clear()
    changed = method.begin_campaign(before, ["d00"])
    after = await rounds(method, changed, fleet, 1)
    assert {i for _, step, i in fleet.asked if step == "describe"} == {"d00", "d05"}
    grown = method.add_classes(after, layout, lambda model: model)
    assert (grown.described, grown.clusters) == ({}, ())


async def test_for_a_device_that_fails_others_of_its_cluster_train(tmp_path: Path) -> None:
    fleet, _, method, state, _ = made(tmp_path, participation=1 / 6, rounds=12, options={"rho": 0.0})
    fleet.change = fail_training_of("d05")
    state = await rounds(method, state, fleet, 12)
    (own,) = (members for members in state.clusters if "d05" in members)
    assert {i for _, step, i in fleet.asked if step == "train"} & set(own) >= {"d05", *own[:-1]}


def fail_training_of(device: str) -> Any:
    def change(label: str, answers: dict[str, Answer]) -> None:
        if label == "train" and device in answers:
            answers[device] = Answer(device, None)

    return change


async def test_where_owners_withhold_labels_or_losses_every_device_stands_for_itself(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=400)
    fleet._rules = dict.fromkeys(fleet.workers, Rules(PRESETS["strict"]))
    method = Haccs(MethodSettings(rounds=2, participation=0.5, **EXACT))  # type: ignore[arg-type]
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert (state.clusters, state.losses) == ((), {})
    assert set(state.installed) == set(fleet.workers)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"selection": "uniform"}, "it takes the fastest devices of clusters that it draws"),
        ({"clustering": "labels"}, "it clusters devices by the shares of their classes"),
        ({"rho": 1.5}, "rho"),
    ],
)
def test_what_it_refuses(options: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Haccs(MethodSettings(options=dict(options)))
