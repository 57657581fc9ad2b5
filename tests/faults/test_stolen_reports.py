"""Devices of one's own and of another federation that put themselves between the devices and the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.fleet.mqtt.presence import TWICE
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from fedge.steps.training.train import Trained
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.device import TASK
from tests.support.identities import Authority, TlsBroker
from tests.support.scene import Scene, Working, one_round
from tests.support.waiting import until

THIEVES, ROUNDS = 20, 8
DEVICES = ("cam1", "cam2", "cam3")
TOPICS = Topics("test")


class Thieves:
    """Members of both federations that ask for a share of what goes to the coordinator, and say nothing."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.stack = AsyncExitStack()

    async def join(self, broker: TlsBroker, authority: Authority, name: str, port: int) -> None:
        transport = Transport(broker.settings(authority.issue(name), port), f"thief:{authority.federation}:{name}")
        for group in ("intakes", "models"):
            for leaf in ("reports", "wants"):
                await transport.subscribe(f"$share/{group}/{TOPICS.make_agent_topic('+', leaf)}", self._keep)
        await self.stack.enter_async_context(transport)

    async def _keep(self, inbound: Inbound) -> None:
        self.got.append(inbound.topic)


@pytest.fixture
async def thieves() -> AsyncIterator[Thieves]:
    found = Thieves()
    async with found.stack:
        yield found


@pytest.fixture
def others(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "others", "other")


@pytest.fixture
async def broker(mosquitto_program: str, tmp_path: Path, others: Authority) -> AsyncIterator[TlsBroker]:
    """With two federations, each with its own rules."""
    async with TlsBroker(Authority(tmp_path / "test", "test"), tmp_path / "broker", other=others) as running:
        yield running


@pytest.fixture
async def scene(broker: TlsBroker, tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(stack, broker, broker.authority, tmp_path)


async def test_a_stolen_identity_silences_the_true_device_for_a_while_and_nobody_else(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are far ahead, so that the coordinator would refuse the true device as `replayed` from then on."""
    monkeypatch.setattr("edge_agent.agent.speech.voice.YIELD_BASE_S", 0.5)
    fleet = await scene.coordinator(deadline_s=20.0)
    true = await scene.agent("cam1")
    await scene.agent("cam2")
    await until(lambda: fleet.registry.get_incarnation("cam1") == true._incarnation)
    (tmp_path / "thief").mkdir()
    (tmp_path / "thief" / "life").write_bytes(b"4000000000")
    thief = Agent(
        Identity("cam1", "test", TASK, n_shared=5),
        scene.broker.settings(scene.files("cam1")),
        tmp_path / "thief",
        Working,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(thief.run())
        await until(lambda: fleet.registry.get_incarnation("cam1") == thief._incarnation)
        await until(lambda: any(event == "twin" for event, _ in scene.events["cam1"]))
        await until(
            lambda: fleet.registry.get_incarnation("cam1") == true._incarnation
        )  # it has gone above those numbers
        assert fleet.problems["cam1"].reason.startswith(TWICE)
        answers = await one_round(fleet, 1, "cam2")
        assert isinstance(answers["cam2"].result, Trained)
        thief.stop()
    await until(lambda: fleet.registry.get_incarnation("cam1") == true._incarnation)
    answers = await one_round(fleet, 2, "cam1", "cam2")
    assert all(isinstance(answer.result, Trained) for answer in answers.values())
    (met, *_) = [fields for event, fields in scene.events["cam1"] if event == "twin"]
    assert met["incarnation"] == thief._incarnation


async def test_who_asks_for_a_share_of_the_reports_gets_none_and_holds_up_nobody(
    scene: Scene, broker: TlsBroker, others: Authority, thieves: Thieves
) -> None:
    fleet = await scene.coordinator(deadline_s=20.0)
    for name in DEVICES:
        await scene.agent(name)
    for k in range(THIEVES // 2):
        await thieves.join(broker, scene.authority, f"thief{k}", broker.port)
        await thieves.join(broker, others, f"thief{k}", broker.other_port)
    for number in range(1, ROUNDS + 1):
        answers = await one_round(fleet, number, *DEVICES)
        assert all(isinstance(answer.result, Trained) for answer in answers.values())
    assert thieves.got == []
    await until(lambda: [e[0] for i in DEVICES for e in scene.events[i]].count("report_acked") == ROUNDS * len(DEVICES))
    assert not fleet.problems
