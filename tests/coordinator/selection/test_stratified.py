"""Clustered sampling: the table and the invariants of cfic.md sections 5 and 11."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.selection import stratified


def clients(sizes: list[int]) -> dict[int, list[str]]:
    return {k: [f"{k}-{i:02d}" for i in range(size)] for k, size in enumerate(sizes)}


def drawn_from(sizes: list[int], n: int, unlabelled: int, seed: int = 0) -> list[str]:
    others = [f"u-{i:02d}" for i in range(unlabelled)]
    return stratified(clients(sizes), n, np.random.default_rng(seed), others=others, last_visit={})


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
        found = stratified(clients([2] * m), n, np.random.default_rng((7, r)), last_visit=last_visit)
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
