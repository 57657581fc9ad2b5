"""FedAsync, as a user's own method: it waits for nobody, and what came when is durable."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from methods.fedasync import FedAsync, FedAsyncState

from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.commands.broker import LocalBroker
from tests.support.federation import ROOT, Federation, same, settings
from tests.support.simulation import digits
from tests.support.streams import record_of, replay_of
from tests.support.waiting import until

FEDASYNC = "methods.fedasync:FedAsync"
DEVICES = ("cam0", "cam1", "cam2")


async def test_a_step_by_hand(tmp_path: Path) -> None:
    """An answer that is three steps old, from another model: alpha = 0.6 / 2."""
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=120)
    method = FedAsync(MethodSettings())
    start, update = (
        fleet.put({info.name: np.full(info.shape, value, np.float32) for info in layout.tensors})
        for value in (2.0, 1.0)
    )
    after = fleet.get(method.mixed(method.init(layout, first), fleet, start, update, 3), layout)
    np.testing.assert_allclose(after.params, 0.7 * fleet.get(first, layout).params + 0.3 * 3.0, rtol=1e-6)


async def test_every_answer_is_a_step(tmp_path: Path) -> None:
    """The slow ones are late by steps; equal runs give equal bytes, and end in bundles."""
    ends = []
    for number in range(2):
        fleet, layout, first, _ = digits(tmp_path / str(number), n=4, limit=240)
        fleet._hardware = {
            i: dataclasses.replace(own, latency_s=1.0 + k * k) for k, (i, own) in enumerate(fleet._hardware.items())
        }
        method = FedAsync(MethodSettings(rounds=12))
        late = []
        state = await run_rounds(
            method, method.init(layout, first), fleet, lambda state, late=late: late.append(state.staleness)
        )
        assert [line.answered for line in state.history] == [1] * 12
        assert [line.asked for line in state.history] == [4] + [1] * 11
        assert max(late) > 1
        assert state.installed.keys() == fleet.workers.keys()
        ends.append(encode_state(state))
    assert ends[0] == ends[1]


async def test_killed_between_two_answers(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is killed while it waits for the answer of a round, with orders of earlier ones open."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    rounds, flags = 7, {"method": FEDASYNC, "rounds": 7, "option": "alpha=0.5"}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("round_done", round=1)
        for agent in agents.values():
            agent.send(signal.SIGSTOP)
        await until(lambda: not record_of(federation)[federation.rows("SELECT max(round) FROM rounds")[0][0]])
        await coordinator.kill()
        before = record_of(federation)

        coordinator = await federation.coordinator(**flags)
        for agent in agents.values():
            agent.send(signal.SIGCONT)
        assert await coordinator.ended() == 0
        after = record_of(federation)
        assert all(after[number] == handed for number, handed in before.items() if handed)
        given = msgspec.structs.replace(settings(rounds), options={"alpha": 0.5})
        replayed = await federation.undisturbed(FEDASYNC, given, replay_of(federation))
        assert same(federation.state(FedAsyncState), replayed)
        assert set(federation.state(FedAsyncState).installed) == set(DEVICES)
