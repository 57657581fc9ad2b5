"""All selections under one signature: same deadline and quota, another choice."""

import math

import pytest

from coordinator.selection import ccmab, choose

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
