"""Server and expert step: fedge.md sections 4, 5 and 16 (server; properties 1 and 2)."""

import numpy as np
import pytest

from coordinator.aggregation import average_clusters
from coordinator.aggregation.mean import BLOCK
from coordinator.aggregation.momentum import apply_momentum
from fedge.tensors.layout import Layout, Model, TensorInfo


def test_worked_server_step():
    w, mean = np.float32([0, 0]), np.array([1.0, -1.0])
    step = apply_momentum(w, np.float32([0.2, 0]), mean - w, gamma=0.5)
    np.testing.assert_allclose(step.v, [1.1, -1], rtol=1e-7)
    np.testing.assert_allclose(step.w, [1.1, -1], rtol=1e-7)
    assert not step.diverged
    assert (step.w.dtype, step.v.dtype) == (np.float32, np.float32)


def test_worked_expert_step():
    layout = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))
    changes = [Model(np.float32(c), np.zeros(0, np.float32), np.zeros(0, np.int64)) for c in ([1, 0], [0, 2])]
    (mean,) = average_clusters(changes, [1, 3], [(0, 1)], layout)
    step = apply_momentum(np.float32([1, 1]), np.float32([0, 0.4]), mean.params, gamma=0.5)
    np.testing.assert_allclose(step.v, [0.25, 1.7], rtol=1e-7)
    np.testing.assert_allclose(step.w, [1.25, 2.7], rtol=1e-7)


def test_without_momentum_it_is_fedavg_bit_for_bit():
    rng = np.random.default_rng(0)
    w, change = rng.standard_normal(1000).astype(np.float32), rng.standard_normal(1000)
    for velocity in (None, rng.standard_normal(1000).astype(np.float32)):
        step = apply_momentum(w, velocity, change, gamma=0.0)
        assert step.w.tobytes() == (w + change).astype(np.float32).tobytes()
        assert step.v is None


def test_long_vectors_are_moved_everywhere():
    """It goes block by block; the last one is shorter."""
    rng, d = np.random.default_rng(0), 2 * BLOCK + 3
    w, v, change = rng.standard_normal(d).astype(np.float32), rng.standard_normal(d).astype(np.float32), np.ones(d)
    step = apply_momentum(w, v, change, gamma=0.5)
    moved = 0.5 * v.astype(np.float64) + change
    np.testing.assert_array_equal(step.v, moved.astype(np.float32))
    np.testing.assert_array_equal(step.w, (w + moved).astype(np.float32))
    change[-1] = np.inf
    assert apply_momentum(w, v, change, gamma=0.5).diverged


def test_divergence_keeps_the_model_and_drops_the_velocity():
    w, v = np.float32([1, 3e38]), np.float32([1, 3e38])
    for change in (np.array([0, 3e38]), np.array([np.nan, 0]), np.array([np.inf, 0])):
        step = apply_momentum(w, v, change, gamma=0.9)
        assert step.diverged
        np.testing.assert_array_equal(step.w, w)
        np.testing.assert_array_equal(step.v, [0, 0])


def test_inputs_are_never_modified():
    w, v, change = np.float32([1, 2]), np.float32([3, 4]), np.array([5.0, 6])
    apply_momentum(w, v, change, gamma=0.5)
    np.testing.assert_array_equal(np.concatenate([w, v, change]), [1, 2, 3, 4, 5, 6])


def test_momentum_accumulates_to_the_geometric_sum():
    w, v = np.zeros(1, np.float32), None
    for _ in range(60):
        step = apply_momentum(w, v, np.array([1.0]), gamma=0.5)
        w, v = step.w, step.v
    assert v == pytest.approx(2.0)  # 1 / (1 - gamma)


@pytest.mark.parametrize("gamma", [-0.1, 1.0, float("nan")])
def test_gamma_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        apply_momentum(np.zeros(1, np.float32), None, np.zeros(1), gamma=gamma)
