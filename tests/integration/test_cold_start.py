"""Over Mosquitto: some devices train, another without torch and without labels ends with a bundle that runs."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest

import deploy
from coordinator.aggregation import correlation
from coordinator.methods.papers.fedcoe import FedCoEState
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.server.learning import ServerData
from coordinator.rollout.making import make_release
from export import parity
from export.signing import Repository
from fedge.bundle.manifest import decode_manifest
from fedge.commands.broker import find_mosquitto
from fedge.system.files import compute_digest, find_highest_release
from fedge.tasks import load_pool, read_device_inputs, read_labelled
from fedge.tensors.layout import flatten, from_bytes, to_bytes, unflatten
from tests.support.broker import local_broker
from tests.support.federation import NAME, ROOT, Federation, Running
from tests.support.torch_free import environment
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


async def test_a_device_without_torch_gets_a_bundle_that_runs(tmp_path: Path) -> None:
    async with (
        local_broker("mosquitto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=["a", "b", "c", "d"]) as federation,
    ):
        samples = load_pool("digits", seed=1)
        np.savez(tmp_path / "server_data.npz", x=samples.x[-200:], y=samples.y[-200:])
        few = np.flatnonzero(samples.y < 4)[:60]
        np.savez(tmp_path / "e.npz", x=samples.x[few])  # no labels
        late_joiner = await without_torch(federation, "e", tmp_path / "e.npz")
        await late_joiner.said("online")
        agents = await federation.agents()
        coordinator = await federation.coordinator(
            method="fedcoe", server_data=tmp_path / "server_data.npz", rounds=2, participation=1
        )
        assert await coordinator.ended() == 0
        state = federation.state(FedCoEState)
        for agent in (late_joiner, *agents.values()):
            await agent.said("report_acked", accepted=True)
        late_joiner.send(signal.SIGTERM)
        assert await late_joiner.ended() == 130
        asked = [event["step"] for event in late_joiner.events if event["event"] == "order_started"]

    assert asked == ["route", "install_bundle"]
    assert set(state.installed) == {"a", "b", "c", "d", "e"}
    assert set(state.clients) == {"a", "b", "c", "d"}
    assert state.participations == dict.fromkeys("abcd", 2)
    runtime = newest(tmp_path / "e")
    assert runtime.manifest.release == state.installed["e"].release
    assert runtime.manifest.method == "fedcoe"

    # The same by hand: rho from the gate in torch, theta_init by Eq. 13, logits plus t_c.
    task = federation.task
    server_data = ServerData(task, *read_labelled(task, tmp_path / "server_data.npz"))
    x = read_device_inputs(task, tmp_path / "e.npz")
    gate = from_bytes(blob(federation, state.gate.digest))
    rho = server_data.compute_routing(gate, x).mean(axis=0)
    np.testing.assert_allclose(state.profiles["e"], rho, atol=1e-5)
    assert rho[0] + rho[1] > 0.8, "classes 0 to 3 belong to the experts 0 and 1"
    experts = [flatten(from_bytes(blob(federation, ref.digest)), state.layout) for ref in state.experts]
    (theta,) = correlation.mix_models(experts, rho[None, :])
    t = correlation.compute_profile_prior(
        rho, server_data.compute_routing(gate).mean(axis=0), correlation.assign_classes(10, 5), 0.02
    )
    expected = server_data.compute_probabilities(theta, x) * np.exp(t)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(runtime.predict(samples.x[few]).probabilities, expected, atol=1e-4)

    # The release for anybody: the experts and the gate, without the server's samples.
    repository = Repository.make(tmp_path / "releases")
    target = make_release(tmp_path / "releases", federation.home, None)
    files = repository.find_files(target)
    manifest = decode_manifest(next(path.read_bytes() for name, path in files.items() if "manifest" in name))
    assert [c.part.digest for c in manifest.candidates] == [
        compute_digest(to_bytes(unflatten(expert, state.layout))) for expert in experts
    ]
    assert (manifest.fusion.top, manifest.method) == (2, "fedcoe")


async def test_the_default_method_gives_a_device_without_torch_the_global_model(tmp_path: Path) -> None:
    """One that is there when training ends, and one that comes later."""
    async with (
        local_broker("mosquitto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=["a", "b"]) as federation,
    ):
        samples = load_pool("digits", seed=1)
        np.savez(tmp_path / "e.npz", x=samples.x[:30])  # no labels
        early = await without_torch(federation, "early", tmp_path / "e.npz")
        await early.said("online")
        coordinator = await federation.coordinator(method="fedge", rounds=1, once=False)
        await federation.agents()
        await until(lambda: {"a", "b", "early"} <= set(installed(federation)))
        late = await without_torch(federation, "late", tmp_path / "e.npz")
        await until(lambda: "late" in installed(federation))
        for late_joiner in (early, late):
            await late_joiner.said("report_acked", accepted=True)
            asked = [event["step"] for event in late_joiner.events if event["event"] == "order_started"]
            assert asked == ["install_bundle"]
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130
        state = federation.state(FedgeState)
        model = flatten(from_bytes(blob(federation, state.shared.model.digest)), state.layout)

    assert state.participations == {"a": 1, "b": 1}
    x = read_device_inputs(federation.task, tmp_path / "e.npz")
    (logits,) = parity.compute_logits(federation.task, state.layout, [model], x)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for device in ("early", "late"):
        runtime = newest(tmp_path / device)
        assert runtime.manifest.method == "fedge"
        np.testing.assert_allclose(runtime.predict(samples.x[:30]).probabilities, expected, atol=1e-4)


async def test_devices_that_come_after_the_last_round_are_welcome(tmp_path: Path) -> None:
    """One without torch and one with it; the coordinator is killed and started again between them."""
    async with (
        local_broker("mosquitto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=["a", "b", "late"]) as federation,
    ):
        samples = load_pool("digits", seed=1)
        np.savez(tmp_path / "server_data.npz", x=samples.x[-100:], y=samples.y[-100:])
        np.savez(tmp_path / "e.npz", x=samples.x[:30])
        flags = {"method": "fedcoe", "server_data": tmp_path / "server_data.npz", "rounds": 1, "devices": 2}
        flags |= {"once": False}
        coordinator = await federation.coordinator(**flags)
        for device in ("a", "b"):
            await federation.agent(device)
        await until(lambda: len(installed(federation)) == 2)
        late_joiner = await without_torch(federation, "e", tmp_path / "e.npz")
        await until(lambda: "e" in installed(federation))
        await late_joiner.said("report_acked", accepted=True)
        await coordinator.kill()
        await federation.coordinator(**flags)
        await federation.agent("late")
        await until(lambda: "late" in installed(federation))
        query = "SELECT device_id, label FROM orders WHERE device_id IN ('e', 'late') ORDER BY 1, label DESC"
        asked = federation.rows(query)

    assert asked == [("e", "route"), ("e", "assemble"), ("late", "route"), ("late", "assemble")]
    for device in ("a", "b", "e", "late"):
        probabilities = newest(tmp_path / device).predict(samples.x[:5]).probabilities
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)


def newest(home: Path) -> deploy.Runtime:
    """The last bundle of a device."""
    return deploy.load(home / "bundles" / str(find_highest_release(home)))


def installed(federation: Federation) -> list[str]:
    file = federation.home / "summary.json"
    return list(json.loads(file.read_bytes())["installed"]) if file.exists() else []


async def without_torch(federation: Federation, device: str, data: Path) -> Running:
    """`fedge agent` where torch, onnx and all else that trains are not installed."""
    python, variables = environment(federation.folder / f"site-{device}")
    check = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('torch', 'onnx', 'safetensors'))))"
    absent = await asyncio.create_subprocess_exec(*python, "-c", check, env=variables, cwd=federation.folder)
    assert await absent.wait() == 0
    broker = federation.broker
    options = {
        "broker": f"{broker.host}:{broker.port}",
        "federation": NAME,
        "task": federation.folder / "task.json",
        "id": device,
        "home": federation.folder / device,
        "data": data,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    log = federation.folder / f"{device}.log"
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *python, "-m", "fedge", "agent", *words, "--json", stdout=PIPE, stderr=stderr, env=variables, cwd=ROOT
        )
    running = Running(process, log)
    federation._stack.push_async_callback(running.kill)
    return running


def blob(federation: Federation, digest: str) -> bytes:
    return (federation.home / "blobs" / digest).read_bytes()
