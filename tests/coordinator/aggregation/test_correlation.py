"""FedCoE's maths: the worked numbers and the invariants of docs/methods/fedcoe.md, section 13."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.aggregation import correlation as c
from fedge.tensors.layout import Model

P = np.array([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]])
A = np.array([[0.9, 0.1, 0.5], [0.7, 0.2, 0.5], [0.2, 0.9, 0.5]])


def model(values: object, counters: tuple[int, ...] = ()) -> Model:
    return Model(np.atleast_1d(np.float32(values)), np.zeros(0, np.float32), np.array(counters, np.int64))


@st.composite
def routed_and_scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """p (n, K) with rows on the simplex and a (n, N) in (0, 1]."""
    n, k, clients = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    numbers = st.floats(0.01, 1)
    p = draw(arrays(np.float64, (n, k), elements=numbers))
    return p / p.sum(axis=1, keepdims=True), draw(arrays(np.float64, (n, clients), elements=numbers))


def test_groups() -> None:
    assert c.assign_classes(10, 5) == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert c.assign_classes(10, 4) == (0, 0, 0, 1, 1, 2, 2, 2, 3, 3)
    assert c.assign_classes(3, 5) == (0, 1, 3)


@pytest.mark.parametrize(("temperature", "best", "other"), [(1.0, 0.404610, 0.148848), (0.1, 0.999818, 4.54e-5)])
def test_suitability(temperature: float, best: float, other: float) -> None:
    s = c.compute_suitability(np.array([[1.0, 0, 0, 0, 0]]), temperature)
    np.testing.assert_allclose(s, [[best, other, other, other, other]], atol=5e-7)


def test_correlation_selection_and_weights() -> None:
    m = c.compute_correlation(P, A)
    np.testing.assert_allclose(m, [[1.16, 0.29, 0.75], [0.64, 0.91, 0.75]])
    np.testing.assert_allclose(
        c.normalise_rows(m), [[0.527273, 0.131818, 0.340909], [0.278261, 0.395652, 0.326087]], atol=5e-7
    )
    np.testing.assert_allclose(
        c.normalise_columns(m), [[0.644444, 0.241667, 0.5], [0.355556, 0.758333, 0.5]], atol=5e-7
    )
    for ranking in (c.normalise_rows(m), c.normalise_columns(m)):
        assert [sorted(s) for s in c.select_clients(ranking, 2)] == [[0, 2], [1, 2]]
    weights = c.compute_expert_weights(m, c.select_clients(c.normalise_columns(m), 2))
    np.testing.assert_allclose(weights, [[0.607330, 0, 0.392670], [0, 0.548193, 0.451807]], atol=5e-7)


def test_raw_ranking_collapses_and_affinity_does_not() -> None:
    m = np.array([[9, 8.5, 4, 1, 0.5], [9.1, 8, 1, 4, 0.5], [9.2, 8.2, 2, 2, 3]])
    raw = c.select_clients(c.normalise_rows(m), 2)
    assert raw == ((0, 1),) * 3
    assert c.compute_overlap(raw) == 1.0
    affinity = c.select_clients(c.normalise_columns(m), 2)
    assert affinity == ((2, 1), (3, 0), (4, 0))
    assert c.compute_overlap(affinity) == pytest.approx((0 + 0 + 0.5) / 3)


def test_profile_prior() -> None:
    t = c.compute_profile_prior(np.array([0.7, 0.3]), np.array([0.5, 0.5]), (0, 0, 1), 0.02)
    np.testing.assert_allclose(t, [0.325422, 0.325422, -0.485508], atol=5e-7)


@given(routed_and_scored())
def test_column_sums_of_m_are_those_of_the_scores_and_shares_sum_to_one(pa: tuple[np.ndarray, np.ndarray]) -> None:
    p, a = pa
    m = c.compute_correlation(p, a)
    np.testing.assert_allclose(m.sum(axis=0), a.sum(axis=0))
    np.testing.assert_allclose(c.normalise_rows(m).sum(axis=1), 1, atol=1e-9)
    np.testing.assert_allclose(c.normalise_columns(m).sum(axis=0), 1, atol=1e-9)
    weights = c.compute_expert_weights(m, c.select_clients(c.normalise_columns(m), 2))
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-9)
    assert ((weights > 0).sum(axis=1) == min(2, a.shape[1])).all()


@given(routed_and_scored(), st.floats(0.1, 10) | st.sampled_from([1e-200, 1e-12, 1e-9, 1e9, 1e200]), st.randoms())
def test_scaling_the_scores_changes_nothing_and_permuted_clients_permute(
    pa: tuple[np.ndarray, np.ndarray], factor: float, random: object
) -> None:
    p, a = pa
    m, n_top = c.compute_correlation(p, a), (a.shape[1] + 1) // 2
    scaled = c.compute_correlation(p, factor * a)
    np.testing.assert_allclose(c.normalise_columns(scaled), c.normalise_columns(m), atol=1e-9)
    selected = c.select_clients(c.normalise_rows(m), n_top)
    np.testing.assert_allclose(c.normalise_rows(scaled), c.normalise_rows(m), atol=1e-9)
    np.testing.assert_allclose(
        c.compute_expert_weights(scaled, selected), c.compute_expert_weights(m, selected), atol=1e-9
    )
    order = list(range(a.shape[1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    np.testing.assert_allclose(c.compute_correlation(p, a[:, order]), m[:, order])
    places = [[order.index(i) for i in clients] for clients in selected]
    permuted = c.compute_expert_weights(m[:, order], [tuple(s) for s in places])
    np.testing.assert_allclose(permuted, c.compute_expert_weights(m, selected)[:, order], atol=1e-12)


def test_selection_of_few_and_of_ties() -> None:
    ranking = np.full((2, 4), 0.5)
    assert c.select_clients(ranking, 2) == ((0, 1), (0, 1))  # ties: the lower index
    assert c.select_clients(ranking, 9) == ((0, 1, 2, 3),) * 2


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(2, 30))
def test_with_a_uniform_gate_the_lower_ids_win(seed: int, n_experts: int, n_clients: int) -> None:
    """All affinities are 1 / K; rounding chose in 85 of 200 cases."""
    a = np.random.default_rng(seed).uniform(size=(40, n_clients))
    m = c.compute_correlation(np.full((40, n_experts), 1 / n_experts), a)
    n_top = -(-n_clients // 2)
    assert c.select_clients(c.normalise_columns(m), n_top) == (tuple(range(n_top)),) * n_experts


def test_who_is_never_sure_has_no_share() -> None:
    m = np.array([[0.0, 1, 0], [0, 3, 0]])
    np.testing.assert_array_equal(c.normalise_columns(m), [[0, 0.25, 0], [0, 0.75, 0]])
    np.testing.assert_array_equal(c.normalise_rows(m[:, [0, 2]]), np.zeros((2, 2)))


def test_weights_of_a_row_of_zeros_are_uniform_and_those_of_nobody_are_zero() -> None:
    m = np.array([[0.0, 0, 0], [1, 2, 3]])
    np.testing.assert_allclose(c.compute_expert_weights(m, [(0, 2), ()]), [[0.5, 0, 0.5], [0, 0, 0]])


def test_mixed_is_the_weighted_sum_and_counters_are_of_the_heaviest() -> None:
    models = [model([1, 2], (5,)), model([3, 6], (7,)), model([5, 0], (9,))]
    first, none, tie = c.mix_models(models, np.array([[0.25, 0.75, 0], [0, 0, 0], [0.5, 0, 0.5]]))
    assert first is not None
    assert tie is not None
    np.testing.assert_allclose(first.params, [0.25 * 1 + 0.75 * 3, 0.25 * 2 + 0.75 * 6])
    assert (first.counters.tolist(), none, tie.counters.tolist()) == ([7], None, [5])
    with pytest.raises(ValueError, match=r"zip|shorter|longer"):
        c.mix_models(models, np.ones((1, 2)))


@settings(max_examples=30)
@given(arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32)), st.integers(0, 2))
def test_a_one_hot_profile_returns_that_expert_bit_for_bit(params: np.ndarray, j: int) -> None:
    (found,) = c.mix_models([model(row) for row in params], np.eye(3)[[j]])
    assert found is not None
    np.testing.assert_array_equal(found.params, params[j])


@settings(max_examples=30)
@given(arrays(np.float32, 4, elements=st.floats(-100, 100, width=32)), st.floats(0, 1))
def test_equal_experts_assemble_to_themselves_and_equal_models_stay(params: np.ndarray, tau: float) -> None:
    (found,) = c.mix_models([model(params)] * 3, np.array([[0.2, 0.3, 0.5]]))
    assert found is not None
    np.testing.assert_allclose(found.params, params, rtol=1e-6)
    np.testing.assert_allclose(c.interpolate(model(params), model(params), tau).params, params, rtol=1e-6)


def test_moving_by_nothing_or_towards_nobody_changes_nothing() -> None:
    old, new = model([1.1, -2.3], (1,)), model([9, 9], (2,))
    assert c.interpolate(old, new, 0.0) is old
    assert c.interpolate(old, None, 0.9) is old
    np.testing.assert_array_equal(c.interpolate(old, new, 1.0).params, new.params)
    np.testing.assert_allclose(c.interpolate(old, new, 0.25).params, [0.75 * 1.1 + 0.25 * 9, 0.75 * -2.3 + 0.25 * 9])
    assert c.interpolate(old, new, 0.5).counters.tolist() == [1]
    assert c.interpolate(old, new, 0.9).counters.tolist() == [2]


@pytest.mark.parametrize(
    ("shares", "fine"),
    [
        ((0.5, 0.5), True),
        ((1.0, 0.0), True),
        ((0.5, 0.5005), True),
        ((0.5, 0.502), False),
        ((1.5, -0.5), False),
        ((float("nan"), 1.0), False),
        ((1.0,), False),
        ((0.2, 0.3, 0.5), False),
    ],
)
def test_a_profile_is_on_the_simplex(shares: tuple[float, ...], fine: bool) -> None:
    assert c.is_profile(shares, 2) is fine


def test_spread() -> None:
    assert c.compute_spread([model([3.0, 4.0])] * 2) == 0
    assert c.compute_spread([model([0.0, 2.0]), model([0.0, 4.0])]) == pytest.approx(1 / 3)
    assert c.compute_spread([model([0.0])] * 2) == 0
    assert c.compute_overlap([(0, 1)]) == 0.0
