from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedge.steps.divergence import compute_divergence

profiles = arrays(np.float64, 5, elements=st.floats(0, 1))


@pytest.mark.parametrize(
    ("s", "r", "expected"),
    [
        ([1, 0], [0, 1], 1.039721),
        ([0.2, 0.8], [0.8, 0.2], 0.289117),
        ([0.2, 0.4], [0.4, 0.8], 0.025485),
        ([0, 0], [0.5, 0.5], 0.173287),
        ([0, 0], [0, 0], 0),
    ],
)
def test_worked_numbers_of_the_specification(s, r, expected):
    assert compute_divergence(s, r) == pytest.approx(expected, abs=1e-6)


@given(profiles, profiles)
def test_symmetric_bounded_and_zero_on_the_diagonal(s, r):
    assert compute_divergence(s, s) == 0
    assert compute_divergence(s, r) == pytest.approx(compute_divergence(r, s), abs=1e-12)
    assert 0 <= compute_divergence(s, r) <= 2 * np.log(2) + 1e-9


@given(profiles, profiles, st.permutations(range(5)))
def test_a_common_permutation_of_the_units_changes_nothing(s, r, order):
    order = list(order)
    assert compute_divergence(s[order], r[order]) == pytest.approx(compute_divergence(s, r), abs=1e-12)


@given(profiles, profiles, profiles)
def test_its_root_obeys_the_triangle_inequality(s, r, t):
    through = np.sqrt(compute_divergence(s, r)) + np.sqrt(compute_divergence(r, t))
    assert np.sqrt(compute_divergence(s, t)) <= through + 1e-6


@given(profiles, st.floats(0.1, 1))
def test_a_difference_of_level_alone_is_seen(s, factor):
    s = 0.1 + 0.9 * s
    if factor < 0.99:
        assert compute_divergence(s, factor * s) > 0


def test_leading_axes_broadcast_to_the_matrix_of_all_pairs():
    rows = np.random.default_rng(0).random((4, 6))
    matrix = compute_divergence(rows[:, None], rows[None])
    assert matrix.shape == (4, 4)
    assert matrix[1, 3] == pytest.approx(compute_divergence(rows[1], rows[3]))


@pytest.mark.parametrize(
    ("s", "r", "reason"),
    [
        ([0.1], [0.1, 0.2], "compared"),
        ([], [], "at least one unit"),
        (0.5, 0.5, "at least one unit"),
        ([np.nan], [0.5], "shares"),
        ([1.5], [0.5], "shares"),
        ([-0.1], [0.5], "shares"),
    ],
)
def test_refuses_what_is_no_pair_of_profiles(s, r, reason):
    with pytest.raises(ValueError, match=reason):
        compute_divergence(s, r)
