"""Campaigns of real processes: killed at any time, and missed by devices that sleep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.state import State
from coordinator.store.requests import request_action
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation, same, settings
from tests.support.waiting import until

DEVICES = ("cam0", "cam1", "cam2")


def ask(federation: Federation) -> None:
    """As `fedge campaign run` does."""
    with contextlib.closing(Store(federation.home, intake=True)) as store:
        request_action(store, "campaign-run")


def read(federation: Federation) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((federation.home / "summary.json").read_bytes())
    return summary


def rests_after(federation: Federation, number: int) -> bool:
    campaign = read(federation)["campaign"]
    return (campaign["number"], campaign["state"]) == (number, "resting")


@pytest.mark.parametrize(
    ("method", "kind", "rounds"), [("fedavg", FedAvgState, 5), ("fedge", FedgeState, 7)], ids=["fedavg", "fedge"]
)
async def test_campaigns_end_as_if_nobody_had_been_killed(
    mosquitto: LocalBroker, tmp_path: Path, method: str, kind: type[State], rounds: int
) -> None:
    """The coordinator, again and again, also right after the request; every order is done and counted once."""
    rng = random.Random(7)
    flags = {"method": method, "rounds": rounds, "once": False}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("resting")
        for number in (2, 3):
            ask(federation)
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await coordinator.kill()
                coordinator = await federation.coordinator(**flags)
                await coordinator.said("device")  # it is at work again
            await until(lambda number=number: rests_after(federation, number))  # type: ignore[misc]
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130
        per_step = federation.rows("SELECT round, label, device_id, count(*), min(status) FROM orders GROUP BY 1, 2, 3")
        assert all(row[3:] == (1, "accepted") for row in per_step)
        expected = await federation.undisturbed(method, settings(rounds), campaigns=3)
        assert same(federation.state(kind), expected)
        history = read(federation)["campaign"]["history"]
        assert [(each["number"], each["rounds"]) for each in history] == [(1, rounds), (2, rounds), (3, rounds)]


async def test_a_device_that_slept_through_campaigns_gets_the_last_bundle_when_it_is_back(
    mosquitto: LocalBroker, tmp_path: Path
) -> None:
    """It is asked for nothing of the campaigns that it missed, and the coordinator was killed while it slept."""
    flags = {"method": "fedge", "rounds": 1, "once": False}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("resting")
        agents["cam2"].send(signal.SIGTERM)
        await agents["cam2"].ended()
        for number in (2, 3, 4):
            ask(federation)
            await until(lambda number=number: rests_after(federation, number))  # type: ignore[misc]
        assert set(read(federation)["installed"]) == {"cam0", "cam1"}
        await coordinator.kill()
        coordinator = await federation.coordinator(**flags)
        before = federation.rows("SELECT max(round) FROM rounds")[0][0]
        await federation.agent("cam2")
        await until(lambda: "cam2" in read(federation)["installed"])
        after = federation.rows("SELECT DISTINCT round FROM orders WHERE device_id = 'cam2' AND round > 2")
        assert after == [(before + 1,)]
        assert rests_after(federation, 4)
        releases = {int(path.name) for path in (federation.folder / "cam2" / "bundles").iterdir()}
        assert releases == {1, read(federation)["installed"]["cam2"]["release"]}
