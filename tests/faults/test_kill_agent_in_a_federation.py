"""kill -9 of an agent in mid-training of a real federation: broker, coordinator and agents are processes of their own.

The federation must end, every order must have counted once, and the model must be that of an undisturbed run: the same
devices in the simulated fleet, without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state
from coordinator.store.records import OrderStatus
from coordinator.store.store import Store
from edge_agent.device.worker import Worker
from edge_agent.learning.batched import execute_singly
from fedge.commands.broker import LocalBroker
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tasks import Partitioning, load_pool, load_task, partition_pool, read_device_data, write_share
from fedge.tensors.layout import unflatten
from tests.support import warm
from tests.support.broker import local_broker

ROOT = Path(__file__).parents[2]
DEVICES = ("cam0", "cam1", "cam2")
ROUNDS, STEPS, SEED = 3, 1500, 5
END_S = 300.0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in an agent: the order of sums, and with it the last bit, depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shares(tmp_path: Path) -> dict[str, Path]:
    paths = {device: tmp_path / f"{device}.npz" for device in DEVICES}
    shares = partition_pool(load_pool("digits", seed=SEED), len(DEVICES), Partitioning(sensitive=0.3), seed=SEED)
    for share, path in zip(shares, paths.values(), strict=True):
        write_share(share, path)
    return paths


@contextlib.asynccontextmanager
async def fedge(*arguments: object) -> AsyncIterator[Process]:
    command = warm.command(*map(str, arguments), "--json", forked=True)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT, env=warm.environment())
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def agent(broker: LocalBroker, device: str, data: Path, home: Path) -> contextlib.AbstractAsyncContextManager[Process]:
    return fedge(
        *("agent", "--broker", f"{broker.host}:{broker.port}", "--federation", "f", "--id", device),
        *("--home", home / device, "--task", "digits", "--data", data),
    )


async def event(process: Process, name: str, **fields: object) -> None:
    """Read what a process says until it says this."""
    assert process.stdout is not None
    async with asyncio.timeout(END_S):
        async for line in process.stdout:
            said = json.loads(line)
            if said["event"] == name and fields.items() <= said.items():
                return
    raise AssertionError(f"it ended without {name} {fields}")


async def undisturbed(shares: dict[str, Path], home: Path) -> str:
    """Digest of the last model of the same federation without a network."""
    task = load_task("digits")
    layout, model = make_initial_model(task, SEED)
    workers = {d: Worker(d, task, read_device_data(task, path, seed=0), home / d) for d, path in shares.items()}
    fleet = SimulatedFleet(task, layout, workers, seed=SEED, execute=execute_singly)
    method = make_method("fedavg", MethodSettings(rounds=ROUNDS, seed=SEED, sgd=Sgd(steps=STEPS)))
    state = method.init(layout, fleet.put(unflatten(model, layout)))
    for number in range(1, ROUNDS + 1):
        fleet.round = number
        state = await method.advance(state, fleet)
    return str(state.model.digest)


@pytest.mark.usefixtures("one_thread")
async def test_an_agent_killed_in_mid_training_changes_nothing(tmp_path: Path, shares: dict[str, Path]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(local_broker("auto", tmp_path))
        agents = {
            device: await stack.enter_async_context(agent(broker, device, data, tmp_path))
            for device, data in shares.items()
        }
        coordinator = await stack.enter_async_context(
            fedge(
                *("coordinator", "--broker", f"{broker.host}:{broker.port}", "--federation", "f"),
                *("--home", tmp_path / "server", "--task", "digits", "--method", "fedavg", "--rounds", ROUNDS),
                *("--devices", len(DEVICES), "--local-steps", STEPS, "--seed", SEED, "--deadline-s", 90, "--once"),
            )
        )
        await event(agents["cam1"], "order_started", round=2, step="train")
        agents["cam1"].kill()
        await agents["cam1"].wait()
        again = await stack.enter_async_context(agent(broker, "cam1", shares["cam1"], tmp_path))
        await event(again, "order_started", round=2, step="train")
        async with asyncio.timeout(END_S):
            await coordinator.communicate()
        assert coordinator.returncode == 0

    with contextlib.closing(Store(tmp_path / "server")) as store:
        for number in range(1, ROUNDS + 2):
            entries = store.get_entries(number)
            assert [entry.order.device_id for entry in entries] == list(DEVICES)
            assert {entry.status for entry in entries} == {OrderStatus.ACCEPTED}
        saved = store.get_state()
        assert saved is not None
        state = decode_state(saved, FedAvgState)
    assert state.participations == dict.fromkeys(DEVICES, ROUNDS)
    assert state.model.digest == await undisturbed(shares, tmp_path / "simulated")
