"""Who trains in a round: draws, the fastest, and all selections under one signature."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.selection import ccmab
from coordinator.selection.select import choose, compute_cohort_size, draw_stratified, draw_uniform, select_fastest

# ------------------------------------------------------ uniform: the size of the cohort (cfic.md section 5) and draws


@pytest.mark.parametrize(
    ("n_clients", "share", "size"),
    [(0, 0.3, 0), (1, 0.01, 1), (5, 0.1, 1), (5, 0.3, 2), (100, 0.3, 30), (6, 0.5, 3), (5, 0.5, 3), (7, 1.0, 7)],
)
def test_the_share_is_rounded_half_up_and_one_client_is_always_asked(n_clients, share, size) -> None:
    assert compute_cohort_size(n_clients, share) == size


def test_rounding_errors_of_the_share_do_not_lose_a_client() -> None:
    assert 45 * 0.7 < 31.5
    assert compute_cohort_size(45, 0.7) == 32


def test_a_draw_is_of_different_clients_in_ascending_order_and_the_same_for_a_seed() -> None:
    ids = [f"d{i:02d}" for i in range(20)]
    drawn = draw_uniform(ids, 7, np.random.default_rng(3))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 7
    assert draw_uniform(ids, 7, np.random.default_rng(3)) == drawn
    assert draw_uniform(ids, 7, np.random.default_rng(4)) != drawn


def test_more_than_there_are_and_none_at_all() -> None:
    assert draw_uniform(["a", "b"], 5, np.random.default_rng(0)) == ["a", "b"]
    assert draw_uniform([], 5, np.random.default_rng(0)) == []
    assert draw_uniform(["a"], 0, np.random.default_rng(0)) == []


def test_all_clients_are_as_likely() -> None:
    rng = np.random.default_rng(0)
    counts = Counter(i for _ in range(2000) for i in draw_uniform(list("abcde"), 2, rng))
    # 800 expected, standard deviation sqrt(2000 * 0.4 * 0.6) = 22: beyond five of them once in 10^6
    assert all(abs(counts[i] - 800) < 5 * 22 for i in "abcde")


# ---------------------------------------------- stratified: the table and the invariants of cfic.md sections 5 and 11


def clients(sizes: list[int]) -> dict[int, list[str]]:
    return {k: [f"{k}-{i:02d}" for i in range(size)] for k, size in enumerate(sizes)}


def drawn_from(sizes: list[int], n: int, unlabelled: int, seed: int = 0) -> list[str]:
    others = [f"u-{i:02d}" for i in range(unlabelled)]
    return draw_stratified(clients(sizes), n, np.random.default_rng(seed), others=others, last_visit={})


@pytest.mark.parametrize(
    ("sizes", "n", "unlabelled", "base", "extra"),
    [
        ([10, 10, 10, 10], 12, 0, [3, 3, 3, 3], 0),
        ([12, 9, 7], 10, 0, [3, 3, 3], 1),
        ([1, 2, 30], 12, 0, [1, 2, 4], 5),
        ([4, 4], 7, 10, [3, 3], 1),
        ([2, 3], 9, 0, [2, 2], 1),
        ([], 6, 20, [], 6),
    ],
)
def test_the_table(sizes: list[int], n: int, unlabelled: int, base: list[int], extra: int) -> None:
    for seed in range(20):
        found = drawn_from(sizes, n, unlabelled, seed)
        counts = [sum(i.startswith(f"{k}-") for i in found) for k in range(len(sizes))]
        assert all(count >= least for count, least in zip(counts, base, strict=True))
        assert len(set(found)) == len(found) == sum(base) + extra


def test_fewer_picks_than_clusters_take_one_client_each() -> None:
    found = drawn_from([5] * 10, 4, 3)
    assert len({i.split("-")[0] for i in found}) == 4
    assert not any(i.startswith("u") for i in found)


@given(
    st.lists(st.integers(1, 12), max_size=12),
    st.integers(0, 40),
    st.integers(0, 10),
    st.integers(0, 2**32),
)
def test_exactly_as_many_as_asked_for_and_nobody_twice(sizes: list[int], n: int, unlabelled: int, seed: int) -> None:
    found = drawn_from(sizes, n, unlabelled, seed)
    there_are = sum(sizes) + unlabelled
    assert len(set(found)) == len(found) == min(n, there_are)
    assert found == sorted(found)
    assert drawn_from(sizes, n, unlabelled, seed) == found


@given(st.integers(2, 12), st.data())
def test_every_cluster_has_its_turn(m: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, m - 1))
    first = data.draw(st.sets(st.integers(0, m - 1)))  # what round 1 happened to visit
    last_visit = dict.fromkeys(first, 1)
    window = -(-m // n)
    visits: list[set[int]] = []
    for r in range(2, 2 + 3 * window):
        found = draw_stratified(clients([2] * m), n, np.random.default_rng((7, r)), last_visit=last_visit)
        visits.append({int(i.split("-")[0]) for i in found})
        last_visit |= dict.fromkeys(visits[-1], r)
    for start in range(len(visits) - window + 1):
        assert set().union(*visits[start : start + window]) == set(range(m))


def test_ties_between_clusters_are_broken_at_random() -> None:
    seen = {drawn_from([1] * 5, 1, 0, seed)[0] for seed in range(60)}
    assert seen == {f"{k}-00" for k in range(5)}  # one of them missing: 5 * 0.8^60 = 8e-6


def test_extra_picks_reach_clusters_and_unlabelled_alike() -> None:
    extras = {i.split("-")[0] for seed in range(60) for i in drawn_from([2, 2], 3, 2, seed)}
    assert "u" in extras
    assert any(sum(i.startswith("0-") for i in drawn_from([2, 2], 3, 2, seed)) == 2 for seed in range(60))


# ------------------------------------------------------------------- fastest: by what devices took and by their clock

IDS = ["a", "b", "c", "d"]


def test_measured_times_count_before_the_clock() -> None:
    assert select_fastest(IDS, 2, {"a": 1.0, "b": 4.0, "c": 2.0, "d": 3.0}, {"b": 9.0}) == ["a", "c"]


def test_without_measurements_the_clock_decides() -> None:
    assert select_fastest(IDS, 2, {}, {"a": 1.0, "b": 1.5, "c": 2.0, "d": 0.5}) == ["b", "c"]


def test_a_clock_is_turned_into_time_by_the_cycles_of_the_others() -> None:
    # a and b: 6 * 1 = 3 * 2 = 6 cycles (10^9); d at 4 GHz needs 1.5 s, c at 0.5 GHz 12 s
    clocks = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
    assert select_fastest(IDS, 1, {"a": 6.0, "b": 3.0}, clocks) == ["d"]
    assert select_fastest(IDS, 3, {"a": 6.0, "b": 3.0}, clocks) == ["a", "b", "d"]


def test_unknown_devices_come_late_and_unresponsive_ones_last() -> None:
    assert select_fastest(IDS, 3, {"a": math.inf, "b": 2.0}, {"c": 1.0}) == ["b", "c", "d"]
    assert select_fastest(IDS, 4, {"a": math.inf, "b": 2.0}, {"c": 1.0}) == IDS


def test_ties_go_to_the_lowest_id_whatever_the_order() -> None:
    assert select_fastest(["d", "b", "c", "a"], 2, dict.fromkeys(IDS, 1.0), {}) == ["a", "b"]
    assert select_fastest([], 2, {}, {}) == []


# ---------------------------------------------------------------- choose: the same deadline and quota, another choice

SETTINGS = ccmab.Settings(quota=0.5, deadline_s=math.inf, fairness=False)


def arms(k: int, n: int) -> list[ccmab.Arm]:
    return [ccmab.Arm(id=f"{k}{i}", n_samples=10, work=100.0, cpu_ghz=1.0 + i) for i in range(n)]


def chosen(how, sizes, settings=SETTINGS, visits=None, seed=(0, 1)) -> dict[int, tuple[str, ...]]:
    of = {k: arms(k, n) for k, n in enumerate(sizes)}
    bandits = {k: ccmab.State() for k in of}
    found = choose(how, of, bandits, settings, seed=seed, last_visit=visits or dict.fromkeys(of, 0))
    return {k: selection.ids for k, (selection, _) in found.items()}


@pytest.mark.parametrize("how", ["ccmab", "uniform", "fastest"])
def test_each_cluster_sends_its_quota(how) -> None:
    assert {k: len(ids) for k, ids in chosen(how, [8, 3, 1]).items()} == {0: 4, 1: 2, 2: 1}


def test_stratified_draws_about_as_many_from_each_cluster() -> None:
    """cfic.md section 5: sizes 1, 2 and 30, 12 of them: 1, 2 and 4, and 5 more, which are in the third alone."""
    settings = ccmab.Settings(quota=12 / 33, deadline_s=math.inf, fairness=False)
    assert {k: len(ids) for k, ids in chosen("stratified", [1, 2, 30], settings).items()} == {0: 1, 1: 2, 2: 9}


def test_stratified_clusters_take_turns() -> None:
    settings = ccmab.Settings(quota=0.25, deadline_s=math.inf, fairness=False)
    assert set(chosen("stratified", [2, 2, 2, 2], settings, visits={0: 5, 1: 4, 2: 1, 3: 2})) == {2, 3}


def test_the_fastest_are_those_and_the_deadline_binds_everybody() -> None:
    assert chosen("fastest", [8])[0] == ("04", "05", "06", "07")
    tight = ccmab.Settings(quota=1.0, deadline_s=100 * 0.1 / 5, fairness=False)
    for how in ("ccmab", "uniform", "fastest", "stratified"):
        assert chosen(how, [8], tight)[0] == ("04", "05", "06", "07"), how


def test_a_round_draws_the_same_whenever_it_is_run_and_clusters_draw_apart() -> None:
    assert chosen("uniform", [9, 9]) == chosen("uniform", [9, 9])
    draws = [chosen("uniform", [9, 9], seed=(0, r)) for r in range(20)]
    assert len({d[0] for d in draws}) > 5
    assert any([i[1:] for i in d[0]] != [i[1:] for i in d[1]] for d in draws)


@pytest.mark.parametrize("how", ["ccmab", "uniform", "fastest", "stratified"])
def test_without_devices_nobody_is_chosen(how) -> None:
    assert chosen(how, []) == {}
    assert not any(chosen(how, [0, 0]).values())
