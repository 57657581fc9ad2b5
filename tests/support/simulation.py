"""Small simulated federations of real workers on digits, in which some devices can be unresponsive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coordinator.fleet.fleet import Answer
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums, average_updates
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.method import Method
from coordinator.methods.state import State
from coordinator.store.records import Device
from deploy import load
from edge_agent.device.device import UnpackedModel
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning import batched
from fedge.bundle.manifest import Manifest
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.models.training import CPU, Network
from fedge.steps.contract import Action, Declined
from fedge.tasks import DeviceData, Partitioning, load_pool, make_device_data, partition_pool
from fedge.tasks.shares import Groups
from fedge.tensors import codecs
from fedge.tensors.layout import Layout, Model, unflatten
from fedge.wire.messages import BlobRef, Role, Why
from tests.support.orders import manifest_of

A = TypeVar("A", bound=Action)
S = TypeVar("S", bound=State)


class Fleet(SimulatedFleet):
    """A simulated fleet whose `unresponsive` devices never answer.

    `asked`: every round, label and device, in order; `orders`: the same with the action; `heard`: all answers.
    `absent`: devices that are not there; `drifting`: whose data have changed; `incarnations`: of the devices that have
    one. A test sets `before` to learn of a step before it begins, and `change` to falsify its answers.
    """

    unresponsive: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    drifting: frozenset[str] = frozenset()
    incarnations: Mapping[str, str] = {}

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.asked: list[tuple[int, str, str]] = []
        self.orders: list[tuple[int, str, str, Action]] = []
        self.heard: list[Answer] = []
        self.before: Callable[[str, Mapping[str, Action]], object] = lambda *_: None
        self.change: Callable[[str, dict[str, Answer]], object] = lambda *_: None

    def get_devices(self) -> tuple[Device, ...]:
        there = (d for d in super().get_devices() if d.id not in self.absent)
        return tuple(
            dataclasses.replace(d, incarnation=self.incarnations.get(d.id, ""), drift=d.id in self.drifting)
            for d in there
        )

    def sent(self, kind: type[A]) -> dict[str, A]:
        """The last action of a kind that each device was asked for."""
        return {device: action for _, _, device, action in self.orders if isinstance(action, kind)}

    def data(self, device_id: str) -> DeviceData:
        return self.workers[device_id].data

    def give(self, device_id: str, data: DeviceData) -> None:
        """The device starts again with other data."""
        before = self.workers[device_id]
        self.workers[device_id] = Worker(device_id, before.task, data, before.home)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.before(label, actions)
        self.orders += [(self.round, label, device, actions[device]) for device in sorted(actions)]
        self.asked += [(self.round, label, device) for device in sorted(actions)]
        heard = await super().run(label, {i: a for i, a in actions.items() if i not in self.unresponsive})
        answers = {i: heard.get(i, Answer(i, None)) for i in sorted(actions)}
        self.change(label, answers)
        self.heard += answers.values()
        return answers


def of_method(task: TaskSpec, name: str) -> TaskSpec:
    """The task with the network of a method."""
    return task.with_head_class(load_method_class(name).HEAD_CLASS)


def digits(
    home: Path,
    *,
    n: int = 6,
    how: str = "groups",
    alpha: float = 1.0,
    seed: int = 0,
    limit: int | None = None,
    n_groups: int = 3,
    groups: Groups = "rotation",
    model: str = "mlp",
    sensitive: float = 0.3,
    processor: torch.device = CPU,
    method: str = "",
) -> tuple[Fleet, Layout, BlobRef, dict[str, int]]:
    """A fleet, the layout, the initial model, and the true group of each device; `method`: whose network it is."""
    samples = load_pool("digits", seed=seed, limit=limit)
    shares = partition_pool(
        samples,
        n,
        Partitioning(partition=how, alpha=alpha, sensitive=sensitive, n_groups=n_groups, groups=groups),
        seed=seed,
    )
    task = samples.spec if model == "mlp" else msgspec.structs.replace(samples.spec, model=model, model_options={})
    task = of_method(task, method) if method else task
    layout, first = build.make_initial_model(task, seed)
    data = {f"d{i:02d}": make_device_data(task, share) for i, share in enumerate(shares)}
    workers = {i: Worker(i, task, own, home / i, processor=processor) for i, own in data.items()}
    hardware = {i: Hardware(cpu_ghz=1.0 + k, free_ram_gb=4.0) for k, i in enumerate(data)}
    fleet = Fleet(task, layout, workers, seed=seed, hardware=hardware)
    group_of = {i: share.group for i, share in zip(data, shares, strict=True)}
    return fleet, layout, fleet.put(unflatten(first, layout)), group_of


async def rounds(method: Method[S], state: S, fleet: SimulatedFleet, n: int = 1) -> S:
    """The state after so many rounds, whether the method is done or not."""
    for _ in range(n):
        fleet.round = state.round + 1
        state = await method.advance(state, fleet)
    return state


def predicted(worker: Worker, x: NDArray[np.float32], release: int = 1) -> NDArray[np.float64]:
    """Probabilities (n, C) that the device's bundle gives for model inputs, as `DeviceData` has them."""
    how = worker.task.preprocessing
    raw = (x * how.std + how.mean) * how.scale
    return load(worker.home / "bundles" / str(release)).predict(raw).probabilities


def require_personal_ahead(fleet: Fleet, shared: Model) -> None:
    """Require that personal models are right more often than the shared one, by 2 points, and are installed."""
    network, workers = Network(fleet.task), fleet.workers.values()

    def accuracy(model: Model, worker: Worker) -> float:
        x, y = worker.data.validation
        return float((network.compute_logits(model, x).argmax(axis=1) == y).mean())

    personal = np.mean([accuracy(worker.make_personal_model(shared), worker) for worker in workers])
    assert personal > np.mean([accuracy(shared, worker) for worker in workers]) + 0.02
    worker = fleet.workers["d00"]
    own = network.compute_logits(worker.make_personal_model(shared), worker.data.x_val)
    installed = predicted(worker, worker.data.x_val)
    assert (own.argmax(axis=1) == installed.argmax(axis=1)).all(), "the bundle predicts with theta"


def manifests(fleet: Fleet, state: State) -> dict[str, Manifest]:
    """Of the bundles that the devices ended with."""
    return {i: manifest_of(fleet.workers[i].home, result) for i, result in state.installed.items()}


def roles(fleet: Fleet, state: State) -> dict[str, tuple[Role, ...]]:
    """Of the candidates in these bundles."""
    return {i: tuple(c.role for c in manifest.candidates) for i, manifest in manifests(fleet, state).items()}


def lose_sums(fleet: Fleet, patch: pytest.MonkeyPatch, *, far: Collection[str], lost: Collection[int]) -> None:
    """Let updates of some devices be summed where they are, as behind relays, whose sums of some rounds do not come."""

    async def compute_means(wanted: SiteSums, _: Note) -> list[SiteMean]:
        if fleet.round in lost:
            return []
        means, _ = average_updates(wanted, wanted.updates, lambda ref: fleet.get(ref, wanted.layout))
        return [SiteMean(k, mean, tuple(wanted.sums[k])) for k, mean in enumerate(means) if mean is not None]

    patch.setattr(fleet, "find_remote", lambda updates: {i for i in updates if i in far})
    patch.setattr(fleet, "compute_means", compute_means)


def declining(*ids: str) -> Callable[[Sequence[batched.Job]], list[FinishedOrder]]:
    """How a fleet carries out orders that some of its devices decline, and all of them from the second on."""
    first: set[str] = set()

    def execute(jobs: Sequence[batched.Job]) -> list[FinishedOrder]:
        finished = batched.execute_jobs(jobs)
        for k, job in enumerate(jobs):
            if job.worker.id in {*ids, *first}:
                finished[k] = FinishedOrder(Declined(why=Why.MEMORY, reason=""))
            first.add(job.worker.id)
        return finished

    return execute


def multiplying(by: float, *ids: str) -> Callable[[Sequence[batched.Job]], list[FinishedOrder]]:
    """How a fleet carries out orders some of whose devices send their updates so many times as long."""

    def execute(jobs: Sequence[batched.Job]) -> list[FinishedOrder]:
        finished = batched.execute_jobs(jobs)
        for job, done in zip(jobs, finished, strict=True):
            for digest, own in done.unpacked.items() if job.worker.id in ids else ():
                model = Model(np.float32(by) * own.model.params, own.model.buffers, own.model.counters)
                done.unpacked[digest] = UnpackedModel(model, own.layout, codecs.compute_norms(model))
        return finished

    return execute
