"""Two processes of one device: both are told, the coordinator knows, and they take turns instead of fighting."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.mqtt.presence import TWICE
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.wire.messages import Presence
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK
from tests.support.waiting import until

WAIT_S = 300.0
ROOT = Path(__file__).parent.parent.parent


class Agents:
    """Agents of the id pi, in folders of their own; their logs."""

    def __init__(self, broker: LocalBroker, folder: Path) -> None:
        self._broker, self._folder = broker, folder
        self._running: dict[str, Process] = {}

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    async def start(self, name: str) -> None:
        home = self._folder / name
        where = (self._broker.host, str(self._broker.port), str(home), "0.5")
        command = (sys.executable, "-m", "tests.support.agent_process", *where)
        with (self._folder / f"{name}.log").open("ab") as stderr:
            self._running[name] = await asyncio.create_subprocess_exec(*command, stderr=stderr, stdout=PIPE, cwd=ROOT)
        await until(lambda: "event=connected" in self.log(name))

    async def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def kill_all(self) -> None:
        for name in list(self._running):
            await self.kill(name)


@pytest.fixture
async def agents(mosquitto: LocalBroker, tmp_path: Path) -> AsyncIterator[Agents]:
    found = Agents(mosquitto, tmp_path)
    yield found
    await found.kill_all()


@pytest.fixture
async def fleet(mosquitto: LocalBroker, tmp_path: Path) -> AsyncIterator[MqttFleet]:
    with contextlib.closing(Store(tmp_path / "server")) as store:
        made = MqttFleet(
            settings(mosquitto),
            store,
            Assignment(federation="test", run="r", task=TASK, layout=LAYOUT, seed=3, deadline_s=20.0),
            lambda event, fields: None,
        )
        async with made:
            yield made


async def told_of_both(fleet: MqttFleet) -> None:
    await until(lambda: "pi" in fleet.problems and fleet.problems["pi"].reason.startswith(TWICE))
    incarnations = fleet.registry.get_twins("pi")
    assert len(incarnations) == 2
    assert fleet.problems["pi"].reason.count(" since 20") == 2


@pytest.mark.parametrize("copied", [False, True])
async def test_two_of_one_id_are_told_so_and_when_one_has_gone_the_other_speaks_again(
    fleet: MqttFleet, agents: Agents, tmp_path: Path, copied: bool
) -> None:
    """An id that was given twice, or a card that was copied."""
    await agents.start("one")
    if copied:
        shutil.copytree(tmp_path / "one", tmp_path / "other")
    await agents.start("other")
    await until(lambda: all("event=twin" in agents.log(name) for name in ("one", "other")))
    assert "incarnation=" in agents.log("one")
    assert "since='20" in agents.log("one")
    await told_of_both(fleet)
    assert "event=disconnected" not in agents.log("one") + agents.log("other")
    await agents.kill("other")
    await until(lambda: fleet.registry.list_presence()["pi"] is Presence.ONLINE)
    await until(
        lambda: fleet.registry.get_incarnation("pi") in agents.log("other")
    )  # where it is named as the other one
    await agents.kill("one")
    await until(lambda: fleet.registry.list_presence()["pi"] is Presence.OFFLINE)


async def test_nobody_can_be_thrown_off_by_a_client_id_that_others_can_guess(
    mosquitto: LocalBroker, fleet: MqttFleet, agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    await agents.start("one")
    await until(lambda: fleet.registry.list_online())
    names = Topics("test")
    for client in (names.make_client_id("agent", "pi"), names.make_client_id("coordinator")):
        async with Transport(settings(mosquitto), client):
            pass
    assert "event=disconnected" not in agents.log("one")
    assert "event=disconnected" not in caplog.text
    assert fleet._transport.connected
