"""Orders of simulated devices on Ray: the same workers and steps, in processes of one machine or of several.

The orders of a step are cut into blocks of devices by ascending id; how many follows from their number alone. A block
is carried out whole by one actor, so results have the same bits whatever the number of actors. A block whose actor
died is carried out again by another one: orders are deterministic and write what they wrote before, so nothing counts
twice.

The devices' samples and the models that orders name lie in Ray's object store, once for each node. What devices keep
between rounds lies in their folders, which all nodes must see (one machine, or a shared file system).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.ray import ray
from edge_agent import batched
from edge_agent.device import repeatable
from edge_agent.worker import Finished, Worker
from fedge.errors import FedgeError
from fedge.files import volatile
from fedge.messages import BlobRef, Order, blobs_of
from fedge.step import Action, Steps, installed_steps
from fedge.task import TaskSpec
from fedge.tasks import DeviceData

log = logging.getLogger("fedge.coordinator")

BLOCKS: Final = 32
"""Of a step with many orders: enough to share out, and as large as the stacks of small networks."""
LARGEST: Final = 64
HELD: Final = 256
"""Workers that an actor keeps, those used last."""
MODELS: Final = 16
"""Models that an actor keeps."""
LOOK_S: Final = 1.0
PATIENCE_S: Final = 120.0
"""So long it may take until an actor that died has a successor."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers of a fleet have in common, without data."""

    task: TaskSpec
    home: Path


class Shard:
    """An actor that carries out blocks of orders and keeps its workers for them."""

    def __init__(self, recipe: Recipe, data: Mapping[str, DeviceData], steps: Steps) -> None:
        import torch

        torch.set_num_threads(1)
        self._recipe, self._data, self._steps = recipe, data, steps
        self._worker = lru_cache(HELD)(self._make)
        self._models: dict[str, bytes] = {}

    def ready(self) -> None:
        """Confirm that the actor is running."""

    def carry_out(self, orders: Sequence[Order], models: Mapping[str, Any]) -> list[Finished]:
        """Results in the order of the orders. `models`: references to the bytes of named models, by digest."""
        missing = [digest for digest in models if digest not in self._models]
        found = ray.get([models[digest] for digest in missing])
        self._models |= {digest: array.tobytes() for digest, array in zip(missing, found, strict=True)}
        for digest in [digest for digest in self._models if digest not in models][:-MODELS]:
            del self._models[digest]
        jobs = []
        for order in orders:
            action = msgspec.msgpack.decode(order.body, type=self._steps[order.step])
            jobs.append(batched.Job(self._worker(order.device_id), order, action, self._fetch))
        with volatile():
            return batched.execute(jobs)

    def _fetch(self, ref: BlobRef) -> bytes:
        return self._models[ref.digest]

    def _make(self, device_id: str) -> Worker:
        recipe = self._recipe
        own = self._data[device_id]
        # Data in the object store is read-only, and stays while anything refers to it.
        copied = {name: np.require(array, requirements="W") for name, array in _arrays(own).items()}
        return Worker(device_id, recipe.task, replace(own, **copied), recipe.home / device_id, source=repeatable)


class Shards:
    """How a `SimulatedFleet` carries out a step's orders on Ray, inside `coordinator.ray.connected`.

    Args:
        recipe: of the workers.
        data: of the devices by id; may be a mapping that generates them.
        steps: of the method, in addition to the installed ones.
        n: number of actors.
    """

    def __init__(self, recipe: Recipe, data: Mapping[str, DeviceData], steps: Sequence[type[Action]], n: int) -> None:
        known = {**installed_steps(), **{kind.STEP: kind for kind in steps}}
        actor = ray.remote(num_cpus=1)(Shard)
        data_ref = ray.put(data)
        self._new: Callable[[], Any] = lambda: actor.remote(recipe, data_ref, known)
        self._coming: dict[Any, Any] = {}  # reference to `ready` -> actor
        self._idle: list[Any] = []
        self._models: dict[str, Any] = {}
        for _ in range(n):
            self._start()

    def _start(self) -> None:
        shard = self._new()
        self._coming[shard.ready.remote()] = shard

    def __call__(self, jobs: Sequence[batched.Job]) -> list[Finished]:
        """Carry out orders of different devices; results in the order of the jobs.

        Raises:
            FedgeError: all actors died, and none restarts.
        """
        named = {ref.digest: (job, ref) for job in jobs for ref in blobs_of(job.action)}
        self._models = {
            digest: self._models.get(digest) or ray.put(np.frombuffer(job.fetch(ref), np.uint8))
            for digest, (job, ref) in named.items()
        }
        numbers = sorted(range(len(jobs)), key=lambda number: jobs[number].order.device_id)
        size = min(max(1, -(-len(jobs) // BLOCKS)), LARGEST)
        waiting = [numbers[first : first + size] for first in range(0, len(numbers), size)][::-1]
        running: dict[Any, tuple[Any, list[int]]] = {}
        found: dict[int, Finished] = {}
        patience = PATIENCE_S
        while waiting or running:
            while waiting and self._idle:
                shard, block = self._idle.pop(), waiting.pop()
                orders = [jobs[number].order for number in block]
                models = {ref.digest: self._models[ref.digest] for n in block for ref in blobs_of(jobs[n].action)}
                running[shard.carry_out.remote(orders, models)] = shard, block
            done, _ = ray.wait([*running, *self._coming], timeout=LOOK_S)
            patience = PATIENCE_S if done or running else patience - LOOK_S
            if patience <= 0:
                raise FedgeError("no process of Ray comes up to simulate in: `ray status` says what it lacks")
            for reference in done:
                shard, block = running.pop(reference) if reference in running else (self._coming.pop(reference), [])
                try:
                    results = ray.get(reference)
                except ray.exceptions.RayActorError as error:
                    log.warning("event=shard_lost devices=%d reason=%r", len(block), str(error).splitlines()[0])
                    waiting += [block] if block else []
                    self._start()
                    continue
                self._idle.append(shard)
                found |= dict(zip(block, results or (), strict=True))
        return [found[number] for number in range(len(jobs))]


def _arrays(data: DeviceData) -> dict[str, NDArray[Any]]:
    """The arrays of a device by name."""
    arrays = {name: getattr(data, name) for name in DeviceData.__dataclass_fields__}
    return {name: array for name, array in arrays.items() if array is not None}
