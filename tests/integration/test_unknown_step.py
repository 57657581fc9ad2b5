"""Devices that lack the step that trains: the run completes, and they end with a bundle all the same."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

import deploy
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import load_installed_steps
from fedge.tasks import Partitioning, load_pool, partition_pool, read_device_data, write_share
from fedge.wire.connection.broker import BrokerSettings

DEVICES = tuple(f"cam{n:02}" for n in range(12))
LACKING = {"cam01", "cam05", "cam11"}


@pytest.mark.usefixtures("first_model_made_here")
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedge"])
async def test_the_others_learn_and_they_get_what_those_learned(
    method: str, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    samples = load_pool("digits", seed=5, limit=1200)
    shares = partition_pool(samples, len(DEVICES), Partitioning(alpha=10.0, sensitive=0.3), seed=5)
    agents = []
    for device, share in zip(DEVICES, shares, strict=True):
        write_share(share, tmp_path / f"{device}.npz")
        data, home = read_device_data(samples.spec, tmp_path / f"{device}.npz", seed=5), tmp_path / device
        steps = {n: kind for n, kind in load_installed_steps().items() if device not in LACKING or n != "train"}
        worker = Worker(device, samples.spec, data, home, steps=steps)
        identity = Identity(device, "f", samples.spec, n_shared=data.n_shared, steps=steps)
        agents.append(
            Agent(identity, BrokerSettings(mosquitto.host, mosquitto.port), home, lambda worker=worker: worker)
        )
    settings = CoordinatorSettings(
        broker=f"{mosquitto.host}:{mosquitto.port}",
        federation="f",
        home=tmp_path / "coordinator",
        task="digits",
        method=method,
        rounds=2,
        devices=len(DEVICES),
        seed=5,
        once=True,
    )
    with contextlib.closing(Store(settings.home)) as store:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
            summary = await serve(settings, samples.spec, store, lambda *_: None)
            for agent in agents:
                agent.stop()
        asked = {entry.order.device_id for n in (1, 2) for entry in store.get_entries(n) if entry.order.step == "train"}
    assert summary["done"]
    assert asked == set(summary["selection"]) == set(DEVICES) - LACKING
    assert set(summary["installed"]) == set(DEVICES)
    assert summary["without_bundle"] == []
    said = "it does not know step train version 1: update fedge there, or install the step"
    assert {device: problem["reason"] for device, problem in summary["problems"].items()} == dict.fromkeys(
        LACKING, said
    )
    for device, share in zip(DEVICES, shares, strict=True):
        if device in LACKING:
            runtime = deploy.load(tmp_path / device / "bundles" / "1")
            assert (runtime.predict(share.x_test).class_index == share.y_test).mean() > 0.3
