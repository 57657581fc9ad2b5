"""Cluster means: scmoe_pfl.md sections 8 and 16 (property 9), fedge.md 16 (property 1)."""

import math
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation import WeightedSums, average_all, average_clusters
from coordinator.aggregation.mean import BLOCK
from fedge.tensors.layout import Layout, Model, TensorInfo

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2,)),
        TensorInfo(name="running", shape=(1,), kind="buffer"),
        TensorInfo(name="steps", shape=(), kind="counter"),
    )
)


def model(w, buffer=0.0, counter=0):
    return Model(np.float32(w), np.float32([buffer]), np.array([counter]))


def layout_of(d):
    return Layout(tensors=(TensorInfo(name="w", shape=(d,)),))


def vector(params):
    return Model(np.asarray(params, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


def test_worked_aggregation():
    mean = average_all([model([1, 2], 1.0, 7), model([3, 6], 5.0, 4)], [1, 3], LAYOUT)
    np.testing.assert_array_equal(mean.params, [2.5, 5.0])
    np.testing.assert_array_equal(mean.buffers, [4.0])
    np.testing.assert_array_equal(mean.counters, [7])
    assert mean.n_samples == 4
    assert mean.params.dtype == np.float64


def test_as_model_and_added_to():
    mean = average_all([model([1, 2], 1.0, 7), model([3, 6], 5.0, 4)], [1, 3], LAYOUT)
    absolute, moved = mean.to_model(), mean.add_to(model([10, 10], 100.0, 100))
    np.testing.assert_array_equal(absolute.params, np.float32([2.5, 5.0]))
    np.testing.assert_array_equal(moved.params, np.float32([12.5, 15.0]))
    for result in (absolute, moved):  # buffers and counters are never differences
        np.testing.assert_array_equal(result.buffers, np.float32([4.0]))
        np.testing.assert_array_equal(result.counters, [7])
        assert (result.params.dtype, result.buffers.dtype) == (np.float32, np.float32)


def test_a_client_counts_in_full_in_each_of_its_clusters():
    models = [model([1, 0]), model([3, 0]), model([5, 0])]
    first, second, nobody = average_clusters(models, [1, 1, 2], [(0, 1), (1, 2), ()], LAYOUT)
    np.testing.assert_array_equal(first.params, [2, 0])
    np.testing.assert_allclose(second.params, [(3 + 2 * 5) / 3, 0])
    assert nobody is None


def test_clients_without_samples_carry_no_weight():
    models = [model([1, 2], 1.0, 1), model([9, 9], 9.0, 9)]
    only, none = average_clusters(models, [2, 0], [(0, 1), (1,)], LAYOUT)
    np.testing.assert_array_equal(only.params, [1, 2])
    np.testing.assert_array_equal(only.counters, [1])
    assert none is None
    with pytest.raises(ValueError, match="sum to 0"):
        average_all(models, [0, 0], LAYOUT)
    with pytest.raises(ValueError, match="sum to 0"):
        average_all([], [], LAYOUT)


def test_misfits_are_refused_by_position():
    wrong = Model(np.zeros(3, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="model 1"):
        average_all([model([1, 2]), wrong], [1, 1], LAYOUT)
    with pytest.raises(ValueError, match="model 0"):
        average_all([Model(np.zeros(2, np.float32), np.zeros(1, np.float32), np.zeros(2, np.int64))], [1], LAYOUT)
    with pytest.raises(ValueError, match="model 0"):
        average_all([model([1, 2])], [-1], LAYOUT)
    with pytest.raises(ValueError, match="fewer models"):
        average_all([model([1, 2])], [1, 1], LAYOUT)
    with pytest.raises(ValueError, match="more models"):
        average_all([model([1, 2])] * 2, [1], LAYOUT)


@given(st.integers(0, 10**6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_mean_is_the_exactly_rounded_one(seed, n):
    rng = np.random.default_rng(seed)
    updates = (rng.standard_normal((n, 5)) * 10.0 ** rng.integers(-6, 6, (n, 1))).astype(np.float32)
    sizes = rng.integers(1, 10_000, n).tolist()
    exact = [math.fsum(s * float(u) for s, u in zip(sizes, column, strict=True)) / sum(sizes) for column in updates.T]
    mean = average_all(map(vector, updates), sizes, layout_of(5))
    np.testing.assert_allclose(mean.params, exact, rtol=1e-12, atol=1e-12 * np.abs(updates).max())
    low, high = updates.min(axis=0), updates.max(axis=0)
    assert (low <= mean.to_model().params).all()
    assert (mean.to_model().params <= high).all()


@given(st.integers(0, 10**6), st.integers(1, 2**28))
@settings(max_examples=40, deadline=None)
def test_a_singleton_and_equal_models_are_bit_equal(seed, size):
    w = np.random.default_rng(seed).standard_normal(7).astype(np.float32)
    for sizes in ([size], [size, 3], [1, 2, size]):
        mean = average_all([vector(w)] * len(sizes), sizes, layout_of(7))
        assert mean.params.tobytes() == w.astype(np.float64).tobytes()


def test_scaling_all_sizes_changes_nothing():
    rng = np.random.default_rng(1)
    updates = [vector(rng.standard_normal(50)) for _ in range(6)]
    means = [average_all(updates, [k * n for n in (1, 2, 3, 4, 5, 6)], layout_of(50)).params for k in (1, 8, 1000)]
    assert means[0].tobytes() == means[1].tobytes()  # a power of two is exact
    np.testing.assert_allclose(means[2], means[0], rtol=1e-14, atol=1e-15)


def test_sums_are_in_the_order_of_the_clients_across_blocks():
    """The bits are those of a plain loop over clients in float64, for vectors of several blocks."""
    d = 2 * BLOCK + 17
    rng = np.random.default_rng(2)
    updates = rng.standard_normal((5, d)).astype(np.float32)
    sizes, members = [3, 1, 4, 1, 5], [(0, 2, 4), (1, 2, 3, 4), (3,)]
    means = average_clusters(map(vector, updates), sizes, members, layout_of(d))
    for cluster, mean in zip(members, means, strict=True):
        total = np.zeros(d)
        for i in cluster:
            total += sizes[i] * updates[i].astype(np.float64)
        assert mean.params.tobytes() == (total / sum(sizes[i] for i in cluster)).tobytes()


def test_clusters_do_not_influence_each_other():
    rng = np.random.default_rng(3)
    updates = rng.standard_normal((4, 100)).astype(np.float32)
    other = updates.copy()
    other[:2] *= 1e30
    members = [(0, 1), (2, 3)]
    before, after = (average_clusters(map(vector, u), [1, 2, 3, 4], members, layout_of(100)) for u in (updates, other))
    assert before[1].params.tobytes() == after[1].params.tobytes()
    assert before[0].params.tobytes() != after[0].params.tobytes()


def test_one_update_is_in_memory_at_a_time():
    given = []

    class Update(np.ndarray):  # a plain array takes no weak references
        pass

    def stream():
        for k in range(5):
            assert all(update() is None for update in given)
            w = np.full(10, k, np.float32).view(Update)
            given.append(weakref.ref(w))
            yield Model(w, np.zeros(0, np.float32), np.zeros(0, np.int64))
            del w

    first, second = average_clusters(stream(), [1] * 5, [range(5), (4,)], layout_of(10))
    np.testing.assert_array_equal(first.params, np.full(10, 2.0))
    np.testing.assert_array_equal(second.params, np.full(10, 4.0))


def test_inputs_are_never_modified():
    updates = [model([1, 2], 1.0, 7), model([3, 6], 5.0, 4)]
    average_all(updates, [1, 3], LAYOUT)
    np.testing.assert_array_equal(updates[0].params, [1, 2])
    np.testing.assert_array_equal(updates[1].counters, [4])


def test_weighted_sums_refuse_bad_weights():
    sums = WeightedSums(1, 2)
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            sums.add(np.zeros(2, np.float32), weight, [0])
    assert sums.compute_means() == (None,)
