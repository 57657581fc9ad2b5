"""Average linkage: against AIDC's own merging, boundaries, edge cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clustering.agglomerative import agglomerative
from coordinator.clustering.aidc import divergence_matrix, merge


def distances(seed: int, n: int):
    return divergence_matrix(np.random.default_rng(seed).uniform(0, 1, (n, 6)), unit=0.2)


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
    d = np.zeros((2, 2))
    with pytest.raises(ValueError, match="either"):
        agglomerative(d)
    with pytest.raises(ValueError, match="either"):
        agglomerative(d, threshold=1.0, n_clusters=1)
    with pytest.raises(ValueError, match="0 clusters"):
        agglomerative(d, n_clusters=0)
    for wrong in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="finite"):
            agglomerative(np.full((2, 2), wrong), threshold=1.0)
