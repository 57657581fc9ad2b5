"""A model that moves with momentum: fedge.md section 4."""

import logging

import numpy as np
import pytest

from coordinator.aggregation import Average
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.parts.server_optimizer import ServerModel, apply, step_server
from fedge.data.task import TaskSpec
from fedge.steps.training.train import Trained
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
        moving = step_server(moving, change(1, -2), LAYOUT, fleet, gamma=0.5)
    found = fleet.get(moving.model, LAYOUT)
    np.testing.assert_array_equal(found.params, np.float32([1 + 1.5, -2 - 3]))  # v = 1, then 0.5 + 1
    assert moving.velocity is not None
    np.testing.assert_array_equal(fleet.get_tensors(moving.velocity)["v"], np.float32([1.5, -3]))
    assert (found.buffers.tolist(), found.counters.tolist()) == ([3.0], [5])  # the mean's own


def test_without_momentum_no_velocity_is_kept(fleet) -> None:
    moving = step_server(
        ServerModel(model=fleet.put(unflatten(model(1, 1), LAYOUT))), change(1, -2), LAYOUT, fleet, gamma=0.0
    )
    assert moving.velocity is None
    np.testing.assert_array_equal(fleet.get(moving.model, LAYOUT).params, np.float32([2, -1]))


def test_a_step_that_is_not_finite_is_not_taken_and_said(fleet, caplog) -> None:
    before = ServerModel(
        model=fleet.put(unflatten(model(3e38, 0), LAYOUT)), velocity=fleet.put({"v": np.float32([1, 1])})
    )
    with caplog.at_level(logging.ERROR):
        after = step_server(before, change(3e38, 0), LAYOUT, fleet, gamma=0.5)
    assert after == ServerModel(model=before.model)
    assert "event=diverged" in caplog.text


@pytest.mark.parametrize("kind", ["an answer", "a mean", "a model"])
def test_a_model_is_moved_by_whatever_was_made_of_updates(fleet, kind) -> None:
    """Parameters are differences; statistics and counters are those after training, whoever brings them."""
    own = Model(np.float32([1, -2]), np.float32([3]), np.int64([5]))
    update = Trained(update=fleet.put(unflatten(own, LAYOUT)), n_samples=7, cluster=-1)
    by = {"an answer": update, "a mean": change(1, -2), "a model": own}[kind]
    moved = fleet.get(apply(fleet.put(unflatten(model(4, 4), LAYOUT)), by, LAYOUT, fleet), LAYOUT)
    assert (moved.params.tolist(), moved.buffers.tolist(), moved.counters.tolist()) == ([5, 2], [3], [5])
    assert moved.params.dtype == moved.buffers.dtype == np.float32


def test_without_a_change_or_with_one_that_is_not_finite_the_model_stays(fleet) -> None:
    before = fleet.put(unflatten(model(3e38, 0), LAYOUT))
    assert apply(before, None, LAYOUT, fleet) == before
    assert apply(before, change(3e38, 0), LAYOUT, fleet) == before


def test_devices_fetch_only_how_the_new_model_differs_from_the_old_one() -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(5000,)),))
    fleet = SimulatedFleet(TASK, layout, {}, seed=0)
    fleet.descents = {}
    rng, nothing = np.random.default_rng(0), (np.zeros(0, np.float32), np.zeros(0, np.int64))
    before = fleet.put(unflatten(Model(rng.normal(size=5000).astype(np.float32), *nothing), layout))
    after = apply(before, Model(rng.normal(size=5000).astype(np.float32), *nothing), layout, fleet)
    assert fleet.descents[after.digest].base == before.digest


def test_whoever_writes_a_method_finds_it_beside_the_base_class() -> None:
    import coordinator.methods

    assert coordinator.methods.apply is apply
    assert coordinator.methods.average.__module__ == "coordinator.methods.parts.averaging"
