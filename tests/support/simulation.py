"""Small simulated federations of real workers on digits, in which some devices can be unresponsive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.fleet import Answer, Device
from coordinator.fleet.devices import Hardware
from coordinator.fleet.simulated import SimulatedFleet
from coordinator.methods import State
from deploy import load
from edge_agent import batched
from edge_agent.device import Unpacked
from edge_agent.worker import Finished, Worker
from fedge import codec, models
from fedge.bundle import Manifest
from fedge.messages import BlobRef, Role
from fedge.models.training import CPU
from fedge.step import Action
from fedge.tasks import DeviceData, Partitioning, partition, pool, share_data
from fedge.tasks.partition import Groups
from fedge.tensors import Layout, Model, unflatten
from tests.support.orders import manifest_of


class Fleet(SimulatedFleet):
    """A simulated fleet whose `unresponsive` devices never answer. `asked`: every round, label and device, in order.

    `absent`: devices that are not there; `incarnations`: of the devices, where they have one.
    """

    unresponsive: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    incarnations: Mapping[str, str] = {}

    def devices(self) -> tuple[Device, ...]:
        there = (d for d in super().devices() if d.id not in self.absent)
        return tuple(dataclasses.replace(d, incarnation=self.incarnations.get(d.id, "")) for d in there)

    def data(self, device_id: str) -> DeviceData:
        return self.workers[device_id].data

    def give(self, device_id: str, data: DeviceData) -> None:
        """The device starts again with other data."""
        before = self.workers[device_id]
        self.workers[device_id] = Worker(device_id, before.task, data, before.home)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        self.asked = [*getattr(self, "asked", []), *((self.round, label, device) for device in sorted(actions))]
        heard = await super().run(label, {i: a for i, a in actions.items() if i not in self.unresponsive})
        return {i: heard.get(i, Answer(i, None)) for i in sorted(actions)}


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
) -> tuple[Fleet, Layout, BlobRef, dict[str, int]]:
    """A fleet, the layout, the initial model, and the true group of each device."""
    samples = pool("digits", seed=seed, limit=limit)
    shares = partition(
        samples,
        n,
        Partitioning(partition=how, alpha=alpha, sensitive=sensitive, n_groups=n_groups, groups=groups),
        seed=seed,
    )
    task = samples.spec if model == "mlp" else msgspec.structs.replace(samples.spec, model=model, model_options={})
    layout, first = models.initial(task, seed)
    data = {f"d{i:02d}": share_data(task, share) for i, share in enumerate(shares)}
    workers = {i: Worker(i, task, own, home / i, processor=processor) for i, own in data.items()}
    hardware = {i: Hardware(cpu_ghz=1.0 + k, free_ram_gb=4.0) for k, i in enumerate(data)}
    fleet = Fleet(task, layout, workers, seed=seed, hardware=hardware)
    group_of = {i: share.group for i, share in zip(data, shares, strict=True)}
    return fleet, layout, fleet.put(unflatten(first, layout)), group_of


def predicted(worker: Worker, x: NDArray[np.float32], release: int = 1) -> NDArray[np.float64]:
    """Probabilities (n, C) that the device's bundle gives for model inputs, as `DeviceData` has them."""
    how = worker.task.preprocessing
    raw = (x * how.std + how.mean) * how.scale
    return load(worker.home / "bundles" / str(release)).predict(raw).probabilities


def manifests(fleet: Fleet, state: State) -> dict[str, Manifest]:
    """Of the bundles that the devices ended with."""
    return {i: manifest_of(fleet.workers[i].home, result) for i, result in state.installed.items()}


def roles(fleet: Fleet, state: State) -> dict[str, tuple[Role, ...]]:
    """Of the candidates in these bundles."""
    return {i: tuple(c.role for c in manifest.candidates) for i, manifest in manifests(fleet, state).items()}


def multiplying(by: float, *ids: str) -> Callable[[Sequence[batched.Job]], list[Finished]]:
    """How a fleet carries out orders some of whose devices send their updates so many times as long."""

    def execute(jobs: Sequence[batched.Job]) -> list[Finished]:
        finished = batched.execute(jobs)
        for job, done in zip(jobs, finished, strict=True):
            for digest, own in done.unpacked.items() if job.worker.id in ids else ():
                model = Model(np.float32(by) * own.model.params, own.model.buffers, own.model.counters)
                done.unpacked[digest] = Unpacked(model, own.layout, codec.norms_of(model))
        return finished

    return execute
