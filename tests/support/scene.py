"""Coordinator and agents of a federation whose members sign, in the test's own process, over any broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.store.store import Store
from edge_agent.agent.carrier import OrderExecutor
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import FinishedOrder
from fedge.identity.names import Role
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.system.files import compute_digest
from fedge.tensors import codecs
from fedge.tensors.layout import Codec
from fedge.wire.messages import BlobRef, Order
from tests.support.device import LAYOUT, TASK, tensors, trained
from tests.support.identities import Authority, OpenBroker, TlsBroker
from tests.support.peer import EchoWorker
from tests.support.waiting import until

WAIT_S = 300.0


class Working(EchoWorker):
    """Answers an order to train with an update of the right layout."""

    def execute(self, order: Order, fetch: Callable, *, stop: Callable[[], bool], action: object) -> FinishedOrder:
        if not isinstance(action, Train):
            return super().execute(order, fetch, stop=stop, action=action)  # type: ignore[arg-type]
        data = codecs.encode(tensors(0.5), Codec.INT8)
        self.done.append(order.id)
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=Codec.INT8)
        return FinishedOrder(trained(ref), {ref.digest: data})


class Scene:
    """Coordinator and agents; what the agents say, by name."""

    def __init__(
        self, stack: AsyncExitStack, broker: OpenBroker | TlsBroker, authority: Authority, folder: Path
    ) -> None:
        self.stack, self.broker, self.authority, self.folder = stack, broker, authority, folder
        self.events: dict[str, list[tuple[str, dict]]] = {}
        self.workers: dict[str, Working] = {}
        self.agents: dict[str, Agent] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def coordinator(self, *, deadline_s: float = 30.0) -> MqttFleet:
        self.store = self.stack.enter_context(contextlib.closing(Store(self.folder / "server")))
        fleet = MqttFleet(
            self.broker.settings(self.authority.issue("coordinator", Role.COORDINATOR)),
            self.store,
            Assignment(federation="test", run="r", task=TASK, layout=LAYOUT, seed=3, deadline_s=deadline_s),
            lambda event, fields: None,
        )
        return await self.stack.enter_async_context(fleet)

    async def agent(self, name: str, works: OrderExecutor | None = None) -> Agent:
        files = self.authority.issue(name) if name not in self.authority.members else self.files(name)
        events = self.events.setdefault(name, [])
        self.workers[name] = Working()
        worker = works or self.workers[name]
        agent = Agent(
            Identity(name, "test", TASK, n_shared=5),
            self.broker.settings(files),
            self.folder / name,
            lambda: worker,
            observe=lambda event, fields: events.append((event, fields)),
        )
        task = asyncio.create_task(agent.run())
        self.agents[name], self.tasks[name] = agent, task
        self.stack.push_async_callback(self.stop, name)
        count = len([1 for event, _ in events if event == "online"])
        await until(lambda: len([1 for event, _ in events if event == "online"]) > count or task.done())
        return agent

    def files(self, name: str) -> dict[str, str]:
        folder = self.authority.folder
        return {
            "ca_file": str(self.authority.file),
            "cert_file": str(folder / f"{name}.crt"),
            "key_file": str(folder / f"{name}.key"),
        }

    async def stop(self, name: str) -> None:
        self.agents[name].stop()
        await self.tasks[name]

    def refused(self, name: str) -> list[str]:
        return [str(fields["name"]) for event, fields in self.events[name] if event == "refused"]


def train(fleet: MqttFleet) -> Train:
    return Train(starts=(Start(model=fleet.put(tensors(1.0))),), sgd=Sgd())


async def one_round(fleet: MqttFleet, number: int, *devices: str) -> dict:
    async with asyncio.timeout(WAIT_S):
        await fleet.start_round(number, len(devices))
        return await fleet.run("train", dict.fromkeys(devices, train(fleet)))
