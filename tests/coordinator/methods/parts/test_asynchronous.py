"""How the buffer of an asynchronous step is filled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.methods.baselines.fedbuff import FedBuff
from coordinator.methods.parts.asynchronous import KEPT, compute_discount, fill_buffer
from coordinator.methods.settings import MethodSettings
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Codec
from tests.support.simulation import declining, digits, multiplying


def test_what_an_update_counts() -> None:
    assert [compute_discount(tau) for tau in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]


async def federation(home: Path, latencies: tuple[float, ...], **changes: Any) -> Any:
    """A fleet of such devices, and how the next buffer of a round is filled."""
    fleet, layout, first, _ = digits(home, n=len(latencies), limit=60 * len(latencies))
    fleet._hardware = {
        i: dataclasses.replace(own, latency_s=s) for (i, own), s in zip(fleet._hardware.items(), latencies, strict=True)
    }
    method = FedBuff(MethodSettings(**changes))
    order = Train(starts=(Start(model=first),), sgd=method.settings.sgd, codec=Codec.FLOAT32, measure=False)

    async def fill(number: int, size: int, seen: tuple[Any, ...] = ()) -> Any:
        fleet.round = number
        state = msgspec.structs.replace(method.init(layout, first), round=number - 1)
        return await fill_buffer(method, state, fleet, seen, size, lambda _: order)

    return fleet, fill


async def test_nobody_waits_for_a_device_that_answers_once_an_hour(tmp_path: Path) -> None:
    """It is late by the steps that the others have made meanwhile, and is asked again."""
    fleet, fill = await federation(tmp_path, (1.0, 1.0, 3600.0))
    for number in range(1, 4):
        buffer = await fill(number, 4)
        assert sorted(buffer.updates) == ["d00/0", "d00/2", "d01/1", "d01/3"]
        assert fleet.seconds == 2 * number
    fleet.seconds = 3599.5
    buffer = await fill(4, 3)
    assert buffer.staleness == {"d00/0": 1, "d01/2": 0, "d02/1": 3}
    assert buffer.discounts["d02/1"] == 0.5
    assert "d02" in fleet.get_busy_devices()


async def test_as_many_work_at_a_time_as_take_part(tmp_path: Path) -> None:
    """Whenever one has answered another one is drawn."""
    fleet, fill = await federation(tmp_path, (1.0, 1.5, 2.0, 2.5), participation=0.5)
    buffer = await fill(1, 5)
    assert buffer.asked == 6
    assert len(fleet.get_busy_devices()) == 1
    assert len({key.partition("/")[0] for key in buffer.updates}) > 2


async def test_who_declines_is_not_asked_again_in_this_step(tmp_path: Path) -> None:
    """Where nobody is left who works, the step is made of what has come."""
    fleet, fill = await federation(tmp_path, (1.0, 2.0))
    fleet._execute = declining("d00")
    buffer = await fill(1, 10)
    assert list(buffer.updates) == ["d01/0"]
    assert buffer.asked == 3
    assert not fleet.get_busy_devices()


async def test_a_huge_update_is_refused_in_the_first_step_of_a_round_as_in_all_others(tmp_path: Path) -> None:
    """What the steps before have seen is its measure."""
    fleet, fill = await federation(tmp_path, (1.0, 1.0, 1.0))
    first = await fill(1, 3)
    assert len(first.seen) == 3
    fleet._execute = multiplying(1e6, "d01")
    second = await fill(2, 6, first.seen)
    senders = [key.partition("/")[0] for key in second.updates]
    assert senders.count("d01") <= 1, "one that it had begun before"
    assert {(i, name) for i, _, name in fleet.offences} == {("d01", "update-too-large")}
    assert len((await fill(3, 30, second.seen)).seen) == KEPT
