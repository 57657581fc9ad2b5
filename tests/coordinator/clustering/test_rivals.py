"""k-means: planted directions, invariances; average linkage: against AIDC's own merging; the edges of both."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clustering.aidc import compute_divergences, merge
from coordinator.clustering.rivals import agglomerative, kmeans


def planted(seed: int, *, n: int = 40, k: int = 4, d: int = 20):
    """Rows of random lengths around k orthogonal directions, and the true partition."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(d, k)))[0].T
    groups = np.arange(n) % k
    rows = directions[groups] + 0.1 * rng.normal(size=(n, d))
    return rows * rng.uniform(0.1, 10, (n, 1)), tuple(tuple(range(g, n, k)) for g in range(k))


@pytest.mark.parametrize("seed", range(5))
def test_planted_directions_are_found_whatever_their_lengths(seed) -> None:
    rows, truth = planted(seed)
    assert kmeans(rows, n_clusters=4, rng=np.random.default_rng(seed)) == truth


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 12), k=st.integers(1, 6), seed=st.integers(0, 99))
def test_it_is_a_partition_into_at_most_k_parts_that_a_seed_repeats(n, k, seed) -> None:
    rows = np.random.default_rng(seed).integers(-1, 2, (n, 3)).astype(np.float64)
    before = rows.copy()
    found = kmeans(rows, n_clusters=k, rng=np.random.default_rng(seed))
    assert sorted(i for cluster in found for i in cluster) == list(range(n))
    assert len(found) <= k
    assert list(found) == sorted(found)
    assert found == kmeans(rows * 8, n_clusters=k, rng=np.random.default_rng(seed))
    np.testing.assert_array_equal(rows, before)


def test_fewer_directions_than_clusters() -> None:
    rows = np.array([[1.0, 0], [2, 0], [0, 1], [0, 0]])
    assert kmeans(rows, n_clusters=4, rng=np.random.default_rng(0)) == ((0, 1), (2,), (3,))


def distances(seed: int, n: int):
    return compute_divergences(np.random.default_rng(seed).uniform(0, 1, (n, 6)), unit=0.2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(0, 14), threshold=st.floats(0.01, 3))
def test_cut_at_a_threshold_it_is_aidcs_merging_of_single_devices(seed, n, threshold) -> None:
    d = distances(seed, n)
    found = agglomerative(d, threshold=threshold)
    assert found == merge(d, [[i] for i in range(n)], threshold)
    assert all(d[np.ix_(a, b)].mean() >= threshold for k, a in enumerate(found) for b in found[:k])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 10), k=st.integers(1, 12))
def test_cut_at_a_number_it_has_that_many(seed, n, k) -> None:
    found = agglomerative(distances(seed, n), n_clusters=k)
    assert len(found) == min(n, k)
    assert sorted(i for cluster in found for i in cluster) == list(range(n))


def test_the_threshold_itself_parts() -> None:
    d = np.array([[0, 0.15], [0.15, 0]])
    assert agglomerative(d, threshold=0.15) == ((0,), (1,))
    assert agglomerative(d, threshold=0.1500001) == ((0, 1),)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="n_clusters"):
        kmeans(np.eye(2), n_clusters=0, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="NaN"):
        kmeans(np.array([[np.nan, 1]]), n_clusters=1, rng=np.random.default_rng(0))
    d = np.zeros((2, 2))
    for given_ in ({}, {"threshold": 1.0, "n_clusters": 1}, {"n_clusters": 0}):
        with pytest.raises(ValueError, match="n_clusters"):
            agglomerative(d, **given_)
    for wrong in (np.inf, np.nan):
        with pytest.raises(ValueError, match=r"infinity|NaN"):
            agglomerative(np.full((2, 2), wrong), threshold=1.0)
