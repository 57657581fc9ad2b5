"""Masked rounds over a real broker in which a device is lost or updated after it has shared its secrets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.state import decode_state
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.records import OrderStatus
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.device import Fetch
from edge_agent.device.worker import FinishedOrder, Worker
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import Action, load_installed_steps
from fedge.steps.masked.train_masked import TrainMasked
from fedge.system.stopping import Stop, StoppedError
from fedge.tasks import Partitioning, load_pool, make_device_data, partition_pool
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import Order, Outcome, Report, decode_message
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("first_model_made_here")
DEVICES = tuple(f"cam{k}" for k in range(6))
LOST = "cam1"
OTHERS = tuple(device for device in DEVICES if device != LOST)


class Losing(Worker):
    """One that never comes to the end of a masked training. `at_work`: set once it has begun."""

    at_work: threading.Event

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action | None = None) -> FinishedOrder:  # type: ignore[override]
        while isinstance(action, TrainMasked) and self.id == LOST:
            self.at_work.set()
            if stop():
                raise StoppedError
            time.sleep(0.02)
        return super().execute(order, fetch, stop=stop, action=action)


class Later(TrainMasked, frozen=True, kw_only=True):
    """The step in the next version."""

    VERSION: ClassVar = TrainMasked.VERSION + 1


class Masking:
    """A federation of six agents that learns under masks."""

    def __init__(self, broker: LocalBroker, folder: Path, **settings: object) -> None:
        samples = load_pool("digits", limit=240)
        shares = partition_pool(samples, len(DEVICES), Partitioning(alpha=10.0), seed=0)
        self.task, self._folder = samples.spec, folder
        self._broker = BrokerSettings(broker.host, broker.port)
        self._data = {i: make_device_data(samples.spec, share) for i, share in zip(DEVICES, shares, strict=True)}
        self.at_work = threading.Event()
        given = {"method": "fedavg", "average": "mean", "masking": True, "devices": len(DEVICES), **settings}
        self.settings = CoordinatorSettings(
            broker=f"{broker.host}:{broker.port}",
            federation="f",
            home=folder / "server",
            task="digits",
            once=True,
            **given,
        )

    def agent(self, device: str, **identity: object) -> Agent:
        data = self._data[device]

        def make_worker() -> Worker:
            worker = Losing(device, self.task, data, self._folder / device)
            worker.at_work = self.at_work
            return worker

        named = Identity(device, "f", self.task, n_shared=data.n_shared, **identity)  # type: ignore[arg-type]
        return Agent(named, self._broker, self._folder / device, make_worker)

    async def learn_with(self, agents: list[Agent]) -> FedAvgState:
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
            state = await self.learn()
            for agent in agents:
                agent.stop()
        return state

    async def learn(self) -> FedAvgState:
        with contextlib.closing(Store(self.settings.home)) as store:
            await serve(self.settings, self.task, store, lambda *_: None)
            saved = store.get_state()
        assert saved is not None
        return decode_state(saved, FedAvgState)


async def test_the_others_are_summed(one_broker: LocalBroker, tmp_path: Path) -> None:
    masking = Masking(one_broker, tmp_path, rounds=1, deadline_s=30.0)
    state = await masking.learn_with([masking.agent(device) for device in DEVICES])
    assert list(state.sums) == [OTHERS]
    assert (state.history[0].asked, state.history[0].answered) == (6, 5)
    assert state.participations == dict.fromkeys(OTHERS, 1)


async def test_an_agent_that_is_updated_in_a_sum_is_left_out_of_it_and_it_is_said(
    one_broker: LocalBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes back with another version of the step that it was asked for: the sum is that of the others, at once."""
    masking = Masking(one_broker, tmp_path, rounds=2, deadline_s=300.0)
    others = [masking.agent(device) for device in OTHERS]
    before, after = masking.agent(LOST), masking.agent(LOST, steps={**load_installed_steps(), "train_masked": Later})
    async with asyncio.TaskGroup() as group:
        for agent in others:
            group.create_task(agent.run())
        running = group.create_task(before.run())
        learning = group.create_task(masking.learn())
        await until(masking.at_work.is_set)
        before.stop()
        await running
        group.create_task(after.run())
        state = await learning
        for agent in (*others, after):
            agent.stop()
    assert list(state.sums) == [OTHERS]
    assert [(one.asked, one.answered) for one in state.history] == [(6, 5), (6, 5)]
    assert state.installed.keys() == set(DEVICES), "it takes part in all else"
    assert "this device has version 3" in caplog.text
    assert f"event=order_unsupported device={LOST}" in caplog.text


async def test_coordinator_and_agents_that_are_updated_in_a_sum_lose_that_sum_alone(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders and answers of before are in another version of the step: nobody sends them again and again."""
    masking = Masking(one_broker, tmp_path, rounds=2, deadline_s=300.0)
    before = [masking.agent(device) for device in DEVICES]
    async with asyncio.TaskGroup() as group:
        for agent in before:
            group.create_task(agent.run())
        learning = group.create_task(masking.learn())
        await until(lambda: masking.at_work.is_set() and len(reports(tmp_path, "train")) == len(OTHERS))
        learning.cancel()
        for agent in before:
            agent.stop()
    monkeypatch.setattr(TrainMasked, "VERSION", Later.VERSION)
    monkeypatch.setattr(Losing, "execute", Worker.execute)
    state = await masking.learn_with([masking.agent(device) for device in DEVICES])
    with contextlib.closing(Store(masking.settings.home)) as store:
        assert all(entry.status is not OrderStatus.OPEN for entry in store.get_entries(1))
    kept = [
        decode_message(file.read_bytes(), Report) for file in reports(tmp_path, "1.train")
    ]  # for a coordinator to come
    assert all(report.outcome is not Outcome.DONE for report in kept), "the door would hold it back for ever"
    assert [(one.asked, one.answered) for one in state.history] == [(6, 0), (6, 6)]
    assert list(state.sums) == [DEVICES]


def reports(folder: Path, label: str = "*") -> list[Path]:
    """What agents have answered and have no acknowledgement for."""
    return list(folder.glob(f"*/outbox/reports/*.{label}.*"))
