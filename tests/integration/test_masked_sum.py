"""A masked round over a real broker in which a device is lost between sharing its secrets and sending its update."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from coordinator.methods import load
from coordinator.methods.fedavg import FedAvgState
from coordinator.service import CoordinatorSettings, serve
from coordinator.store import Store
from edge_agent.agent import Agent, Identity
from edge_agent.device import Fetch
from edge_agent.worker import Finished, Worker
from fedge.broker import LocalBroker
from fedge.messages import Order
from fedge.step import Action
from fedge.steps.train_masked import TrainMasked
from fedge.stopping import Stop, StoppedError
from fedge.tasks import Partitioning, partition, pool, share_data
from fedge.transport import BrokerSettings

DEVICES = tuple(f"cam{k}" for k in range(6))
LOST = "cam1"


class Losing(Worker):
    """One that never comes to the end of a masked training."""

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action | None = None) -> Finished:  # type: ignore[override]
        while isinstance(action, TrainMasked) and self.id == LOST:
            if stop():
                raise StoppedError
            time.sleep(0.02)
        return super().execute(order, fetch, stop=stop, action=action)


async def test_the_others_are_summed(one_broker: LocalBroker, tmp_path: Path) -> None:
    samples = pool("digits", limit=240)
    shares = partition(samples, len(DEVICES), Partitioning(alpha=10.0), seed=0)
    settings = CoordinatorSettings(
        broker=f"{one_broker.host}:{one_broker.port}",
        federation="f",
        home=tmp_path / "server",
        task="digits",
        method="fedavg",
        rounds=1,
        devices=len(DEVICES),
        deadline_s=30.0,
        average="mean",
        masking=True,
    )
    agents = []
    for device, share in zip(DEVICES, shares, strict=True):
        data = share_data(samples.spec, share)
        identity = Identity(device, "f", samples.spec, n_shared=data.n_shared)

        def make_worker(device: str = device, data=data) -> Worker:
            return Losing(device, samples.spec, data, tmp_path / device)

        broker = BrokerSettings(one_broker.host, one_broker.port)
        agents.append(Agent(identity, broker, tmp_path / device, make_worker))
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run())
        with contextlib.closing(Store(settings.home)) as store:
            await serve(settings, samples.spec, store, lambda *_: None)
            saved = store.state()
        for agent in agents:
            agent.stop()
    assert saved is not None
    state = load(saved, FedAvgState)
    others = tuple(device for device in DEVICES if device != LOST)
    assert list(state.sums) == [others]
    assert (state.history[0].asked, state.history[0].answered) == (6, 5)
    assert state.participations == dict.fromkeys(others, 1)
