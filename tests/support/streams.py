"""Streams of answers in a simulation that follow a record, and the record that a coordinator has kept."""

from __future__ import annotations

import functools
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from coordinator.fleet.fleet import AcceptedUpdate, Answer
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.store.records import Device
from fedge.steps.contract import Action
from fedge.wire.messages import iterate_blobs
from tests.support.federation import Federation, Running
from tests.support.waiting import until

Record = Mapping[int, list[tuple[int, str]]]
"""For each round what was handed out in it: the round of the order, and the device."""


class Replay(SimulatedFleet):
    """Hands out answers in the order of a record. `there`: the devices of each round."""

    def __init__(self, *given: Any, record: Record, there: Mapping[int, Collection[str]], **named: Any) -> None:
        super().__init__(*given, **named)
        self._there_at = there
        self._record = {number: list(handed) for number, handed in record.items()}
        self._open: dict[tuple[int, str], list[Answer]] = defaultdict(list)

    def _find_present(self) -> list[str]:
        return [i for i in super()._find_present() if i in self._there_at[self.round]]

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        del seen
        for answer in self._carry_out(self._make_orders(label, actions)[0]):
            self._open[self.round, answer.device_id].append(answer)
        while self._record[self.round]:
            yield self._open[self._record[self.round].pop(0)].pop(0)

    def get_busy_devices(self) -> frozenset[str]:
        return frozenset(device for (_, device), answers in self._open.items() if answers)

    def find_needed_blobs(self) -> set[str]:
        return {ref.digest for answers in self._open.values() for a in answers for ref in iterate_blobs(a.result)}


def record_of(federation: Federation) -> dict[int, list[tuple[int, str]]]:
    """What the coordinator has recorded before it handed it out."""
    record = defaultdict(list)
    query = "SELECT handed, round, device_id FROM orders WHERE handed IS NOT NULL ORDER BY arrival"
    for handed, written, device in federation.rows(query):
        record[handed].append((written, device))
    return record


def replay_of(federation: Federation) -> Callable[..., Replay]:
    """The simulated fleet in which answers come as a coordinator's did, and devices."""
    there = {
        number: {device.id for device in msgspec.msgpack.decode(devices, type=tuple[Device, ...])}
        for number, devices in federation.rows("SELECT round, devices FROM rounds")
    }
    return functools.partial(Replay, record=record_of(federation), there=there)


async def stand_still_in_mid_round(federation: Federation, agents: Mapping[str, Running], size: int) -> None:
    """Stop all agents when a round has been given some of its `size` answers, and no answer waits."""
    waiting = "SELECT count(*) FROM orders WHERE streamed = 1 AND status <> 'open' AND handed IS NULL"

    def full() -> int:
        (current,) = federation.rows("SELECT max(round) FROM rounds")[0]
        return len(record_of(federation)[current]) % size

    while True:
        await until(lambda: bool(full()))
        for agent in agents.values():
            agent.send(signal.SIGSTOP)
        await until(lambda: federation.rows(waiting) == [(0,)])
        if full():
            return
        for agent in agents.values():
            agent.send(signal.SIGCONT)
