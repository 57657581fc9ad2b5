"""Real agents in the process of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.privacy.egress import Rules
from fedge.tasks import DeviceData
from fedge.wire.connection.broker import BrokerSettings


@asynccontextmanager
async def agents(
    broker: LocalBroker, task: TaskSpec, devices: Mapping[str, DeviceData], home: Path, rules: Rules = Rules()
) -> AsyncIterator[None]:
    """Agents of the federation "all", at work within; each has its own connection, folder and thread for its work."""
    running = []
    for i, data in devices.items():
        identity = Identity(i, "all", task, n_shared=data.n_shared)
        make_worker = partial(Worker, i, task, data, home / i)
        running.append(Agent(identity, BrokerSettings(broker.host, broker.port), home / i, make_worker, rules=rules))
    async with asyncio.TaskGroup() as group:
        for agent in running:
            group.create_task(agent.run())
        try:
            yield
        finally:
            for agent in running:
                agent.stop()
