"""Averages under attack: by hand, by a slow oracle, and laws that hold for any vectors."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import rules
from coordinator.aggregation.mean import BLOCK

X = [np.float32(row) for row in ((1, 2), (3, 0), (2, 1), (100, -100))]


def test_by_hand() -> None:
    np.testing.assert_array_equal(rules.median(X), [2.5, 0.5])
    np.testing.assert_array_equal(rules.trimmed_mean(X, 1), [2.5, 0.5])
    np.testing.assert_array_equal(rules.trimmed_mean(X, 0), [26.5, -24.25])
    assert rules.multi_krum(X, 1) == [0, 1, 2]
    one = rules.centred_clipping([np.float64([3, 4]), np.float64([0, 1])], radius=1.0, iterations=1)
    np.testing.assert_allclose(one, [0.3, 0.9])  # (0.6, 0.8) and (0, 1)


def test_the_radius_of_centred_clipping_is_the_median_distance() -> None:
    rows = [np.float64([length, 0]) for length in (1, 2, 30)]
    np.testing.assert_allclose(rules.centred_clipping(rows, iterations=1), [(1 + 2 + 2) / 3, 0])


def test_an_attacker_moves_no_rule_farther_than_an_honest_device_could() -> None:
    rng = np.random.default_rng(0)
    honest = list(1 + 0.1 * rng.normal(size=(8, 50)))
    for attack in (1e6 * np.ones(50), -1e6 * np.ones(50), 1e30 * rng.normal(size=50)):
        rows = [*honest, attack, attack]
        chosen = np.mean([rows[i] for i in rules.multi_krum(rows, 2)], axis=0)
        for found in (rules.median(rows), rules.trimmed_mean(rows, 2), chosen):
            assert np.abs(found - 1).max() < 0.3
        found = rules.centred_clipping(rows)
        assert np.linalg.norm(found - 1) < 0.7 * math.sqrt(50)


def test_long_vectors_are_worked_on_in_blocks() -> None:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=BLOCK + 3).astype(np.float32) for _ in range(5)]
    stacked = np.stack(rows).astype(np.float64)
    np.testing.assert_array_equal(rules.median(rows), np.median(stacked, axis=0))
    np.testing.assert_allclose(rules.trimmed_mean(rows, 2), np.sort(stacked, axis=0)[2])
    step = stacked * (np.minimum(1, 300 / np.linalg.norm(stacked, axis=1))[:, None])
    np.testing.assert_allclose(rules.centred_clipping(rows, 300.0, 1), step.mean(axis=0), atol=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(3, 9), st.integers(0, 3))
def test_the_order_of_devices_changes_nothing(seed: int, n: int, f: int) -> None:
    rng = np.random.default_rng(seed)
    x, order, f = rng.normal(size=(n, 4)), rng.permutation(n), min(f, (n - 1) // 2)
    np.testing.assert_allclose(rules.median(x[order]), rules.median(x))
    np.testing.assert_allclose(rules.trimmed_mean(x[order], f), rules.trimmed_mean(x, f))
    np.testing.assert_allclose(rules.centred_clipping(x[order]), rules.centred_clipping(x), atol=1e-12)
    assert sorted(order[rules.multi_krum(x[order], f)]) == rules.multi_krum(x, f)


def test_nobody_moves_a_sum_farther_than_twice_the_median() -> None:
    assert rules.compute_factors([1.0, 3.0, 2.0, 4.0]) == [1.0] * 4
    assert rules.compute_factors([1.0, 1.0, 1e9, 1.0]) == [1.0, 1.0, 2e-9, 1.0]
    assert rules.compute_factors([1.0, 100.0]) == [1.0, 1.0]  # of two nobody knows who is usual
    assert rules.compute_factors([0.0, 0.0, 0.0, 5.0]) == [1.0] * 4
    assert rules.bound_sizes([5, 5, 7, 10**9]) == [5, 5, 7, 12.0]


def test_a_zero_does_not_remove_a_bound() -> None:
    """Two others are too few for a median, and then the smaller is usual; where zeros count, it is theirs, too."""
    assert rules.compute_factors([0.0, 1.0, 1e6]) == [1.0, 1.0, 2e-6]
    assert rules.bound_sizes([0.0, 1.0, 1e6]) == [0.0, 1.0, 2.0]
    assert rules.compute_factors([0.0, 1.0, 1e6], zeros=True) == [1.0, 1.0, 2e-6]
    assert rules.compute_factors([0.0, 0.0, 1e6], zeros=True) == [1.0, 1.0, 0.0]
    assert rules.compute_factors([0.0, 0.0, 0.0], zeros=True) == [1.0, 1.0, 1.0]
