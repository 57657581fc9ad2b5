"""A device learns whether its reports counted: from its own folder, in simulations and over MQTT."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from coordinator.fleet.fleet import Fleet
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.agent.outbox import Outbox
from edge_agent.device.verdicts import ACKED, Verdict, was_accepted
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import load_installed_steps
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import Ack
from tests.support.asking import Asked, Asking
from tests.support.broker import settings
from tests.support.orders import LAYOUT, TASK, Blobs, device_data, order, worker

STEPS = {**load_installed_steps(), Asking.STEP: Asking}
WAIT_S = 300.0
ASKING = Asking()


def asked(home: Path, number: int = 1, label: str = "step") -> bool | None:
    """What a step is told that begins anew after a kill -9 whenever it is called."""
    result = worker(home).execute(order(ASKING, number, label=label), Blobs(), action=ASKING).result
    assert isinstance(result, Asked), result
    return result.counted


def write(home: Path, *verdicts: Verdict) -> None:
    (home / ACKED).parent.mkdir(exist_ok=True)
    (home / ACKED).write_bytes(msgspec.json.encode(verdicts))


def test_the_agents_own_file_says_what_was_accepted(tmp_path: Path) -> None:
    assert was_accepted(tmp_path, "a") is None
    with Outbox(tmp_path / ACKED.parent) as outbox:
        for name, accepted in (("a", True), ("b", False)):
            outbox.acknowledge(Ack(order_id=name, device_id="d", accepted=accepted), remember=2)
    assert [was_accepted(tmp_path, name) for name in "abc"] == [True, False, None]


@pytest.mark.parametrize("data", [b"", b"no", b"[1]"])
def test_a_damaged_file_says_nothing_and_stays(tmp_path: Path, data: bytes) -> None:
    write(tmp_path)
    (tmp_path / ACKED).write_bytes(data)
    assert was_accepted(tmp_path, "a") is None
    assert (tmp_path / ACKED).read_bytes() == data


def test_a_step_is_told_of_its_last_report(tmp_path: Path) -> None:
    assert asked(tmp_path, 1) is None
    assert asked(tmp_path, 2) is None  # no word of it has come
    write(tmp_path, Verdict("r.1.step.d", accepted=True), Verdict("r.2.step.d", accepted=False, reason="late"))
    assert asked(tmp_path, 3) is False
    write(tmp_path, Verdict("r.3.step.d", accepted=True))
    assert asked(tmp_path, 5) is True
    assert asked(tmp_path, 5, label="another") is None


def test_a_repeated_order_is_told_the_same_although_word_has_come(tmp_path: Path) -> None:
    assert [asked(tmp_path, 1), asked(tmp_path, 2)] == [None, None]
    write(tmp_path, Verdict("r.1.step.d", accepted=True))
    assert asked(tmp_path, 2) is None


def test_a_refusal_is_no_report(tmp_path: Path) -> None:
    assert asked(tmp_path, 1) is None
    worker(tmp_path).execute(order(Asking(declines=True), 2), Blobs(), action=Asking(declines=True))
    write(tmp_path, Verdict("r.1.step.d", accepted=False), Verdict("r.2.step.d", accepted=True))
    assert asked(tmp_path, 3) is False


def test_a_step_that_does_not_ask_writes_nothing(tmp_path: Path) -> None:
    device = worker(tmp_path).make_device(order(Asking()), Blobs())
    device.record_report()
    assert not (tmp_path / "kept").exists()


# ------------------------------------------------------------------------------------------------------- both fleets


async def told(fleet: Fleet, label: str, action: Asking = ASKING) -> bool | None:
    """What the one device is told, as far as its answer arrives."""
    (answer,) = (await fleet.run(label, {"d": action})).values()
    if not action.unwanted:
        assert isinstance(answer.result, Asked), answer
        return answer.result.counted
    assert not isinstance(answer.result, Asked), answer
    return None


async def test_in_a_simulation(tmp_path: Path) -> None:
    fleet = SimulatedFleet(TASK, LAYOUT, {"d": worker(tmp_path)}, seed=0)
    labels = "abcd"
    actions = (Asking(), Asking(unwanted=True), Asking(), Asking())
    assert [await told(fleet, *each) for each in zip(labels, actions, strict=True)] == [None, None, False, True]


async def test_an_answer_that_comes_too_late_in_a_simulation_does_not_count(tmp_path: Path) -> None:
    hardware = {"d": Hardware(latency_s=1.0)}
    fleet = SimulatedFleet(TASK, LAYOUT, {"d": worker(tmp_path)}, seed=0, hardware=hardware, deadline_s=0.5)
    (answer,) = (await fleet.run("a", {"d": Asking()})).values()
    assert answer.result is None
    fleet._deadline_s = None
    assert [await told(fleet, "b"), await told(fleet, "c")] == [False, True]


async def test_over_mqtt_and_by_an_agent_that_was_started_again(one_broker: LocalBroker, tmp_path: Path) -> None:
    home = tmp_path / "d"
    make_worker = partial(Worker, "d", TASK, device_data(), home, steps=STEPS)
    with contextlib.closing(Store(tmp_path / "server")) as store:
        assignment = Assignment(
            federation="f", run="r", task=TASK, layout=LAYOUT, seed=0, deadline_s=WAIT_S, steps=(Asking,)
        )
        async with MqttFleet(settings(one_broker), store, assignment, lambda _event, _fields: None) as fleet:
            async with running(one_broker, home, make_worker), asyncio.timeout(WAIT_S):
                await fleet.start_round(1, 1)
                assert await told(fleet, "a") is None
                assert await told(fleet, "b", Asking(unwanted=True)) is None
            async with running(one_broker, home, make_worker), asyncio.timeout(WAIT_S):
                assert await told(fleet, "c") is False
                assert await told(fleet, "e") is True


@asynccontextmanager
async def running(broker: LocalBroker, home: Path, make_worker: Callable[[], Worker]) -> AsyncIterator[None]:
    identity = Identity("d", "f", TASK, n_shared=1, steps=STEPS)
    agent = Agent(identity, BrokerSettings(broker.host, broker.port), home, make_worker)
    task = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        agent.stop()
        await task
