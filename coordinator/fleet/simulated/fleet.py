"""A fleet of workers in this process: the same `edge_agent.device.worker.Worker` that devices run, without a network.

A step's orders are carried out together if that is faster (`edge_agent.learning.batched`); time is that of a simulated
clock. Deliberately not durable: a simulation that dies is started again. Everything is deterministic for a seed.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import ne
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.fleet import Answer, Fleet, Seen, answering, asked, order_for, require_sendable
from coordinator.fleet.problems import Problem
from coordinator.fleet.quarantine import LONG_UPDATE, quarantined
from coordinator.fleet.simulated import clock
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from coordinator.fleet.update_norms import Believed, OneByOne, within_limits
from coordinator.fleet.versions import Descent
from coordinator.store.records import Device, Offence
from edge_agent.device.device import CACHED_MODELS, Unpacked, as_bytes
from edge_agent.device.encoding import in_one_process
from edge_agent.device.room import Room
from edge_agent.device.worker import Finished, Worker
from edge_agent.learning import batched
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models import weights
from fedge.models.training import flops, shared_network
from fedge.models.weights import needed_on_devices
from fedge.privacy.egress import ALL, Rules
from fedge.steps.contract import Action, Failed, Refusal, Result, Reveals, body_of, outcome_of
from fedge.system.files import digest_of, volatile
from fedge.system.malloc import tune_malloc
from fedge.tasks import DeviceData
from fedge.tensors import codecs, rounding
from fedge.tensors.layout import Codec, Layout, Model, Tensors, to_pieces, unflatten, views_of
from fedge.wire.messages import MAX_LEFT_S, BlobRef, Context, Order, blobs_of, shared_bases, way_to

if TYPE_CHECKING:
    from coordinator.fleet.simulated.on_ray import Block, Shards

log = logging.getLogger("fedge.coordinator")

LATE: Final = "no answer before the deadline"
SILENT: Final = "it did not answer"
ABSENT: Final = "it was not asked: it was not there, or in quarantine"
MAX_LOGGED: Final = 100
"""Kinds of failures that are logged."""
GIVEN_UP_S: Final = 60.0
"""Time after which an unanswered order is given up without a deadline, as in a stream: the coordinator's default."""
INSTANT: Final = Hardware()
RUN: Final = "simulation"
AT_ONCE: Final = 2048
"""Most devices at work at once: their samples are in memory meanwhile."""
IN_MEMORY: Final = 2**31
"""Most bytes of what is unencoded in memory; further updates are on the disk (`edge_agent.device.room`)."""
Execute = Callable[[Sequence[batched.Job]], list[Finished]]
"""Carries out orders of different devices; results in the order of the jobs."""


@dataclass(frozen=True, slots=True)
class Held:
    """An update that stays with the process that made it, in a block of `at`."""

    layout: Layout
    norms: codecs.Norms
    at: Shards
    block: Block


@dataclass(frozen=True, slots=True)
class FinishedElsewhere(Finished):
    """A result whose updates are not here. `held`: by digest."""

    held: dict[str, Held] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    """An order that reached its device. `ends`: the earliest time of its answer, with instant upload."""

    order: Order
    action: Action
    begins: float
    ends: float
    bytes_down: int


@dataclass(frozen=True, slots=True, order=True)
class _UnderWay:
    """An answer due at a time; ties are broken by round, label and device."""

    at: float
    round: int
    label: str
    device_id: str
    answer: Answer = field(compare=False)
    action: Action = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Known:
    """Methods' view of a device, and its number of samples."""

    data: DeviceData | None
    device: Device
    n_shared: int
    n_train: int
    n_val: int


class _Tracebacks(logging.Filter):
    """Has each traceback of the devices logged once, not for each device and round."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is new, or no traceback."""
        if not record.exc_info:
            return True
        error = record.exc_info[1]
        kind = f"{type(error).__name__}: {error}"
        new = kind not in self._seen and len(self._seen) < MAX_LOGGED
        self._seen.add(kind)
        return new

    @contextmanager
    def once(self) -> Iterator[None]:
        """While the devices are at work in this process."""
        theirs = logging.getLogger("fedge.agent")
        theirs.addFilter(self)
        try:
            yield
        finally:
            theirs.removeFilter(self)


class SimulatedFleet(Fleet):
    """Workers by device id.

    `round`: set by the caller that runs the rounds. `seconds`: simulated time so far; a step lasts as long as its
    slowest answer, or until the deadline if one is missing. `bytes_up`, `bytes_down`: tensors sent so far. `workers`:
    by ascending id. `offences`: evidence against devices, by device, round and name. `problems`: the latest refusal,
    failure or missed deadline by device id.

    Args:
        task: what is learned.
        layout: of the model.
        workers: by device id; if created on demand, in ascending order of ids.
        seed: of orders and of the clock.
        hardware: of each device; devices without take no time and are always present.
        deadline_s: of `run`: a slower answer is dropped, and costs this time. None: nobody is late.
        arrives: the first round of a device; by default it is there from the beginning.
        leaves: the first round in which a device is gone for good; by default it stays.
        rules: what their owners let out; by default everything.
        alike: all have as many samples as the first, so none is created just to count them.
        execute: how a step's orders are carried out; `batched.one_by_one` equals real devices to the last bit.
    """

    descents: dict[str, Descent] | None = None

    def __init__(
        self,
        task: TaskSpec,
        layout: Layout,
        workers: Mapping[str, Worker],
        *,
        seed: int,
        hardware: Mapping[str, Hardware] | None = None,
        deadline_s: float | None = None,
        arrives: Mapping[str, int] | None = None,
        leaves: Mapping[str, int] | None = None,
        rules: Mapping[str, Rules] | None = None,
        alike: bool = False,
        execute: Execute = batched.execute,
    ) -> None:
        tune_malloc(large=True)
        self.round = 0
        self.seconds = 0.0
        self.bytes_up = 0
        self.bytes_down = 0
        self.workers = dict(sorted(workers.items())) if isinstance(workers, dict) else workers
        self.task = task
        self._layout = layout
        self._fingerprint = task.fingerprint()
        self._seed = seed
        self._hardware = dict.fromkeys(self.workers, INSTANT) | dict(hardware or {})
        self._timed = hardware is not None
        self._deadline_s = deadline_s
        self._arrives, self._leaves = dict(arrives or {}), dict(leaves or {})
        self._rules = dict.fromkeys(self.workers, ALL) | dict(rules or {})
        self._alike, self._execute = alike, execute
        self._blobs: dict[str, bytes | Unpacked | Held] = {}
        if (frozen := needed_on_devices(task)) is not None:
            self._blobs[frozen.digest] = weights.read(frozen.digest)
        self._held = defaultdict[str, list[str]](list)  # digests, most recently used last
        self._known: dict[str, _Known] = {}
        self._lost: dict[tuple[str, str], str] = {}  # the last order of a device and step whose report was not accepted
        self._there = dict[str, bool]()
        self._there_in = -1  # the round of `_there`
        self.offences: dict[tuple[str, int, str], Offence] = {}
        self.problems: dict[str, Problem] = {}
        self._tracebacks = _Tracebacks()
        self._logged: set[tuple[str, str]] = set()  # label and reason of failures
        self._waiting: list[_Asked] = []  # streamed orders not carried out yet
        self._under_way: list[_UnderWay] = []  # heap of answers to streamed orders

    @property
    def sites(self) -> SimulatedFleet:
        """Processes that keep the updates that they made, if any do."""
        return self

    def devices(self) -> tuple[Device, ...]:
        """The workers that train and are there in this round."""
        there = [self._about(i).device for i in self._present()]
        return tuple(device for device in there if device.trains)

    def inference_only(self) -> tuple[Device, ...]:
        """Those that do not train and are there."""
        there = [self._about(i).device for i in self._present()]
        return tuple(device for device in there if not device.trains)

    def _about(self, device_id: str) -> _Known:
        """What the fleet knows of a device, which depends on its data alone; those made on demand stay the same."""
        known = self._known.get(device_id)
        if known is None or (isinstance(self.workers, dict) and known.data is not self.workers[device_id].data):
            worker, rules = self.workers[next(iter(self.workers)) if self._alike else device_id], self._rules[device_id]
            data = worker.data
            n_samples = data.n_shared if worker.trains else 0
            device = Device(
                device_id,
                n_samples if Reveals.COUNT in rules.allowed else 0,
                self._context(device_id, n_samples),
                trains=worker.trains,
                steps=worker.versions,
                withholds=rules.withheld,
            )
            kept = data if isinstance(self.workers, dict) else None  # else memory would hold everybody's samples
            known = self._known[device_id] = _Known(kept, device, data.n_shared, data.n_train, len(data.y_val))
        return known

    def _context(self, device_id: str, n_samples: int) -> Context | None:
        own = self._hardware[device_id]
        if own.cpu_ghz is None and own.free_ram_gb is None:
            return None
        told = Context(
            device_id=device_id,
            cpu_ghz=own.cpu_ghz,
            free_ram_gb=own.free_ram_gb,
            link_mbit_s=own.link_mbit_s,
            n_samples=n_samples,
        )
        return self._rules[device_id].stripped(told)

    def _present(self) -> list[str]:
        """Advance each device's Markov chain from its first round to this one."""
        if self.round < self._there_in:
            self._there, self._there_in = {}, -1
        for number in range(self._there_in + 1, self.round + 1):
            self._there = {
                i: clock.there(own, self._there.get(i), clock.Occasion(self._seed, number, "", i))
                for i, own in self._hardware.items()
            }
        self._there_in = self.round
        out = quarantined(self.offences.values(), self.round)
        return [i for i in self.workers if self._there[i] and self._arrived(i) and i not in out]

    def _arrived(self, device_id: str) -> bool:
        return self._arrives.get(device_id, 0) <= self.round < self._leaves.get(device_id, self.round + 1)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Execute the actions; answers by ascending device id. Whatever a user's network raises is `Failed`."""
        self._catch_up()
        orders, answers, actions = self._ask(label, actions, self._deadline_s)
        answers |= {answer.device_id: answer for answer in self._carried_out(orders, self._deadline_s)}
        answers = dict(sorted(answers.items()))
        waits = {i: max(0.0, free_at - self.seconds) for i, free_at in self._free_at().items()}
        answers = self._believed(within_limits(answers, actions, self._layout, self.norms))
        self.seconds += max((waits.get(i, 0.0) + answer.seconds for i, answer in answers.items()), default=0.0)
        await asyncio.sleep(0)  # lets Ctrl-C in
        return answers

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[Seen] = ()
    ) -> AsyncIterator[Answer]:
        """Answers in the order of the simulated clock, which advances to each.

        Orders are carried out when the next answer may be theirs, all waiting ones at once, so that more of them train
        together.
        """
        guard = OneByOne(self._layout, self.norms, seen)
        if self.busy().intersection(actions):
            self._catch_up()
        free_at = self._free_at()
        orders, answers, actions = self._ask(label, actions)
        self._waiting += orders
        for i, answer in answers.items():
            self._comes(label, actions[i], answer, max(self.seconds, free_at.get(i, 0.0)))
        while self._waiting or self._under_way:
            if not self._under_way or self._under_way[0].at >= min((a.ends for a in self._waiting), default=math.inf):
                self._catch_up()
            coming = self._under_way[0]
            (answer,) = self._believed(guard.believed(coming.answer, coming.action)).values()
            heapq.heappop(self._under_way)
            self.seconds = max(self.seconds, coming.at)
            await asyncio.sleep(0)
            yield answer

    def _believed(self, found: Believed) -> dict[str, Answer]:
        """The answers that are; the evidence against devices is recorded."""
        for i, error in found.refused.items():
            self.accuse(i, error)
        for i, detail in found.suspects.items():
            self._accuse(i, LONG_UPDATE, detail)
        return found.answers

    def _catch_up(self) -> None:
        """Carry out the streamed orders that wait."""
        waiting, self._waiting = self._waiting, []
        for each, answer in zip(waiting, self._carried_out(waiting), strict=True):
            self._comes(each.order.label, each.action, answer, each.begins)

    def _comes(self, label: str, action: Action, answer: Answer, begins: float) -> None:
        coming = _UnderWay(begins + answer.seconds, answer.round, label, answer.device_id, answer, action)
        heapq.heappush(self._under_way, coming)

    def busy(self) -> frozenset[str]:
        """Devices with a streamed order whose answer has not been yielded."""
        waiting = (each.order.device_id for each in self._waiting)
        return frozenset((*waiting, *(coming.device_id for coming in self._under_way)))

    def needed(self) -> set[str]:
        """Digests of frozen tensors, of answers not yet yielded, and of their orders."""
        actions = (*(waiting.action for waiting in self._waiting), *(coming.action for coming in self._under_way))
        results = (coming.answer.result for coming in self._under_way)
        named = (needed_on_devices(self.task), *actions, *results)
        return {ref.digest for each in named for ref in blobs_of(each)}

    def _free_at(self) -> dict[str, float]:
        """When devices finish their streamed orders; a device that was not reached has none."""
        return {c.device_id: c.at for c in sorted(self._under_way) if c.answer.result is not None}

    def _ask(
        self, label: str, actions: Mapping[str, Action], deadline_s: float | None = None
    ) -> tuple[list[_Asked], dict[str, Answer], dict[str, Action]]:
        """The orders that reach their devices, the other devices' answers, and the actions sent; ascending ids."""
        require_sendable(actions.values())
        present, free_at = set(self._present()), self._free_at()
        own, refused = asked({i: self._about(i).device for i in actions}, actions, self.task)
        kinds = {id(action): action for action in own.values()}  # usually one action shared by all
        bodies = {key: body_of(action) for key, action in kinds.items()}
        named = {key: {ref.digest: ref for ref in blobs_of(action)} for key, action in kinds.items()}
        reached: list[_Asked] = []
        answers: dict[str, Answer] = {}
        for i in sorted(actions):
            if i in refused:
                self._note_refusal(i, label, refused[i])
                answers[i] = Answer(i, refused[i], 0.0, self.round)
            elif i not in present or self._drops(label, i):
                self._note_problem(i, SILENT)
                answers[i] = Answer(i, None, deadline_s or GIVEN_UP_S, self.round)
            else:
                action, key = own[i], id(own[i])
                order = order_for(
                    *(RUN, self._seed, self.round, label, i, self._fingerprint, action),
                    left_s=MAX_LEFT_S,
                    body=bodies[key],
                )
                bytes_down = self._downloaded(i, named[key])
                self.bytes_down += bytes_down
                begins = max(self.seconds, free_at.get(i, 0.0))
                reached.append(
                    _Asked(order, action, begins, begins + self._seconds(order, action, bytes_down), bytes_down)
                )
        return reached, answers, {**actions, **own}

    def _carried_out(self, asked: Sequence[_Asked], deadline_s: float | None = None) -> list[Answer]:
        """The raw results of the orders, in order."""
        finished: list[Finished] = []
        with volatile(), in_one_process(self._room()), self._tracebacks.once():
            for first in range(0, len(asked), AT_ONCE):
                lot = asked[first : first + AT_ONCE]
                finished += self._execute([self._job(each) for each in lot])
        return [self._answer(each, done, deadline_s) for each, done in zip(asked, finished, strict=True)]

    def _room(self) -> Room:
        """The memory that earlier updates leave free."""
        kept = (own.kept for own in self._blobs.values() if isinstance(own, Unpacked))
        return Room(IN_MEMORY - sum(update.params.nbytes for update in kept if isinstance(update, Model)))

    def _job(self, asked: _Asked) -> batched.Job:
        worker = self.workers[asked.order.device_id]
        worker.accepted = partial(ne, self._lost.get((worker.id, asked.order.step)))
        return batched.Job(worker, asked.order, asked.action, self._here)

    def _drops(self, label: str, device_id: str) -> bool:
        return clock.dropped(self._hardware[device_id], clock.Occasion(self._seed, self.round, label, device_id))

    def _answer(self, asked: _Asked, finished: Finished, deadline_s: float | None) -> Answer:
        """The answer as received, or none if it is late; what a late device sent is discarded."""
        device_id, number = asked.order.device_id, asked.order.round
        bytes_up = sum(ref.size_bytes for ref in blobs_of(finished.result))
        self.bytes_up += bytes_up
        taken = self._seconds(asked.order, asked.action, asked.bytes_down, bytes_up)
        if deadline_s is not None and taken > deadline_s:
            self._note_problem(device_id, LATE)
            self._note_loss(asked.order, finished.result)
            return Answer(device_id, None, deadline_s, number)
        result, action = finished.result, asked.action
        try:
            if not isinstance(result, Refusal) and self._about(device_id).device.withholds:
                result = self._rules[device_id].stripped(result, action.reveals())
            result = answering(action, result, self.task)
        except ProtocolError as error:
            self.accuse(device_id, error)
            self._note_loss(asked.order, finished.result)
            return Answer(device_id, None, taken, number)
        if isinstance(result, Refusal):
            self._note_refusal(device_id, asked.order.label, result)
        self._blobs |= finished.blobs
        self._blobs |= finished.unpacked
        if isinstance(finished, FinishedElsewhere):
            self._blobs |= finished.held
        return Answer(device_id, result, taken, number)

    def _note_loss(self, order: Order, result: Result) -> None:
        """Note that a report is not accepted; a refusal is no report."""
        if not isinstance(result, Refusal):
            self._lost[order.device_id, order.step] = order.id

    def _downloaded(self, device_id: str, named: Mapping[str, BlobRef]) -> int:
        """Bytes that a device fetches, as agents do, to have the models that an order names, by digest."""
        held, n_bytes = self._held[device_id], 0
        descents = self.descents if self.descents and self._about(device_id).device.trains else {}
        for ref in (*shared_bases(named.values(), descents), *named.values()):
            if ref.digest in held:
                continue
            if (way := way_to(ref, descents, held)) is not None:
                n_bytes += sum(step.size_bytes for step in way[1])
            elif ref.digest in named:
                n_bytes += ref.size_bytes
            else:
                continue
            held.append(ref.digest)
        others = [digest for digest in held if digest not in named]
        self._held[device_id] = [*others[-CACHED_MODELS:], *named]
        return n_bytes

    def _seconds(self, order: Order, action: Action, bytes_down: int, bytes_up: int = 0) -> float:
        if not self._timed:
            return 0.0
        work = 0.0  # without torch: a few calls of ONNX Runtime
        if action.TRAINS:
            own, network = self._about(order.device_id), shared_network(self.task, self._fingerprint)
            work = action.passes(own.n_shared, own.n_train, own.n_val) * flops(network)
        hardware, when = self._hardware[order.device_id], (self._seed, order.round, order.label, order.device_id)
        return clock.seconds(hardware, clock.Occasion(*when), work=work, bytes_down=bytes_down, bytes_up=bytes_up)

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors in memory."""
        data = codecs.encode(tensors, codec_)
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data), codec=codec_)
        self._blobs[ref.digest] = data
        return ref

    def put_model(self, model: Model, layout: Layout) -> BlobRef:
        """Keep a model in memory, unencoded, since nobody else reads it; from now on it is read-only."""
        measured, pieces = rounding.threads().submit(codecs.norms_of, model), to_pieces(unflatten(model, layout))
        ref = BlobRef(digest=digest_of(*pieces), size_bytes=sum(map(len, pieces)))
        norms = measured.result()
        if not all(map(math.isfinite, norms)):
            raise rounding.NotFiniteError("a model holds numbers that are not finite")
        for vector in (model.params, model.buffers, model.counters):
            vector.flags.writeable = False
        self._blobs[ref.digest] = Unpacked(model, layout, norms)
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file in memory."""
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
        self._blobs[ref.digest] = data
        return ref

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model or an update; its arrays may be read-only."""
        if ref.digest not in self._blobs:
            raise ProtocolError("unknown-blob", ref.digest)
        found = self._here(ref)
        if isinstance(found, Unpacked) and found.layout == layout:
            return found.model
        return codecs.decode(self.get_bytes(ref), ref.codec, layout, again=True)

    def _here(self, ref: BlobRef) -> bytes | Unpacked:
        found = self._blobs[ref.digest]
        return found.at.fetch(found.block, ref.digest) if isinstance(found, Held) else found

    def norms(self, ref: BlobRef, layout: Layout) -> codecs.Norms:
        """For an update, as measured on arrival."""
        found = self._blobs[ref.digest]
        if not isinstance(found, bytes) and found.layout == layout:
            return found.norms
        return codecs.check(self.get_bytes(ref), ref.codec, layout)

    def held(self, updates: Mapping[str, BlobRef]) -> dict[str, Held]:
        """The updates that stay with the processes that made them."""
        found = {i: self._blobs.get(ref.digest) for i, ref in updates.items()}
        return {i: each for i, each in found.items() if isinstance(each, Held)}

    async def means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        """Their means, summed there."""
        held = self.held(wanted.updates)
        return next(iter(held.values())).at.means(wanted, {i: each.block for i, each in held.items()}, note)

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Log and record it; it counts from the next round on."""
        log.warning("event=refused name=%s device=%s detail=%r", error.name, device_id, str(error))
        self._note_problem(device_id, str(error))
        self._accuse(device_id, error.name, str(error))

    def _accuse(self, device_id: str, name: str, detail: str) -> None:
        """Record evidence; it counts from the next round on."""
        offence = Offence(device_id=device_id, round=self.round, name=name, detail=detail)
        self.offences.setdefault((device_id, self.round, name), offence)

    def problem_now(self, device_id: str) -> str:
        """What was wrong with a device in this round, or that it was not there."""
        problem = self.problems.get(device_id)
        return problem.reason if problem is not None and problem.round == self.round else ABSENT

    def _note_refusal(self, device_id: str, label: str, refusal: Refusal) -> None:
        """Note why a device did not do it; a failure of one kind is logged once, not for each device and round."""
        why = refusal.reason or refusal.why.words
        self._note_problem(device_id, f"{outcome_of(refusal)}: {why}")
        if isinstance(refusal, Failed) and (label, why) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((label, why))
            log.warning("event=order_failed device=%s round=%d label=%s reason=%r", device_id, self.round, label, why)

    def _note_problem(self, device_id: str, reason: str) -> None:
        self.problems[device_id] = Problem(round=self.round, reason=reason)

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Ignore: nobody watches."""

    def get_bytes(self, ref: BlobRef) -> bytes:
        """A blob; what is unencoded is encoded first."""
        return as_bytes(self._here(ref), ref.codec)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors in FLOAT32, uncopied."""
        found = self._here(ref)
        return unflatten(found.model, found.layout) if isinstance(found, Unpacked) else views_of(found)

    def keep_only(self, digests: Collection[str]) -> None:
        """Forget all other tensors."""
        self._blobs = {digest: data for digest, data in self._blobs.items() if digest in digests}
