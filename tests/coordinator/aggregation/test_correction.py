"""CFIC's server step: worked numbers and invariants of cfic.md sections 6 and 11."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import average_clusters
from coordinator.aggregation.correction import CorrectedModel, apply_correction, compute_mean_direction
from fedge.tensors.layout import Layout, Model, TensorInfo

NONE, COUNTS = np.zeros(0, np.float32), np.zeros(0, np.int64)


def step(w, models, sizes, features, h=None, **options) -> CorrectedModel:
    """The step from the models that the clients return."""
    layout = Layout(tensors=(TensorInfo(name="w", shape=(len(w),)),))
    changes = [Model(np.float32(m) - np.float32(w), NONE, COUNTS) for m in models]
    members = [[k for k, f in enumerate(features) if f == key] for key in sorted(set(features))]
    mean, *clusters = average_clusters(changes, sizes, [range(len(models)), *members], layout)
    return apply_correction(
        np.float32(w),
        None if h is None else np.float32(h),
        mean.params,
        compute_mean_direction([c.params for c in clusters], [c.n_samples for c in clusters]),
        **{"alpha": 0.9, "beta": 0.2, **options},
    )


def test_worked_step() -> None:
    found = step((0, 0), [(3, 4), (0, 2)], [10, 30], [0, 1], h=(1, 0), alpha=0.5, beta=0.1)
    np.testing.assert_allclose(found.h, [0.485, -0.095], rtol=1e-6)
    np.testing.assert_allclose(found.w, [0.265, 2.595], rtol=1e-6)
    assert (found.w.dtype, found.h.dtype) == (np.float32, np.float32)


def test_worked_rounds_of_one_cluster() -> None:
    """Every round's mean change is (0.3, 0.4): the correction grows towards beta / (1 - alpha)."""
    w, h = np.zeros(2), None
    for model, length in [((0.42, 0.56), 0.2), ((0.948, 1.264), 0.38), ((1.5732, 2.0976), 0.542)]:
        found = step(w, [w + np.array([0.3, 0.4])], [10], [0], h)
        w, h = found.w, found.h
        np.testing.assert_allclose(w, model, rtol=1e-5)
        assert np.linalg.norm(h) == pytest.approx(length, rel=1e-5)


def test_opposite_clusters_cancel() -> None:
    found = step((0, 0, 0), [(1, 2, 2), (-2, -4, -4)], [10, 10], [0, 1])
    np.testing.assert_allclose(found.w, [-0.5, -1, -1], atol=1e-7)
    np.testing.assert_allclose(found.h, 0, atol=1e-7)


def test_with_one_cluster_the_correction_is_parallel_to_the_mean() -> None:
    found = step((1, 1), [(4, 1), (1, 9)], [1, 1], [3, 3])
    direction = np.array([1.5, 4]) / math.hypot(1.5, 4)
    np.testing.assert_allclose(found.w, np.array([2.5, 5]) + 0.2 * direction, rtol=1e-6)


def test_all_clusters_still_leave_the_velocity_to_fade() -> None:
    found = step((1, 2), [(1, 2), (1, 2)], [1, 2], [0, 1], h=(1, -1), alpha=0.5)
    np.testing.assert_allclose(found.h, [0.5, -0.5])
    np.testing.assert_allclose(found.w, [0.5, 2.5])


def test_divergence_keeps_the_model_and_forgets() -> None:
    for mean in (np.array([3e38, 0]), np.array([np.nan, 0])):
        w = np.float32([3e38, 0])
        found = apply_correction(w, np.float32([1, 1]), mean, mean, alpha=0.9, beta=0.2)
        assert found.diverged
        np.testing.assert_array_equal(found.w, w)
        np.testing.assert_array_equal(found.h, [0, 0])


def test_inputs_are_never_modified() -> None:
    w, h, mean = np.float32([1, 2]), np.float32([3, 4]), np.array([5.0, 6])
    apply_correction(w, h, mean, mean, alpha=0.5, beta=0.5)
    np.testing.assert_array_equal(np.concatenate([w, h, mean]), [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("alpha", "beta"), [(-0.1, 0.2), (1.0, 0.2), (0.9, -0.1), (float("nan"), 0.2), (0.9, math.inf)]
)
def test_parameters_out_of_range_are_refused(alpha, beta) -> None:
    with pytest.raises(ValueError, match="alpha"):
        apply_correction(np.zeros(1, np.float32), None, np.zeros(1), np.zeros(1), alpha=alpha, beta=beta)


# -------------------------------------------------------------------------------------------------- section 11

rounds = st.integers(1, 6).flatmap(
    lambda k: st.tuples(
        st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=k, max_size=k),
        st.lists(st.integers(1, 40), min_size=k, max_size=k),
        st.lists(st.integers(-1, 3), min_size=k, max_size=k),
    )
)
W, H = (0.5, -1.0, 2.0), (0.25, 0.0, -0.5)


@given(rounds)
def test_without_memory_and_length_it_is_the_weighted_mean(answers) -> None:
    models, sizes, features = answers
    found = step(W, models, sizes, features, h=H, alpha=0.0, beta=0.0)
    np.testing.assert_allclose(found.w, np.array(sizes) @ np.array(models) / sum(sizes), atol=1e-5)


@given(rounds, st.randoms())
def test_neither_the_order_of_the_answers_nor_the_scale_of_their_sizes_matters(answers, random) -> None:
    models, sizes, features = answers
    order = list(range(len(models)))
    random.shuffle(order)
    expected = step(W, models, sizes, features, h=H)
    shuffled = step(W, [models[k] for k in order], [sizes[k] for k in order], [features[k] for k in order], h=H)
    scaled = step(W, models, [7 * n for n in sizes], features, h=H)
    for found in (shuffled, scaled):
        np.testing.assert_allclose(found.w, expected.w, atol=1e-5)
        np.testing.assert_allclose(found.h, expected.h, atol=1e-5)


@given(rounds)
def test_shifting_everything_shifts_the_model_and_leaves_the_memory(answers) -> None:
    models, sizes, features = answers
    shift = np.array([8.0, -4.0, 16.0])
    expected = step(W, models, sizes, features, h=H)
    found = step(np.array(W) + shift, np.array(models) + shift, sizes, features, h=H)
    np.testing.assert_allclose(found.w, expected.w + shift, atol=1e-4)
    np.testing.assert_allclose(found.h, expected.h, atol=1e-3)


@given(st.lists(rounds, min_size=1, max_size=8), st.floats(0, 0.95), st.floats(0, 3))
def test_the_memory_is_the_discounted_sum_of_directions_and_bounded(turns, alpha, beta) -> None:
    h, w, sums = None, np.float32(W), np.zeros(3)
    for models, sizes, features in turns:
        before = w
        found = step(before, models, sizes, features, h=h, alpha=alpha, beta=beta)
        w, h = found.w, found.h
        directions, totals = [], []
        for key in sorted(set(features)):
            chosen = [k for k, feature in enumerate(features) if feature == key]
            n = np.array([sizes[k] for k in chosen], float)
            directions.append(n @ (np.float32([models[k] for k in chosen]) - before) / n.sum())
            totals.append(int(n.sum()))
        sums = alpha * sums - beta * compute_mean_direction(directions, totals)
        np.testing.assert_allclose(h, sums, atol=1e-3 * (1 + beta / (1 - alpha)))
        assert np.linalg.norm(h) <= beta / (1 - alpha) * (1 + 1e-6) + 1e-12


def test_a_direction_is_no_longer_than_one_and_nothing_moves_nothing() -> None:
    assert compute_mean_direction([np.zeros(2), np.array([1e-13, 0])], [1, 1]).tolist() == [0, 0]
    np.testing.assert_allclose(compute_mean_direction([np.zeros(2), np.array([0, -7.0])], [1, 3]), [0, -0.75])
