"""k-means on directions: planted directions, invariances, edge cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.clustering.kmeans import kmeans


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


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        kmeans(np.eye(2), n_clusters=0, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="finite"):
        kmeans(np.array([[np.nan, 1]]), n_clusters=1, rng=np.random.default_rng(0))
