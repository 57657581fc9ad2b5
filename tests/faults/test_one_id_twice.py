"""Two devices of one id: both are told, the coordinator knows, and it takes them for gone when they are."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from coordinator.fleet.mqtt import TWICE, MqttFleet
from coordinator.store import Store
from fedge.broker import LocalBroker
from fedge.messages import Presence
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK
from tests.support.waiting import until

WAIT_S = 300.0
ROOT = Path(__file__).parent.parent.parent


async def agent(broker: LocalBroker, home: Path, log: Path) -> Process:
    """An agent of the id pi."""
    command = (sys.executable, "-m", "tests.support.agent_process", broker.host, str(broker.port), str(home))
    with log.open("wb") as stderr:
        return await asyncio.create_subprocess_exec(*command, stderr=stderr, stdout=PIPE, cwd=ROOT)


async def test_two_of_one_id_are_told_so_and_do_not_stay_online(mosquitto: LocalBroker, tmp_path: Path) -> None:
    logs = [tmp_path / "one.log", tmp_path / "other.log"]
    with contextlib.closing(Store(tmp_path / "server")) as store:
        fleet = MqttFleet(
            settings(mosquitto),
            store,
            federation="test",
            run="r",
            task=TASK,
            layout=LAYOUT,
            seed=3,
            deadline_s=20.0,
            observe=lambda event, fields: None,
        )
        async with fleet:
            two = [await agent(mosquitto, tmp_path / log.stem, log) for log in logs]
            try:
                await until(lambda: all("event=thrown_off" in log.read_text() for log in logs))
                assert "devices of one --id" in logs[0].read_text()
                await until(lambda: "pi" in fleet.problems)
                assert fleet.problems["pi"].reason == TWICE
            finally:
                for one in two:
                    one.send_signal(signal.SIGKILL)
                    await one.wait()
            await until(lambda: fleet.registry.presence()["pi"] is Presence.OFFLINE)
