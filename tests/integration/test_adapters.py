"""Processes that train adapters: the agents have no file of weights, and fetch what is frozen from the coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.commands.broker import LocalBroker
from fedge.models.build import make_initial_model
from fedge.models.choice import with_network
from fedge.models.weights import find_device_weights
from fedge.tasks import load_task
from fedge.tensors.layout import to_bytes, unflatten
from tests.support.federation import Federation, same, settings


async def test_a_federation_ends_as_one_in_a_single_process(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    layout, model = make_initial_model(with_network(load_task("digits"), "cnn"), 5)
    file = tmp_path / "cnn.safetensors"
    file.write_bytes(to_bytes(unflatten(model, layout)))
    task = with_network(load_task("digits"), "cnn", file, "lora:2")
    async with Federation(one_broker, tmp_path, devices=["a", "b"], task=task) as federation:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "server"))
        coordinator = await federation.coordinator(method="fedavg", rounds=2, local_steps=3, weights=file)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "device"))
        await federation.agents()
        assert await coordinator.ended() == 0
        found = federation.state(FedAvgState)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
        assert same(found, await federation.undisturbed("fedavg", settings(2, steps=3)))
    frozen = find_device_weights(task)
    assert frozen is not None
    assert (tmp_path / "device" / "fedge" / "weights" / f"{frozen.digest}.safetensors").exists()
    assert set(found.installed) == {"a", "b"}
    assert found.layout.n_params < layout.n_params / 4
