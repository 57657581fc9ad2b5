"""Relays, their devices and the coordinator in one process, against the same devices in a flat federation."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state
from coordinator.relay.cli import RelaySettings, open_relay
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import Worker
from edge_agent.learning.batched import execute_singly
from fedge.commands.broker import LocalBroker
from fedge.identity.names import Role
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.system.files import BlobFolder
from fedge.tasks import DeviceData, Partitioning, load_pool, make_device_data, partition_pool
from fedge.tensors.layout import Codec, Layout, Tensors, from_bytes, unflatten
from fedge.wire.messages import BlobRef
from tests.support.agents import agents
from tests.support.broker import local_broker
from tests.support.identities import Authority, OpenBroker

ROUNDS, STEPS = 3, 5
SAMPLES = load_pool("digits", limit=300)
NAMES = ("a0", "a1", "a2", "b0", "b1", "c0")
SITES = {"north": ("a0", "a1", "a2"), "south": ("b0", "b1")}
SPLIT = {"split": "always", "rho": 0.4}
CASES = [
    ("fedavg", {}, ROUNDS),
    ("fedrep", {}, 1),
    ("fedepc", {"clustering": "labels"}, 2),
    ("fedge", SPLIT, ROUNDS),
    ("fedadam", {}, 2),
    ("q-fedavg", {}, 2),
    ("ifca", {}, 2),
    ("fedcp", {}, 2),
    ("gpfl", {}, 2),
]


def devices() -> dict[str, DeviceData]:
    shares = partition_pool(SAMPLES, len(NAMES), Partitioning(alpha=10.0, sensitive=0.2), seed=0)
    return {name: make_device_data(SAMPLES.spec, share) for name, share in zip(NAMES, shares, strict=True)}


def address(broker: LocalBroker) -> str:
    return f"{broker.host}:{broker.port}"


@contextlib.asynccontextmanager
async def site(name: str, above: LocalBroker, home: Path) -> AsyncIterator[None]:
    """A relay with its own broker and its devices, at work within."""
    async with local_broker("auto", home) as below:
        settings = RelaySettings(
            broker=address(above),
            federation="all",
            id=name,
            home=home / "relay",
            task="digits",
            site_broker=address(below),
            site_federation="all",
        )
        mine = {i: data for i, data in devices().items() if i in SITES[name]}
        async with agents(below, SAMPLES.spec, mine, home), open_relay(settings, lambda *_: None) as relay:
            running = asyncio.create_task(relay.run())
            yield
            relay.stop()
            await running


async def served(
    above: LocalBroker,
    home: Path,
    method: str,
    options: dict[str, Any],
    rounds: int,
    wanted: int = len(NAMES),
    **changes: Any,
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """The model that each device is served at the end, by its name on its site; and the summary."""
    settings = CoordinatorSettings(
        broker=address(above),
        federation="all",
        home=home,
        task="digits",
        method=method,
        rounds=rounds,
        codec=Codec.FLOAT32,
        local_steps=STEPS,
        once=True,
        **{"devices": len(NAMES), **changes},
    )
    with contextlib.closing(Store(home)) as store:
        summary = await serve(settings, SAMPLES.spec, store, lambda *_: None, options)
        saved, start = store.get_state(), store.find_value("start")
    assert saved is not None
    assert start is not None
    made = make_method(method, settings.make_method_settings(options))
    state = decode_state(saved, type(made.make_first_state(*msgspec.json.decode(start, type=tuple[Layout, BlobRef]))))
    blobs = BlobFolder(home / "blobs")
    models = {i: from_bytes(blobs.get(made.get_model(state, i).digest)) for i in summary["installed"]}
    return {i.rpartition(".")[2]: model for i, model in models.items()}, summary


async def flat(home: Path, method: str, options: dict[str, Any], rounds: int) -> dict[str, Tensors]:
    """The same of the same devices without relays."""
    layout, first = make_initial_model(SAMPLES.spec.with_head_class(load_method_class(method).HEAD_CLASS), 0)
    workers = {i: Worker(i, SAMPLES.spec, data, home / i) for i, data in devices().items()}
    fleet = SimulatedFleet(SAMPLES.spec, layout, workers, seed=0, execute=execute_singly)
    settings = MethodSettings(rounds=rounds, sgd=Sgd(steps=STEPS), codec=Codec.FLOAT32, options=options)
    made = make_method(method, settings)
    state = await run_rounds(made, made.init(layout, fleet.put(unflatten(first, layout))), fleet)
    return {i: fleet.get_tensors(made.get_model(state, i)) for i in state.installed}


@pytest.mark.parametrize(("method", "options", "rounds"), CASES, ids=[case[0] for case in CASES])
async def test_every_device_ends_with_the_model_that_it_has_without_relays(
    one_broker: LocalBroker, tmp_path: Path, method: str, options: dict[str, Any], rounds: int
) -> None:
    """Two sites, and one device that is behind no relay."""
    alone = {"c0": devices()["c0"]}
    async with (
        site("north", one_broker, tmp_path / "north"),
        site("south", one_broker, tmp_path / "south"),
        agents(one_broker, SAMPLES.spec, alone, tmp_path),
    ):
        ours, summary = await served(one_broker, tmp_path / "server", method, options, rounds)
    theirs = await flat(tmp_path / "flat", method, options, rounds)
    assert sorted(ours) == sorted(theirs) == list(NAMES)
    assert summary["problems"] == {}
    for i, model in theirs.items():
        for name, tensor in model.items():
            np.testing.assert_allclose(ours[i][name], tensor, rtol=1e-4, atol=2e-5, err_msg=f"{name} of {i}")


async def test_what_needs_single_updates_is_refused_by_name(one_broker: LocalBroker, tmp_path: Path) -> None:
    alone = {i: data for i, data in devices().items() if i == "c0"}
    async with (
        site("north", one_broker, tmp_path / "north"),
        agents(one_broker, SAMPLES.spec, alone, tmp_path),
    ):
        ours, summary = await served(one_broker, tmp_path / "server", "fedavg", {}, 2, average="median", devices=1)
    assert list(ours) == ["c0"]
    assert "median needs each device's update" in summary["problems"]["north"]["reason"]


@pytest.mark.usefixtures("mosquitto_program")
async def test_a_site_with_an_authority_of_its_own(tmp_path: Path) -> None:
    """Everything is signed: above by the relay's certificate, below by the site's coordinator's, which the relay is."""
    over, under = Authority(tmp_path / "over", "all"), Authority(tmp_path / "under", "north")
    mine = under.issue("coordinator", Role.COORDINATOR)
    identity = tmp_path / "identity"
    shutil.copytree(under.folder, identity)
    for name, file in (("own.crt", mine["cert_file"]), ("own.key", mine["key_file"])):
        shutil.copy(file, identity / name)
    async with OpenBroker(over, tmp_path / "a") as above, OpenBroker(under, tmp_path / "b") as below:
        for i in ("a0", "a1"):
            under.issue(i)
        shutil.copy(under.folder / "members.json", identity)
        settings = RelaySettings(
            broker=address(above),
            federation="all",
            id="north",
            home=tmp_path / "relay",
            task="digits",
            site_broker=address(below),
            site_federation="north",
            site_identity=identity,
            **over.issue("north", Role.RELAY),
        )
        server = over.issue("coordinator", Role.COORDINATOR)
        async with open_relay(settings, lambda *_: None) as relay, asyncio.TaskGroup() as group:
            running = [relay]
            for i, data in devices().items():
                if i in {"a0", "a1"}:
                    files = {
                        "ca_file": str(under.file),
                        "cert_file": str(under.folder / f"{i}.crt"),
                        "key_file": str(under.folder / f"{i}.key"),
                    }
                    who = Identity(i, "north", SAMPLES.spec, n_shared=data.n_shared)
                    worker = partial(Worker, i, SAMPLES.spec, data, tmp_path / i)
                    running.append(Agent(who, below.settings(files), tmp_path / i, worker))
            for agent in running:
                group.create_task(agent.run())
            ours, summary = await served(above, tmp_path / "server", "fedavg", {}, 1, devices=2, **server)
            for agent in running:
                agent.stop()
    assert sorted(ours) == ["a0", "a1"]
    assert summary["selection"] == {"north.a0": 1, "north.a1": 1}
    assert summary["refused"] == {}
