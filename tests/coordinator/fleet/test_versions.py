"""Models that follow others: what travels, what is lost to rounding, and what is not."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.fleet.versions import Descent, find_descents, put_successor
from coordinator.methods.baselines.fedavg import FedAvg, FedAvgState
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from fedge.data.task import TaskSpec
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors import codecs
from fedge.tensors.layout import Layout, Model, TensorInfo, unflatten
from fedge.wire.messages import BlobRef, find_shared_bases, find_way, iterate_blobs
from tests.support.simulation import digits

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(30, 20)),
        TensorInfo(name="v", shape=(400,)),
        TensorInfo(name="running", shape=(5,), kind="buffer"),
        TensorInfo(name="n", shape=(), kind="counter"),
    )
)
D = LAYOUT.n_params


def fleet_with(params: np.ndarray) -> tuple[SimulatedFleet, BlobRef]:
    task = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")
    fleet = SimulatedFleet(task, LAYOUT, {}, seed=0)
    fleet.descents = {}
    return fleet, fleet.put(unflatten(model(params), LAYOUT))


def model(params: np.ndarray, number: int = 0) -> Model:
    return Model(params.astype(np.float32), np.full(5, 0.1 * number, np.float32), np.array([number]))


def normal(seed: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(D).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_a_device_makes_the_very_bytes_of_the_model_from_the_one_before(seed: int, own: float, change: float) -> None:
    fleet, first = fleet_with(before := normal(seed, own))
    after = model(before + normal(seed + 1, change), 7)
    ref = put_successor(fleet, first, after, LAYOUT)
    if ref == first or ref.digest not in fleet.descents:  # the change is lost in what float32 can hold
        return
    found = codecs.apply_differences(
        BytesIO(fleet.get_bytes(first)), [fleet.get_bytes(fleet.descents[ref.digest].blob)]
    )
    assert b"".join(map(bytes, found)) == fleet.get_bytes(ref)
    got = fleet.get(ref, LAYOUT)
    np.testing.assert_array_equal(got.buffers, after.buffers)
    np.testing.assert_array_equal(got.counters, after.counters)
    for name, tensor in unflatten(after, LAYOUT).items():
        largest = np.abs(tensor - fleet.get_tensors(first)[name]).max()
        unit = np.spacing(np.abs(tensor).max()) * 2
        np.testing.assert_allclose(fleet.get_tensors(ref)[name], tensor, rtol=0, atol=largest / 253 + unit)


def test_what_rounding_leaves_out_is_added_to_the_next_difference() -> None:
    """A weight that moves by a thousandth of the largest step would stand still for ever: it does so for a while."""
    fleet, ref = fleet_with(np.zeros(D))
    step = np.full(D, 0.001)
    step[0] = 1.0
    for _ in range(400):
        ref = put_successor(fleet, ref, model(fleet.get(ref, LAYOUT).params + step), LAYOUT)
    off = fleet.get(ref, LAYOUT).params[:600] - 400 * step[:600]
    assert np.abs(off).max() < 1.4 / 127  # a rounding of the last difference, however many came before
    assert fleet.get(ref, LAYOUT).params[1] > 0.38


def test_a_fleet_that_has_no_descents_keeps_models_as_they_are() -> None:
    fleet, first = fleet_with(before := normal(0))
    fleet.descents = None
    after = model(before + normal(1))
    np.testing.assert_array_equal(fleet.get(put_successor(fleet, first, after, LAYOUT), LAYOUT).params, after.params)


@pytest.mark.parametrize("largest", [3e38, 1e38])
def test_a_model_whose_numbers_are_too_large_for_a_difference_is_kept_as_it_is(largest: float) -> None:
    fleet, first = fleet_with(np.full(D, -largest))
    after = model(np.full(D, largest))
    ref = put_successor(fleet, first, after, LAYOUT)
    np.testing.assert_allclose(fleet.get(ref, LAYOUT).params, after.params, rtol=0.01)
    assert (ref.digest in fleet.descents) == (largest == 1e38)


def test_a_model_that_does_not_change_descends_from_nothing() -> None:
    fleet, first = fleet_with(normal(0))
    assert put_successor(fleet, first, model(normal(0)), LAYOUT) == first
    assert fleet.descents == {}


# -------------------------------------------------------------------------------------------------------------- ways


def ref(letter: str, size: int = 1000) -> BlobRef:
    return BlobRef(digest=letter * 64, size_bytes=size)


def descent(base: str, number: int, size: int = 300) -> Descent:
    return Descent(base=base * 64, blob=ref(str(number), size), carried=ref("f"))


CHAIN = {"d" * 64: descent("c", 3), "c" * 64: descent("b", 2), "b" * 64: descent("a", 1), "a" * 64: descent("e", 0)}


def test_a_way_leads_back_as_long_as_it_is_shorter_than_the_model() -> None:
    assert find_way(ref("d"), CHAIN, {"c" * 64, "b" * 64}) == ("c" * 64, (ref("3", 300),))
    assert find_way(ref("d"), CHAIN, {"a" * 64}) == ("a" * 64, (ref("1", 300), ref("2", 300), ref("3", 300)))
    assert find_way(ref("d"), CHAIN, {"e" * 64}) is None  # 1200 bytes
    assert find_way(ref("d"), CHAIN, ()) is None
    assert find_way(ref("d"), {}, {"c" * 64}) is None


def test_ways_that_lead_in_a_circle_end() -> None:
    circle = {"a" * 64: descent("b", 1, 1), "b" * 64: descent("a", 2, 1)}
    assert find_way(ref("a"), circle, {"c" * 64}) is None
    assert set(find_descents([ref("a")], circle)) == set(circle)


def test_a_base_is_shared_where_two_models_derive_from_it_directly() -> None:
    siblings = CHAIN | {"7" * 64: descent("c", 7), "8" * 64: descent("9", 8)}
    assert find_shared_bases([ref("d"), ref("7"), ref("8"), ref("e")], siblings) == [ref("c")]
    assert find_shared_bases([ref("d"), ref("c"), ref("d")], siblings) == []


def test_what_is_carried_is_kept_for_the_models_themselves_alone() -> None:
    found = find_descents([ref("d"), ref("b"), ref("e")], CHAIN)
    assert {digest[0]: step.carried is not None for digest, step in found.items()} == {
        "d": True, "c": False, "b": True, "a": False,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- in a method


async def test_a_round_that_is_done_again_gives_the_same_state_and_only_late_joiners_get_whole_models(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4)
    fleet.absent = frozenset({"d03"})
    method = FedAvg(MethodSettings(rounds=9, sgd=Sgd(steps=2)))
    state = method.init(layout, first)
    for fleet.round in 1, 2, 3:
        before, after = fleet.bytes_down, await method.advance(state, fleet)
        taken = fleet.bytes_down - before
        assert encode_state(
            await method.advance(decode_state(encode_state(state), FedAvgState), fleet)
        ) == encode_state(after)
        state = after
        fleet.remove_others({blob.digest for blob in iterate_blobs(state)})
        assert taken == 3 * first.size_bytes if fleet.round == 1 else taken < 3 * first.size_bytes / 3
    order = Train(starts=(Start(model=state.model),), sgd=Sgd(steps=1))
    newest = state.descents[state.model.digest].blob.size_bytes
    for device, expected in ("d00", newest), ("d03", first.size_bytes):
        before = fleet.bytes_down
        await fleet.run(f"to-{device}", {device: order})
        assert fleet.bytes_down - before == expected


def test_a_fleet_around_another_leaves_the_ways_to_models_with_it() -> None:
    """It is the other that writes the orders."""
    fleet, base = fleet_with(normal(0))
    around = Fleet(fleet)
    around.descents = {}
    ref = put_successor(around, base, model(normal(1)), LAYOUT)
    assert fleet.descents is not None
    assert fleet.descents.keys() == {ref.digest}
