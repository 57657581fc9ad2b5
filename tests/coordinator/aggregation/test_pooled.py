"""The trial, pooled choices and weights: fedge.md sections 2, 5, 7, 8, 12 and 16."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.pooled import (
    choose_pooled,
    compute_trial_statistic,
    pool_means,
    pool_products,
    pool_weights,
    stack_weights,
    wants_split,
)


def deltas(g, e):
    return [a - b for a, b in zip(g, e, strict=True)]


def test_worked_trials():
    t = compute_trial_statistic(deltas((1.0, 0.8, 0.9, 1.1), (0.7, 0.6, 0.9, 0.8)))
    assert t == pytest.approx(2.828427, abs=5e-7)
    assert wants_split(t, 0.7, 4)
    t = compute_trial_statistic(deltas((1.0, 0.8, 0.9, 1.1), (1.2, 0.7, 1.0, 1.1)))
    assert t == pytest.approx(-0.774597, abs=5e-7)
    assert not wants_split(t, 0.65, 4)
    t = compute_trial_statistic(deltas((0.10, 0.12, 0.08, 0.09), (0.10, 0.11, 0.09, 0.09)))
    assert t == pytest.approx(0, abs=1e-9)
    assert wants_split(t, 0.96, 4)


def test_identical_losses_split_only_above_eta_three_quarters():
    t = compute_trial_statistic([0.0] * 5)
    assert t == 0
    assert not wants_split(t, 0.75 - 1e-6, 5)
    assert wants_split(t, 0.75 + 1e-6, 5)


def test_structureless_similarities_need_a_large_statistic():
    assert not wants_split(2.59, 0.62, 10)
    assert wants_split(2.61, 0.62, 10)


def test_too_few_devices_never_split():
    assert compute_trial_statistic([]) is None
    assert compute_trial_statistic([0.5]) is None
    assert not wants_split(None, 1.0, 10)
    assert not wants_split(100.0, 1.0, 3)
    assert wants_split(100.0, 1.0, 4)


def test_a_constant_gain_is_a_large_finite_statistic():
    assert compute_trial_statistic([0.25, 0.25, 0.25]) == pytest.approx(0.25 / 1e-9)


def test_a_shift_of_both_losses_changes_nothing():
    rng = np.random.default_rng(0)
    g, e, shift = rng.random(6), rng.random(6), 10 * rng.random(6)
    assert compute_trial_statistic(deltas(g + shift, e + shift)) == pytest.approx(
        compute_trial_statistic(deltas(g, e)), rel=1e-9
    )


def test_liars_neither_force_a_split_nor_forbid_one():
    rng = np.random.default_rng(0)
    useless, useful = rng.normal(0, 0.1, size=16), rng.normal(0.3, 0.1, size=16)
    assert not wants_split(compute_trial_statistic([*useless, *[1e6] * 4]), 0.65, 20)
    assert wants_split(compute_trial_statistic([*useful, *[-1e6] * 4]), 0.75, 20)
    assert compute_trial_statistic(useless) == pytest.approx(useless.mean() / (useless.std(ddof=1) / 4), rel=1e-6)


def em(p, u, a, steps=60):
    """omega of one device, as section 8 has it."""
    omega = u.copy()
    for _ in range(steps):
        r = omega * p / (omega * p).sum(axis=1, keepdims=True)
        omega = (r.sum(axis=0) + a * u) / (len(p) + a)
    return omega


def test_smallest_total_not_smallest_mean_of_ranks():
    assert choose_pooled([[1.0, 5.0], [3.0, 0.5], [2.0, 2.0]]) == 0
    assert choose_pooled([[1.0, 0.0]]) == 1


def test_ties_take_the_first_and_better_means_by_more_than_1e_9():
    assert choose_pooled([[1.0, 1.0, 1.0]]) == 0
    assert choose_pooled([[1.0, 1.0 - 0.9e-9, 1.0 - 1.1e-9]]) == 2
    assert choose_pooled([[1.0, 1.0 - 0.9e-9]]) == 0


def test_worked_weights_of_two_devices():
    """Section 16: twice omega with a0 = 10 from the pooled u, then u again."""
    first = np.array([(0.9, 0.5), (0.8, 0.5), (0.2, 0.5)])
    second = np.array([(0.1, 0.6), (0.3, 0.7)])
    u = np.array([0.5, 0.5])
    for a, expected in ((0.001, 0.631400), (5, 0.508261), (20, 0.502163)):
        assert em(first, u, a)[0] == pytest.approx(expected, abs=5e-7)
    for _ in range(2):
        told = [(dict(enumerate(em(p, u, 10.0))), len(p)) for p in (first, second)]
        u = np.array(list(pool_weights(told).values()))
    np.testing.assert_allclose(u, [0.464488, 0.535512], atol=5e-7)
    assert [em(p, u, 20.0)[0] for p in (first, second)] == pytest.approx([0.467192, 0.438917], abs=5e-7)


def test_a_missing_candidate_weighs_nothing_on_its_device():
    assert pool_weights([({"a": 1.0}, 1), ({"a": 0.5, "b": 0.5}, 3)]) == {"a": 0.625, "b": 0.375}


def test_without_validation_samples_all_devices_count_alike():
    assert pool_weights([({"a": 0.2, "b": 0.8}, 0), ({"a": 0.4, "b": 0.6}, 0)]) == pytest.approx({"a": 0.3, "b": 0.7})


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.integers(0, 1000)), min_size=1, max_size=6
    )
)
def test_pooled_weights_sum_to_one_and_lie_between_the_devices(devices):
    told = [({k: w / sum(ws) for k, w in enumerate(ws)}, m) for ws, m in devices]
    u = pool_weights(told)
    assert sum(u.values()) == pytest.approx(1)
    for k, share in u.items():
        assert min(omega[k] for omega, _ in told) - 1e-12 <= share <= max(omega[k] for omega, _ in told) + 1e-12


def test_a_liar_has_no_larger_say_than_twice_the_median():
    honest = [[1.0, 0.0, 2.0]] * 4
    assert choose_pooled([*honest, [1e9, 1e9, 0.0]]) == 1
    assert choose_pooled([*honest, [0.0, 1e300, 0.0]]) == 0  # 4 against 1 and 4: it counts, but as two
    told = [({"a": 1.0, "b": 0.0}, 10)] * 4
    assert pool_weights([*told, ({"a": 0.0, "b": 1.0}, 10**6)]) == pytest.approx({"a": 2 / 3, "b": 1 / 3})


def test_pooled_means_are_over_samples_and_a_liar_moves_them_little():
    sums = np.array([[2.0, 4.0], [6.0, 0.0]])
    assert pool_means(sums, [1, 3]).tolist() == [2.0, 1.0]
    assert pool_means(sums[:1], [0]).tolist() == [0.0, 0.0]
    honest = np.random.default_rng(0).normal(1.0, 0.1, (9, 1))
    sizes = [10] * 9
    for lie, size in ((1e30, 10), (1e30, 10**9), (-1e30, 10)):
        found = pool_means(np.concatenate([honest * 10, [[lie]]]), [*sizes, size])
        assert abs(found[0] - 1.0) < 0.3


def test_products_count_over_the_devices_that_have_both_candidates():
    both = {"global": {"global": 8.0, "local": 2.0}, "local": {"global": 2.0, "local": 4.0}}
    one = {"global": {"global": 4.0}}
    found = pool_products([(both, 2), (one, 2)])
    assert found == {"global": {"global": 3.0, "local": 1.0}, "local": {"global": 1.0, "local": 2.0}}
    assert pool_products([]) == {}


def test_a_stack_has_the_smallest_squared_error_and_knows_nothing_of_strangers():
    products = {"a": {"a": 1.0, "b": 0.0}, "b": {"a": 0.0, "b": 3.0}}
    assert stack_weights(products, ["a", "b"]) == pytest.approx({"a": 0.75, "b": 0.25}, abs=1e-6)
    assert stack_weights(products, ["b"]) == pytest.approx({"b": 1.0})
    assert stack_weights(products, ["a", "c"]) == pytest.approx({"a": 1.0, "c": 0.0})
    assert stack_weights({}, ["a", "b"]) == {"a": 0.5, "b": 0.5}
