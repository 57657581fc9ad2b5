"""Devices that do not answer rest for a while, since each would cost a whole deadline.

Rests grow with every unanswered order (`find_responsive`). A method counts unanswered orders in its state
(`AskingState`), through `run_and_record`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.rounds import run_with_retries
from coordinator.methods.state import State
from coordinator.store.records import Device
from fedge.steps.contract import Action

LONGEST_REST: Final = 16
"""The longest rest of a device that never answers, in rounds."""


class MissedOrders(Struct, frozen=True, kw_only=True):
    """The number of a device's last orders in a row without answer, the last one's round, the incarnation then."""

    misses: int
    round: int
    incarnation: str


class AskingState(State, frozen=True, kw_only=True):
    """The state of a method whose unresponsive devices rest."""

    unresponsive: dict[str, MissedOrders] = {}


H = TypeVar("H", bound=AskingState)


def find_responsive(state: AskingState, fleet: Fleet) -> dict[str, Device]:
    """Return the devices to ask in the next round, by id, without those that rest.

    After one unanswered order a device rests for a round, after two for three, after three for seven. A device with a
    new incarnation rests less: not at all the first time, then for one round, then for two, and so on. If all devices
    rest, all are asked, because they can delay no other device.
    """
    devices = {device.id: device for device in fleet.get_devices()}
    missed = {i: misses for i, misses in state.unresponsive.items() if i in devices}
    rests = {i: m.misses if devices[i].incarnation != m.incarnation else 2**m.misses for i, m in missed.items()}
    resting = {i for i, rest in rests.items() if state.round + 1 - missed[i].round < min(rest, LONGEST_REST)}
    return {i: device for i, device in devices.items() if i not in resting} or devices


async def run_and_record(
    state: H, fleet: Fleet, label: str, actions: Mapping[str, Action], *, insisting: bool = False
) -> tuple[H, dict[str, Answer]]:
    """Run actions in the next round, and record which devices answered. `insisting`: use `run_with_retries`."""
    answers = await (run_with_retries(fleet, label, actions) if insisting else fleet.run(label, actions))
    incarnations = {device.id: device.incarnation for device in fleet.get_devices()}
    unresponsive = {i: s for i, s in state.unresponsive.items() if i not in answers}
    for i, answer in answers.items():
        if answer.result is None:
            before = state.unresponsive[i].misses if i in state.unresponsive else 0
            unresponsive[i] = MissedOrders(misses=before + 1, round=state.round + 1, incarnation=incarnations[i])
    return msgspec.structs.replace(state, unresponsive=unresponsive), answers
