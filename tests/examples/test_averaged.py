"""A running mean, as a user's own method with a step of its own, which some devices do not have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from methods.averaged import Averaged

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.models.training import Network
from fedge.steps.contract import load_installed_steps, load_known_steps
from fedge.tensors.layout import unflatten
from tests.support.federation import ROOT, Federation
from tests.support.simulation import digits, predicted, require_personal_ahead

OWN = "methods.averaged:TrainAveraged"
AVERAGED = "methods.averaged:Averaged"


@pytest.mark.statistical
async def test_personal_models_ahead_of_the_global_one(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=12, how="dirichlet", alpha=0.1, sensitive=0.0)
    method = Averaged(MethodSettings(rounds=4))
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert len(state.installed) == 12
    require_personal_ahead(fleet, fleet.get(state.model, layout))


async def test_those_that_lack_the_step_end_with_a_bundle_too(tmp_path: Path) -> None:
    """3 of 12 devices: they are not asked to train, and install what the others learned."""
    fleet, layout, first, _ = digits(tmp_path, n=12, how="dirichlet", limit=600)
    lacking = {"d01", "d05", "d11"}
    workers = {
        i: Worker(i, w.task, w.data, w.home, steps=load_installed_steps() if i in lacking else load_known_steps([OWN]))
        for i, w in fleet.workers.items()
    }
    mixed = SimulatedFleet(fleet.task, layout, workers, seed=0)
    method = Averaged(MethodSettings(rounds=2))
    state = await run_rounds(method, method.init(layout, mixed.put(unflatten(fleet.get(first, layout), layout))), mixed)
    assert state.participations.keys() == workers.keys() - lacking
    assert state.installed.keys() == workers.keys()
    w, network = mixed.get(state.model, layout), Network(mixed.task)
    shared = {i: network.compute_logits(w, worker.data.x_val).argmax(axis=1) for i, worker in workers.items()}
    own = {i: predicted(worker, worker.data.x_val).argmax(axis=1) for i, worker in workers.items()}
    assert all(np.array_equal(own[i], shared[i]) for i in lacking), "they run what the others learned"
    assert not all(np.array_equal(own[i], shared[i]) for i in workers)
    order = method.make_order(state)
    assert {device.id for device in mixed.get_devices() if not device.knows(order)} == lacking


async def test_over_mqtt_with_agents_that_lack_the_step(
    mosquitto: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    devices = ("cam0", "cam1", "cam2")
    async with Federation(mosquitto, tmp_path, devices=devices) as federation:
        for device in devices:
            await federation.agent(device, **({} if device == "cam1" else {"steps": OWN}))
        coordinator = await federation.coordinator(method=AVERAGED, rounds=2)
        assert await coordinator.ended() == 0
    summary = json.loads((federation.home / "summary.json").read_bytes())
    assert summary["selection"] == {"cam0": 2, "cam2": 2}
    assert summary["installed"].keys() == set(devices)
    assert summary["refused"] == {}
    assert summary["problems"].keys() == {"cam1"}
    assert "does not know step train_averaged" in summary["problems"]["cam1"]["reason"]
    assert not federation.rows("SELECT id FROM orders WHERE device_id = 'cam1' AND label = 'train'"), "it is not asked"
