"""Asynchronous rounds over MQTT: killed in mid-round, or with a device that sleeps, they end as recorded."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from coordinator.methods.baselines.fedbuff import FedBuffState
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.state import State
from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation, same, settings
from tests.support.streams import record_of, replay_of, stand_still_in_mid_round
from tests.support.waiting import until

DEVICES = ("cam0", "cam1", "cam2")
SIZE = 3
STEPS = 300
"""Devices train for some 0.2 s: time enough to stop them before their answers, however few rounds there are."""
HAS_ORDER = "SELECT count(*) FROM orders WHERE device_id = 'cam2' AND status = 'open'"


async def ends_as_recorded(federation: Federation, method: str, rounds: int, kind: type[State]) -> None:
    """Every device has a bundle, and a simulation in which answers come as recorded ends in the same bytes."""
    given = msgspec.structs.replace(settings(rounds, steps=STEPS), options={"buffer": SIZE})
    state = federation.state(kind)
    assert same(state, await federation.undisturbed(method, given, replay_of(federation)))
    assert set(state.installed) == set(DEVICES)
    assert not federation.rows("SELECT id FROM orders WHERE status = 'open'")


@pytest.mark.parametrize(("method", "kind", "begun"), [("fedbuff", FedBuffState, 1), ("fedge", FedgeState, 2)])
async def test_killed_between_two_answers(
    mosquitto: LocalBroker, tmp_path: Path, method: str, kind: type[State], begun: int
) -> None:
    """The buffer is half full when the coordinator is killed; of fedge after the trial, which waits for everybody."""
    rounds = 6
    flags = {"method": method, "rounds": rounds, "local_steps": STEPS, "option": f"buffer={SIZE}"}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("round_done", round=begun)
        await stand_still_in_mid_round(federation, agents, SIZE)
        await coordinator.kill()
        before = record_of(federation)

        coordinator = await federation.coordinator(**flags)
        for agent in agents.values():
            agent.send(signal.SIGCONT)
        assert await coordinator.ended() == 0
        after = record_of(federation)
        assert all(after[number][: len(handed)] == handed for number, handed in before.items())
        together = {1, 2} if method == "fedge" else set()
        assert {number: len(handed) for number, handed in after.items()} == dict.fromkeys(
            sorted({*range(1, rounds + 1)} - together), SIZE
        )
        await ends_as_recorded(federation, method, rounds, kind)


async def test_a_device_that_sleeps_for_rounds(mosquitto: LocalBroker, tmp_path: Path) -> None:
    """Nobody waits for it. When it wakes it gets its order, and its answer counts what it is worth."""
    rounds = 7  # of more the store forgets the first
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        flags = {"method": "fedbuff", "rounds": rounds, "local_steps": STEPS, "option": f"buffer={SIZE}"}
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("round_done", round=1)
        sleeper = agents.pop("cam2")

        def others(number: signal.Signals) -> None:
            for agent in agents.values():
                agent.send(number)

        while True:  # until it has an order to sleep on; the others work, for a round without it gives it none
            await until(lambda: federation.rows(HAS_ORDER) == [(1,)])
            sleeper.send(signal.SIGSTOP)
            others(signal.SIGSTOP)
            sleeper.send(signal.SIGTERM)
            sleeper.send(signal.SIGCONT)
            await sleeper.ended()
            if federation.rows(HAS_ORDER) == [(1,)]:
                break
            sleeper = await federation.agent("cam2")
            others(signal.SIGCONT)
        (fell_asleep,) = federation.rows("SELECT max(round) FROM rounds")[0]
        others(signal.SIGCONT)
        await coordinator.said("round_done", round=fell_asleep + 1)
        others(signal.SIGSTOP)  # or they would be through before it is up

        def late() -> int:
            record = record_of(federation).items()
            own = [handed - written for handed, answers in record for written, i in answers if i == "cam2"]
            return max(own, default=0)

        await federation.agent("cam2")
        await until(lambda: late() >= 2)
        others(signal.SIGCONT)
        assert await coordinator.ended() == 0
        await ends_as_recorded(federation, "fedbuff", rounds, FedBuffState)
