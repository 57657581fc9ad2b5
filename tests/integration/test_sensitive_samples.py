"""Two fleets that differ in sensitive samples alone say the same, byte for byte, whatever the method."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.protection import Protection
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Server
from coordinator.methods.settings import MethodSettings
from coordinator.rollout.decision import Plan, RolloutState
from coordinator.rollout.service import Release
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.store.store import Store
from deploy.updates.slots import Slots
from deploy.updates.trust import install_root
from edge_agent.agent import loop
from edge_agent.device.device import make_repeatable_source
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning.batched import Job, execute_singly
from export.signing import Repository
from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import LocalBroker
from fedge.data.validation import Validation
from fedge.models import build
from fedge.steps.contract import make_report
from fedge.steps.sgd import Sgd
from fedge.system.loading import FINE_TUNED
from fedge.tasks import DeviceData, Partitioning, Pool, load_pool, make_device_data, partition_pool, read_device_data
from fedge.tensors.layout import unflatten
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import Context, Health, Phase, Report, Status, Want, decode_message, encode_message
from fedge.wire.transport import Transport
from tests.deploy.bundles import source
from tests.support.agents import agents
from tests.support.broker import local_broker
from tests.support.rollouts import plan_of, rolled_out
from tests.support.runtime_device import LENIENT, device
from tests.support.simulation import of_method
from tests.support.trained_bundles import trained_bundle

ROUNDS = 5
METHODS = [
    *("local", "fedavg", "fedavg+ft", "fedavgm", "fedprox", "ditto", "ditto+ft", "fedper", "fedrep", "lg-fedavg"),
    *("fedrod", "dbe", "pm-moe", "pm-moe:base=fedrod", "pm-moe:base=dbe", "cfic", "fedepc", "fedcoe", "scmoe-pfl"),
    *("fedge", "fedge:split=always", "fedge:class_means=0.5", "fedge:buffer=3", "fedbuff"),
    *("fedbabu", "apfl", "pfedme", "moon", "fedgh", "fedcp", "gpfl"),
    *("fedadam", "fedyogi", "q-fedavg", "scaffold", "feddyn", "haccs", "ifca"),
]
PRIVATE = ["fedadam", "fedavg", "fedavgm", "fedbuff", "fedprox", "fedper", "fedrep", "fedyogi", "lg-fedavg"]
"""Methods that differential privacy is for."""
TUNED = {name for name in get_installed_methods() if FINE_TUNED not in load_method_class(name).REFUSED} - {"fedge"}
COMBINED = [
    *sorted({f"{name}+ft" for name in TUNED} - {*METHODS}),
    "fedge+ft:mode=shift",
    *(f"{name}{tuned} dp" for name in PRIVATE for tuned in ("", "+ft")),
]
"""What is combined of methods and parts that run alone, too."""
SEEDED = [
    *((method, (k + more) % 5) for k, method in enumerate(METHODS) for more in (0, 2)),
    *((method, k % 5) for k, method in enumerate(COMBINED)),
]
"""Each with federations of its own, for what all methods do is then seen on many."""


class Wire:
    """What the devices of a simulated fleet would send: every report with its blobs, in order."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def __call__(self, jobs: Sequence[Job]) -> list[FinishedOrder]:
        """Do the jobs."""
        finished = execute_singly(jobs)
        for job, done in zip(jobs, finished, strict=True):
            self.said.append(encode_message(make_report(job.order, done.result, 0.0)))
            self.said.extend(done.blobs[digest] for digest in sorted(done.blobs))
        return finished


def other_sensitive(data: DeviceData, rng: np.random.Generator) -> DeviceData:
    """The device with other sensitive samples, and another number of them; one in four has none."""
    train, validation = data.shared, data.shared_validation
    n, m = (int(rng.integers(1, 25)), int(rng.integers(0, 6))) if rng.integers(4) else (0, 0)
    return DeviceData(*with_sensitive(*train, n, rng), *with_sensitive(*validation, m, rng))


def with_sensitive(
    x: NDArray[Any], y: NDArray[np.int64], n: int, rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_]]:
    """Samples with n sensitive ones at places of their own among them, and the marks."""
    marks = np.ones(len(y) + n, np.bool_)
    marks[np.sort(rng.permutation(len(marks))[: len(y)])] = False
    both_x, both_y = np.empty((len(marks), *x.shape[1:]), x.dtype), np.empty(len(marks), np.int64)
    both_x[~marks], both_y[~marks] = x, y
    both_x[marks], both_y[marks] = rng.random((n, *x.shape[1:])) * x.max(), rng.integers(0, 10, n)
    return both_x, both_y, marks


@pytest.fixture(scope="module")
def samples() -> Pool:
    return load_pool("digits", seed=0, limit=600)


def said(method: str, devices: dict[str, DeviceData], samples: Pool, seed: int, home: Path) -> list[bytes]:
    """What they send in a run."""
    method, _, private = method.partition(" ")
    name, _, option = method.partition(":")
    spec = of_method(samples.spec, name.removesuffix(FINE_TUNED))
    layout, first = build.make_initial_model(spec, seed)
    workers = {i: Worker(i, spec, data, home / i, source=make_repeatable_source) for i, data in devices.items()}
    wire = Wire()
    fleet = SimulatedFleet(spec, layout, workers, seed=seed, execute=wire)
    options = dict([option.split("=")]) if option else {}
    guards = Protection(dp_noise=1.0 if private else None)
    settings = MethodSettings(rounds=ROUNDS, seed=seed, sgd=Sgd(steps=4), options=options, protection=guards)
    x = (samples.x[:80] / 16).astype(np.float32).reshape(80, *samples.spec.input_shape)
    made = make_method(name, settings, Server(samples.spec, (x, samples.y[:80])))
    asyncio.run(run_rounds(made, made.init(layout, fleet.put(unflatten(first, layout))), fleet))
    return wire.said


def check(method: str, seed: int, samples: Pool, folder: Path) -> None:
    """Two runs that differ in sensitive samples alone; noise is drawn from the orders' seeds in both."""
    shares = partition_pool(samples, 4, Partitioning(partition="groups", sensitive=0.4, n_groups=2), seed=seed)
    devices = {f"d{i}": make_device_data(samples.spec, share) for i, share in enumerate(shares)}
    rng = np.random.default_rng(100 + seed)
    others = {i: other_sensitive(data, rng) for i, data in devices.items()}
    first = said(method, devices, samples, seed, folder / "first")
    second = said(method, others, samples, seed, folder / "second")
    assert len(first) == len(second)
    assert [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b] == []


@pytest.mark.parametrize(("method", "seed"), SEEDED)
def test_sensitive_samples_shape_nothing_that_leaves(method: str, seed: int, samples: Pool, tmp_path: Path) -> None:
    check(method, seed, samples, tmp_path)


# -------------------------------------------------------------------------------------------- over a real broker


class Tap:
    """What is published by some connections of this process: by topic, without what differs between equal runs.

    That are times, random identifiers, which byte ranges somebody still lacked, and how often a report was repeated
    because the coordinator was slow to answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: set[tuple[str, bytes]] = set()
        self.reports: list[Report] = []
        self.health: list[Health] = []
        real = Transport.publish

        async def publish(transport: Transport, topic: str, payload: bytes, **how: Any) -> None:
            if "/agents/" in topic and not topic.endswith(("/orders", "/acks")):  # those are the coordinator's
                self.heard.add((topic, self.plain(topic, payload)))
            await real(transport, topic, payload, **how)

        monkeypatch.setattr(Transport, "publish", publish)

    def plain(self, topic: str, payload: bytes) -> bytes:
        """The payload with its clock, incarnation and latencies fixed."""
        leaf = topic.rsplit("/", 1)[1]
        if leaf == "status" and payload:
            return encode_message(msgspec.structs.replace(decode_message(payload, Status), incarnation="i"))
        if leaf == "reports":
            report = decode_message(payload, Report)
            self.reports.append(report)
            return encode_message(msgspec.structs.replace(report, seconds=0.0, again=0))
        if leaf in {"wants", "release-wants"}:
            return decode_message(payload, Want).digest.encode()
        if leaf == "health":
            health = decode_message(payload, Health)
            self.health.append(health)
            timeless = {
                name: quality and msgspec.structs.replace(quality, latency_ms=None)
                for name, quality in (("before", health.before), ("now", health.now))
            }
            return encode_message(msgspec.structs.replace(health, at=0.0, temperature_c=None, **timeless))
        return payload


async def lived(
    method: str,
    devices: dict[str, DeviceData],
    samples: Pool,
    home: Path,
    broker: LocalBroker,
    signed: Path,
    plan: Plan,
) -> None:
    """A federation to its end; then the runtime of d0 answers with its bundle, and takes in one of a rollout."""
    settings = CoordinatorSettings(
        broker=f"{broker.host}:{broker.port}",
        federation="all",
        home=home / "coordinator",
        task="digits",
        method=method,
        rounds=8,
        devices=len(devices),
        once=True,
    )
    async with agents(broker, samples.spec, devices, home):
        with contextlib.closing(Store(settings.home)) as store:
            store.put_value_once("run", "r")
            assert (await serve(settings, samples.spec, store, lambda *_: None, {}))["done"]
    d0 = home / "d0"
    data = devices["d0"]
    Validation(data.x_val, data.y_val, data.sensitive_val).save(d0)
    repo = Repository(shutil.copytree(signed, home / "repo"))
    install_root(d0, repo.read_root())
    slots = Slots(d0)
    slots.stage(*source(d0 / "bundles" / "1"))
    slots.switch()
    slots.confirm()
    release = Release(repo, home / "repo", plan.target)
    limits = msgspec.structs.replace(LENIENT, accuracy_drop=1.0)  # the verdict is the one thing that may differ
    async with device(BrokerSettings(broker.host, broker.port), d0, "d0", limits):
        assert (await rolled_out(broker, home / "repo", release, plan)).state is RolloutState.DONE


@pytest.mark.usefixtures("first_model_made_here")
@pytest.mark.parametrize("method", ["fedge", "ditto", "fedrep", "scmoe-pfl"])
async def test_over_a_real_broker_from_birth_to_a_rollout_everything_sent_is_the_same(
    method: str, samples: Pool, mosquitto_program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which samples validate is drawn from the device's files, too. In the second fleet d0 has nothing marked."""
    monkeypatch.setattr(loop, "measure_context", lambda i, n, *_: Context(device_id=i, n_samples=n))
    newer = trained_bundle(tmp_path / "newer", samples.spec, samples.x[:300], samples.y[:300], release=7)
    Repository.make(tmp_path / "repo")
    _, plan = plan_of(tmp_path / "repo", newer)
    found: list[Tap] = []
    private: list[str] = []
    for name, seed in (("first", 1), ("second", 2)):
        rng, devices = np.random.default_rng(seed), {}
        for k in range(4):
            own = slice(60 * k + 300, 60 * k + 360)
            n = 0 if (name, k) == ("second", 0) else int(rng.integers(5, 60))
            x, y, marks = with_sensitive(samples.x[own], samples.y[own], n, rng)
            np.savez(tmp_path / f"{name}-{k}.npz", x=x.astype(samples.x.dtype), y=y, sensitive=marks)
            devices[f"d{k}"] = read_device_data(samples.spec, tmp_path / f"{name}-{k}.npz", seed=k)
        with monkeypatch.context() as patch:
            found.append(Tap(patch))
            async with local_broker("mosquitto", tmp_path / name) as broker:
                await lived(method, devices, samples, tmp_path / name, broker, tmp_path / "repo", plan)
        private.append(read_bundle(tmp_path / name / "d0" / "bundles" / "1").digest)
    first, second = (tap.heard for tap in found)
    assert first == second
    assert private[0] != private[1], "what stays has learned from them"
    told = {"status", "context", "reports", "wants", "health", "release-wants"}
    assert {topic.split("/")[5] for topic, _ in first} == told | {"blobs"}
    for tap in found:
        installs = [
            report for report in tap.reports if report.order_id.endswith((".gate.d0", ".install.d0", ".mixture.d0"))
        ]
        assert {report.seconds for report in installs} == {0.0}
        assert {health.bundle_digest for health in tap.health} == {None, plan.digest}
        assert all(health.before is None for health in tap.health), "figures of a bundle that was made here"
        assert any(health.now is not None and health.phase is Phase.SERVING for health in tap.health)
