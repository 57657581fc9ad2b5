"""Who is asked again after an order without an answer."""

from itertools import pairwise

import msgspec
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.methods.parts.unresponsive import LONGEST_REST, AskingState, find_responsive, run_and_record
from coordinator.methods.rounds import select_results
from coordinator.store.records import Device
from fedge.steps.contract import Declined, Failed
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.tensors.layout import Layout, TensorInfo

NOBODY = AskingState(round=0, layout=Layout(tensors=(TensorInfo(name="w", shape=(1,)),)))


class Deaf:
    """Two devices, of which "b" never answers; `incarnation` of it."""

    def __init__(self) -> None:
        self.incarnation = "1"

    def get_devices(self):
        return Device("a", 5), Device("b", 5, incarnation=self.incarnation)

    async def run(self, step, actions):
        return {i: Answer(i, Declined(reason=step) if i == "a" else None) for i in actions}


async def rounds_asked(fleet: Deaf, n: int, state: AskingState = NOBODY) -> list[int]:
    asked = []
    for r in range(1, n + 1):
        state = msgspec.structs.replace(state, round=r - 1)
        there = find_responsive(state, fleet)
        asked += [r] if "b" in there else []
        state, _ = await run_and_record(state, fleet, "train", {i: DescribeLabels() for i in there})
    return asked


async def test_rests_double_up_to_the_longest() -> None:
    asked = await rounds_asked(Deaf(), 60)
    assert asked[:4] == [1, 3, 7, 15]
    assert max(b - a for a, b in pairwise(asked)) == LONGEST_REST


async def test_a_new_incarnation_wakes_it() -> None:
    fleet = Deaf()
    state, _ = await run_and_record(NOBODY, fleet, "train", {"b": DescribeLabels()})
    assert state.unresponsive["b"].misses == 1
    state = msgspec.structs.replace(state, round=1)
    assert set(find_responsive(state, fleet)) == {"a"}
    fleet.incarnation = "2"
    assert set(find_responsive(state, fleet)) == {"a", "b"}


async def test_where_all_rest_all_are_asked_and_an_answer_forgives() -> None:
    fleet = Deaf()
    state, answers = await run_and_record(NOBODY, fleet, "train", {"a": DescribeLabels()})
    assert state.unresponsive == {}
    assert select_results(answers, Declined) == {"a": Declined(reason="train")}
    assert select_results(answers, Failed) == {}


@pytest.mark.parametrize("r", [2, 3])
async def test_nobody_awake(r) -> None:
    fleet = Deaf()
    fleet.get_devices = lambda: (Device("b", 5),)
    state, _ = await run_and_record(NOBODY, fleet, "train", {"b": DescribeLabels()})
    state = msgspec.structs.replace(state, round=r - 1)
    assert set(find_responsive(state, fleet)) == {"b"}
