"""kill -9 of intakes while devices report: others take their work over, and each report is accepted once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.load import TOPICS, Device
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.baselines.fedbuff import FedBuffState
from coordinator.methods.state import decode_state
from coordinator.service.checks import make_first_model
from coordinator.store.database import make_connector
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.tasks import load_task
from fedge.wire.messages import Order, Report
from tests.support.broker import settings
from tests.support.federation import Running, words
from tests.support.postgres import new_database
from tests.support.waiting import until

N, ROUNDS = 24, 4
EVERY = 12
"""Answers between two kills."""


class Slow(Device):
    """A device that takes its time, so that a round lasts longer than an intake needs to start."""

    async def _report(self, order: Order) -> Report:
        await asyncio.sleep(random.Random(order.seed).uniform(0, 3))
        return await super()._report(order)


class Fleet:
    """Coordinator, intakes and devices on one broker."""

    def __init__(self, broker: LocalBroker, folder: Path, places: dict[str, str]) -> None:
        self.folder = folder
        self.home = folder / "coordinator"
        self.places = places
        self._flags = {
            "broker": f"{broker.host}:{broker.port}", "federation": TOPICS.federation, "home": self.home,
            "task": "digits", "method": "fedavg", "rounds": ROUNDS, "devices": N, "deadline_s": 120,
            "once": True, **places,
        }  # fmt: skip
        self._broker = settings(broker)
        self._started = contextlib.AsyncExitStack()
        self.devices: list[Device] = []

    async def process(self, name: str, **flags: object) -> Running:
        running = await Running.start(self.folder / f"{name}.log", "coordinator", *words({**self._flags, **flags}))
        self._started.push_async_callback(running.kill)
        return running

    async def helper(self, name: str, role: str) -> Running:
        """An intake or a server of models; where nothing needs a folder in common, with a home of its own."""
        return await self.process(name, role=role, home=self.folder / name if self.places else self.home)

    def store(self) -> Store:
        return Store(self.home, self.places.get("store"), blobs=self.places.get("blobs"), federation=TOPICS.federation)

    async def start_devices(self) -> None:
        task = load_task("digits")
        layout, _ = make_first_model(task, 0)
        for i in range(N):
            device = Slow(f"d{i:02}", self._broker, task.compute_fingerprint(), layout, self.folder / "devices")
            await device.start()
            self._started.push_async_exit(device.transport)
            self.devices.append(device)

    async def stop(self, running: Running) -> None:
        """Stop a process, but not in a transaction: the others would wait for its end, in vain."""
        with contextlib.closing(make_connector(self.home, self.places.get("store"), TOPICS.federation)()) as tables:
            while True:
                running.send(signal.SIGSTOP)
                begun = asyncio.create_task(asyncio.to_thread(tables.begin_writing))
                done, _ = await asyncio.wait({begun}, timeout=1)
                if not done:
                    running.send(signal.SIGCONT)
                await begun
                tables.execute("ROLLBACK")
                if done:
                    return

    def accepted(self) -> int:
        return sum(len(device.accepted) for device in self.devices)

    async def accepts(self, n: int) -> None:
        """Wait until so many more reports are acknowledged, or all of training."""
        goal = min(self.accepted() + n, N * ROUNDS)
        await until(lambda: self.accepted() >= goal)

    async def close(self) -> None:
        await self._started.aclose()


@pytest.fixture(params=["one machine", "several machines"])
async def fleet(request: pytest.FixtureRequest, mosquitto_program: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    places: dict[str, str] = {}
    if request.param == "several machines":
        tables = new_database(request.getfixturevalue("postgresql"))
        places = {"store": tables, "blobs": request.getfixturevalue("bucket")}
    async with LocalBroker("mosquitto", home=tmp_path / "broker") as broker:
        found = Fleet(broker, tmp_path, places)
        try:
            yield found
        finally:
            await found.close()


async def test_intakes_that_are_killed_lose_nothing_and_accept_nothing_twice(fleet: Fleet) -> None:
    coordinator = await fleet.process("coordinator")
    await until((fleet.home / "summary.json").exists)
    intakes = [await fleet.helper(f"intake{k}", "intake") for k in range(2)]
    for helper in (*intakes, await fleet.helper("blobs", "blobs")):
        await helper.logged("event=connected")
    await fleet.start_devices()
    await coordinator.said("round_begun", round=1)
    await until(lambda: fleet.accepted() > 0)
    await fleet.stop(coordinator)  # the others do its share, too
    await until(lambda: fleet.accepted() >= N)
    coordinator.send(signal.SIGCONT)
    kills = random.Random(1)
    while fleet.accepted() < N * ROUNDS:
        await fleet.accepts(EVERY)
        k = kills.randrange(2)
        await intakes[k].kill()
        intakes[k] = await fleet.helper(f"intake{k}", "intake")
    assert await coordinator.ended() == 0
    with contextlib.closing(fleet.store()) as store:
        entries = [entry for number in range(1, ROUNDS + 2) for entry in store.get_entries(number)]
        state = store.get_state()
    assert {entry.status for entry in entries} == {"accepted"}
    told = [order for device in fleet.devices for order in device.accepted]
    assert sorted(told) == sorted(entry.order.id for entry in entries)
    assert len(told) == N * (ROUNDS + 1)
    assert state is not None
    assert [one.answered for one in decode_state(state, FedAvgState).history] == [N] * ROUNDS
    assert sum(event["event"] == "answer" for event in coordinator.events) == len(told)


@pytest.mark.parametrize("fleet", ["one machine"], indirect=True)
async def test_intakes_that_are_killed_under_a_stream_lose_no_answer_and_bring_none_twice(fleet: Fleet) -> None:
    buffer, rounds = 8, 10
    flags = {"method": "fedbuff", "option": f"buffer={buffer}", "rounds": rounds, "keep_rounds": 1000}
    coordinator = await fleet.process("coordinator", **flags)
    await until((fleet.home / "summary.json").exists)
    intake = await fleet.process("intake", role="intake", **flags)
    await intake.logged("event=connected")
    await fleet.start_devices()
    for number in range(1, rounds, 3):
        await coordinator.said("round_done", round=number)
        await intake.kill()
        intake = await fleet.process("intake", role="intake", **flags)
    assert await coordinator.ended() == 0
    with contextlib.closing(fleet.store()) as store:
        state = store.get_state()
        entries = [entry for number in range(1, rounds + 2) for entry in store.get_entries(number)]
    assert state is not None
    assert [one.answered for one in decode_state(state, FedBuffState).history] == [buffer] * rounds
    told = [order for device in fleet.devices for order in device.accepted]
    assert len(told) == len(set(told))
    assert set(told) <= {entry.order.id for entry in entries if entry.status == "accepted"}
    answers = [(event["device"], event["label"]) for event in coordinator.events if event["event"] == "answer"]
    assert len(answers) >= buffer * rounds
