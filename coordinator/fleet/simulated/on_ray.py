"""Orders of simulated devices on Ray: the same workers and steps, in processes of one machine or of several.

The orders of a step are split into blocks of devices by ascending id; only the number of orders decides how many. One
actor carries out a whole block, so results have the same bits for any number of actors. If an actor dies, another one
repeats its block. Orders are deterministic and write the same files again, so nothing counts twice.

A block's updates stay in the object store of the actor's node. An average needs one sum of each block
(`coordinator.fleet.sites`). A single update travels only if a method reads it. Updates lost with their node are
computed again when they are needed.

The devices' samples and the models that orders name are in Ray's object store, once per node. What devices keep between
rounds is in their folders, which all nodes must see (one machine, or a shared file system).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from coordinator.aggregation.mean import Average
from coordinator.fleet.simulated.memory import RemoteFinished, RemoteUpdate
from coordinator.fleet.simulated.ray import plan_actors, ray
from coordinator.fleet.sites import Directions, Note, SiteMean, SiteSums, average_updates
from edge_agent.device.device import Accepted, UnpackedModel, encode_blob, make_repeatable_source
from edge_agent.device.encoding import share_memory
from edge_agent.device.room import UpdateStore
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning import batched
from fedge.data.task import TaskSpec
from fedge.errors import FedgeError, ProtocolError
from fedge.steps.contract import Action, Refusal, Result, Steps, load_installed_steps
from fedge.steps.masked.mask_shares import MIN_COHORT
from fedge.system.files import skip_fsync
from fedge.system.hardware import Processor
from fedge.tasks import DeviceData
from fedge.tensors import codecs
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef, Order, iterate_blobs

log = logging.getLogger("fedge.coordinator")

BLOCKS: Final = 32
"""Blocks of a step with many orders: enough to share out, and each large enough for a stack of small networks."""
LARGEST: Final = 64
HELD: Final = 256
"""Workers that an actor keeps in memory, those used last."""
MODELS: Final = 16
"""Models that an actor keeps in memory."""
LOOK_S: Final = 1.0
PATIENCE_S: Final = 120.0
"""Longest wait for the successor of a dead actor."""

T = TypeVar("T")
Updates = dict[str, "bytes | UnpackedModel"]
"""Updates by digest."""
PackedResult = tuple[Result, dict[str, bytes], dict[str, tuple[Layout, Norms]]]
"""A result; by digest, its blobs that travel; by digest, layout and norms of its updates that do not travel."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification that all workers of a fleet share: everything except data."""

    task: TaskSpec
    layout: Layout
    home: Path
    min_cohort: int = MIN_COHORT
    student: bool = False
    train_on: Processor = Processor.CPU


class Shard:
    """An actor that carries out blocks of orders and keeps its workers for them."""

    def __init__(self, recipe: WorkerSpec, data: Mapping[str, DeviceData], steps: Steps) -> None:
        import torch

        from fedge.models.training import get_torch_device

        torch.set_num_threads(1)
        self._processor = get_torch_device(recipe.train_on)
        self._recipe, self._data, self._steps = recipe, data, steps
        self._worker = lru_cache(HELD)(self._make_worker)
        self._models: dict[str, bytes] = {}

    def confirm_running(self) -> None:
        """Confirm that the actor is running."""

    def carry_out(
        self, orders: Sequence[Order], models: Mapping[str, Any], accepted: Sequence[Accepted]
    ) -> tuple[list[PackedResult], Updates]:
        """Carry out orders; return results in the order of the orders, and their updates.

        `models`: references to named models, by digest. `accepted`: for each order, its worker's `Accepted`.
        """
        missing = [digest for digest in models if digest not in self._models]
        found = ray.get([models[digest] for digest in missing])
        self._models |= {digest: array.tobytes() for digest, array in zip(missing, found, strict=True)}
        for digest in [digest for digest in self._models if digest not in models][:-MODELS]:
            del self._models[digest]
        jobs = []
        for order, own in zip(orders, accepted, strict=True):
            action = msgspec.msgpack.decode(order.body, type=self._steps[order.step])
            worker = self._worker(order.device_id)
            worker.accepted = own
            jobs.append(batched.Job(worker, order, action, self._fetch))
        with skip_fsync(), share_memory(UpdateStore()):
            done = batched.execute_jobs(jobs)
        updates: Updates = {}
        return [
            _pack_result(job, each, self._recipe.layout, updates) for job, each in zip(jobs, done, strict=True)
        ], updates

    def compute_means(
        self, held: Sequence[Any], wanted: SiteSums
    ) -> tuple[tuple[Average | None, ...], Directions] | None:
        """Compute the means over a block's updates, and directions; None if the updates are lost.

        `held`: the reference to the updates, in a list, because Ray would otherwise resolve it.
        """
        try:
            updates: Updates = ray.get(held[0])
        except ray.exceptions.ObjectLostError:
            return None
        return average_updates(
            wanted, wanted.updates, lambda ref: _decode_update(updates[ref.digest], ref, wanted.layout)
        )

    def _fetch(self, ref: BlobRef) -> bytes:
        return self._models[ref.digest]

    def _make_worker(self, device_id: str) -> Worker:
        recipe = self._recipe
        own = self._data[device_id]
        # Data in the object store is read-only, and stays while anything refers to it.
        arrays = {name: getattr(own, name) for name in DeviceData.__dataclass_fields__}
        copied = {n: np.require(array, requirements="W") for n, array in arrays.items() if array is not None}
        return Worker(
            *(device_id, recipe.task, replace(own, **copied), recipe.home / device_id),
            min_cohort=recipe.min_cohort,
            processor=self._processor,
            student=recipe.student,
            source=make_repeatable_source,
        )


@dataclass(eq=False, slots=True)
class Block:
    """Orders that one actor carries out. `models`: the models that they name. `updates`: reference to their updates.

    `accepted`: for each order, its worker's `Accepted`. `shard`: the actor that carried them out, whose node has the
    updates.
    """

    orders: list[Order]
    models: dict[str, Any]
    accepted: list[Accepted]
    updates: Any = None
    shard: Any = None
    norms: dict[str, Norms] = field(default_factory=dict)


class Shards:
    """The actors that carry out a `SimulatedFleet`'s orders, inside `coordinator.fleet.simulated.ray.connect`.

    Args:
        recipe: the specification of all workers.
        data: the devices' data by id; may be a mapping that generates them.
        steps: the method's steps, in addition to the installed ones.
        n: number of processors to use, each with one actor.

    Raises:
        ConfigError: the recipe trains on a GPU, and there is none.
    """

    def __init__(
        self, recipe: WorkerSpec, data: Mapping[str, DeviceData], steps: Sequence[type[Action]], n: int
    ) -> None:
        known = {**load_installed_steps(), **{kind.STEP: kind for kind in steps}}
        n, resources = plan_actors(n, recipe.train_on)
        actor = ray.remote(**resources)(Shard)
        data_ref = ray.put(data)
        self._new: Callable[[], Any] = lambda: actor.remote(recipe, data_ref, known)
        self._coming: dict[Any, Any] = {}  # reference to `confirm_running` -> actor
        self._idle: list[Any] = []
        self._models: dict[str, Any] = {}
        self._last: tuple[Any, Updates] = (None, {})  # a reference to updates, and what it refers to
        for _ in range(n):
            self._start()

    def _start(self) -> None:
        shard = self._new()
        self._coming[shard.confirm_running.remote()] = shard

    def __call__(self, jobs: Sequence[batched.Job]) -> list[FinishedOrder]:
        """Carry out orders of different devices; results in the order of the jobs.

        Raises:
            FedgeError: all actors died, and none restarts.
        """
        named = {ref.digest: (job, ref) for job in jobs for ref in iterate_blobs(job.action)}
        self._models = {
            digest: self._models.get(digest) or ray.put(np.frombuffer(encode_blob(job.fetch(ref), ref.codec), np.uint8))
            for digest, (job, ref) in named.items()
        }
        numbers = sorted(range(len(jobs)), key=lambda number: jobs[number].order.device_id)
        size = min(max(1, -(-len(jobs) // BLOCKS)), LARGEST)
        lots = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        blocks = [
            Block(
                [jobs[n].order for n in lot],
                {ref.digest: self._models[ref.digest] for n in lot for ref in iterate_blobs(jobs[n].action)},
                [jobs[n].worker.accepted for n in lot],
            )
            for lot in lots
        ]
        found: dict[int, FinishedOrder] = {}
        for lot, block, packed in zip(lots, blocks, self._carry_out(blocks), strict=True):
            block.norms = _collect_norms(packed)
            for number, (result, blobs, known) in zip(lot, packed, strict=True):
                held = {digest: RemoteUpdate(part, norms, self, block) for digest, (part, norms) in known.items()}
                found[number] = RemoteFinished(result, blobs, held=held)
        return [found[number] for number in range(len(jobs))]

    def _carry_out(self, blocks: Sequence[Block]) -> list[list[PackedResult]]:
        def start_block(block: Block, shard: Any) -> Any:
            order = shard.carry_out.options(num_returns=2)
            packed, block.updates = order.remote(block.orders, block.models, block.accepted)
            block.shard = shard
            return packed

        return self._call_each([partial(start_block, block) for block in blocks], [None] * len(blocks))

    def _call_each(self, begin: Sequence[Callable[[Any], Any]], near: Sequence[Any]) -> list[Any]:
        """Return the results of calls, each made by any actor, and again by another one if its actor dies.

        `begin`: (actor) -> reference to the result of a call. `near`: for each call, the actor that should get it if
        that actor is idle.
        """
        waiting = list(range(len(begin)))[::-1]
        running: dict[Any, tuple[Any, int | None]] = {}
        found: dict[int, Any] = {}
        patience = PATIENCE_S
        while waiting or running:
            while waiting and self._idle:
                shard = self._idle.pop()
                number = next((n for n in reversed(waiting) if near[n] is shard), waiting[-1])
                waiting.remove(number)
                running[begin[number](shard)] = shard, number
            done, _ = ray.wait([*running, *self._coming], timeout=LOOK_S)
            patience = PATIENCE_S if done or running else patience - LOOK_S
            if patience <= 0:
                raise FedgeError("Ray starts no process for the simulation: `ray status` says what is missing")
            for reference in done:
                shard, of = running.pop(reference) if reference in running else (self._coming.pop(reference), None)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayActorError as error:
                    log.warning("event=shard_lost working=%s reason=%r", of is not None, str(error).splitlines()[0])
                    ray.kill(shard)  # the actor may be alive and only out of reach
                    waiting += [] if of is None else [of]
                    self._start()
                    continue
                self._idle.append(shard)
                if of is not None:
                    found[of] = result
        return [found[number] for number in range(len(begin))]

    def _repeat_blocks(self, blocks: Sequence[Block]) -> None:
        """Compute updates again that were lost with their node.

        Raises:
            FedgeError: the updates would differ, since the devices have gone on.
        """
        if not blocks:
            return
        log.warning("event=updates_lost devices=%d", sum(len(block.orders) for block in blocks))
        for block, packed in zip(blocks, self._carry_out(blocks), strict=True):
            norms = _collect_norms(packed)
            if norms.keys() != block.norms.keys() or not all(np.allclose(norms[d], block.norms[d]) for d in norms):
                raise FedgeError(
                    "a node of Ray died with updates that cannot be computed again, since their devices have gone on: "
                    "start the simulation again"
                )

    def fetch(self, block: Block, digest: str) -> bytes | UnpackedModel:
        """Fetch an update; those of the last block are kept."""
        while self._last[0] is not block.updates:
            try:
                self._last = block.updates, ray.get(block.updates)
            except ray.exceptions.ObjectLostError:
                self._repeat_blocks([block])
        return self._last[1][digest]

    def compute_means(self, wanted: SiteSums, blocks: Mapping[str, Block], note: Note) -> list[SiteMean]:
        """Compute means as `Sites.compute_means`, with blocks as sites. `blocks`: the update's block, by device."""
        of_block: dict[Block, dict[str, BlobRef]] = {}
        for i, ref in sorted(wanted.updates.items()):
            of_block.setdefault(blocks[i], {})[i] = ref
        asked = {block: wanted.narrow_to(own) for block, own in of_block.items()}
        found: dict[Block, tuple[tuple[Average | None, ...], Directions]] = {}

        def start_block(block: Block, shard: Any) -> Any:
            return shard.compute_means.remote([block.updates], asked[block])

        while left := [block for block in asked if block not in found]:
            results = self._call_each([partial(start_block, block) for block in left], [block.shard for block in left])
            found |= {block: result for block, result in zip(left, results, strict=True) if result is not None}
            self._repeat_blocks([block for block in left if block not in found])
        for block in asked:
            for i, direction in found[block][1].items():
                note(i, direction)
        return [
            SiteMean(k, mean, tuple(asked[block].sums[k]))
            for block in asked
            for k, mean in enumerate(found[block][0])
            if mean is not None
        ]


def _pack_result(job: batched.Job, done: FinishedOrder, layout: Layout, updates: Updates) -> PackedResult:
    """Return the result without its updates, which are added to `updates`."""
    known = {digest: (each.layout, each.norms) for digest, each in done.unpacked.items()}
    updates |= done.unpacked
    blobs = dict(done.blobs)
    uploads = {} if isinstance(done.result, Refusal) else job.action.uploads(done.result, layout)
    for ref, part in uploads.items():
        if part is not None and ref.digest in blobs:
            try:
                known[ref.digest] = part, codecs.check_blob(blobs[ref.digest], ref.codec, part)
            except ProtocolError:  # the fleet finds and refuses it
                continue
            updates[ref.digest] = blobs.pop(ref.digest)
    return done.result, blobs, known


def _collect_norms(packed: Sequence[PackedResult]) -> dict[str, Norms]:
    """Return the norms of the updates, by digest."""
    return {digest: norms for _, _, known in packed for digest, (_, norms) in known.items()}


def _decode_update(update: bytes | UnpackedModel, ref: BlobRef, layout: Layout) -> Model:
    return codecs.decode(update, ref.codec, layout, again=True) if isinstance(update, bytes) else update.model
