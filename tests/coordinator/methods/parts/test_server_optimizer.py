"""A model that moves with momentum: fedge.md section 4."""

import logging

import numpy as np
import pytest

from coordinator.aggregation import Average
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.parts.server_optimizer import ServerModel, stepped
from fedge.data.task import TaskSpec
from fedge.tensors.layout import Layout, Model, TensorInfo, unflatten

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2,)),
        TensorInfo(name="mean", shape=(1,), kind="buffer"),
        TensorInfo(name="count", shape=(), kind="counter"),
    )
)
TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")


@pytest.fixture
def fleet() -> SimulatedFleet:
    return SimulatedFleet(TASK, LAYOUT, {}, seed=0)


def model(*params: float) -> Model:
    return Model(np.float32(params), np.float32([1]), np.int64([1]))


def change(*params: float) -> Average:
    return Average(np.array(params), np.array([3.0]), np.int64([5]), 10)


def test_two_steps(fleet) -> None:
    moving = ServerModel(model=fleet.put(unflatten(model(0, 0), LAYOUT)))
    for _ in range(2):
        moving = stepped(moving, change(1, -2), LAYOUT, fleet, gamma=0.5)
    found = fleet.get(moving.model, LAYOUT)
    np.testing.assert_array_equal(found.params, np.float32([1 + 1.5, -2 - 3]))  # v = 1, then 0.5 + 1
    assert moving.velocity is not None
    np.testing.assert_array_equal(fleet.get_tensors(moving.velocity)["v"], np.float32([1.5, -3]))
    assert (found.buffers.tolist(), found.counters.tolist()) == ([3.0], [5])  # the mean's own


def test_without_momentum_no_velocity_is_kept(fleet) -> None:
    moving = stepped(
        ServerModel(model=fleet.put(unflatten(model(1, 1), LAYOUT))), change(1, -2), LAYOUT, fleet, gamma=0.0
    )
    assert moving.velocity is None
    np.testing.assert_array_equal(fleet.get(moving.model, LAYOUT).params, np.float32([2, -1]))


def test_a_step_that_is_not_finite_is_not_taken_and_said(fleet, caplog) -> None:
    before = ServerModel(
        model=fleet.put(unflatten(model(3e38, 0), LAYOUT)), velocity=fleet.put({"v": np.float32([1, 1])})
    )
    with caplog.at_level(logging.ERROR):
        after = stepped(before, change(3e38, 0), LAYOUT, fleet, gamma=0.5)
    assert after == ServerModel(model=before.model)
    assert "event=diverged" in caplog.text
