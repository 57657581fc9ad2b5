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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import ne
from typing import TYPE_CHECKING, Final

from coordinator.fleet.fleet import (
    AcceptedUpdate,
    Answer,
    make_order,
    prepare_actions,
    require_answer,
    require_sendable,
)
from coordinator.fleet.quarantine import LONG_UPDATE, find_quarantined
from coordinator.fleet.simulated import clock
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.evidence import Evidence
from coordinator.fleet.simulated.memory import RemoteFinished
from coordinator.fleet.update_norms import AnswerScreen, ScreenedAnswers, screen_answers
from coordinator.fleet.versions import Descent
from coordinator.store.records import Device
from edge_agent.device.device import CACHED_MODELS
from edge_agent.device.encoding import share_memory
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning import batched
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.models.training import count_flops, get_shared_network
from fedge.models.weights import find_device_weights
from fedge.privacy.egress import ALL, Rules
from fedge.steps.contract import Action, Refusal, Result, Reveals, encode_body
from fedge.system.files import skip_fsync
from fedge.system.malloc import tune_malloc
from fedge.tasks import DeviceData
from fedge.tensors.layout import Layout
from fedge.wire.messages import MAX_LEFT_S, BlobRef, Context, Order, find_shared_bases, find_way, iterate_blobs

if TYPE_CHECKING:
    pass

log = logging.getLogger("fedge.coordinator")

LATE: Final = "no answer before the deadline"
SILENT: Final = "it did not answer"
GIVEN_UP_S: Final = 60.0
"""Time after which an unanswered order without a deadline (in a stream) is given up; the coordinator's default."""
INSTANT: Final = Hardware()
RUN: Final = "simulation"
AT_ONCE: Final = 2048
"""Most devices at work at once, since their samples are in memory meanwhile."""
Execute = Callable[[Sequence[batched.Job]], list[FinishedOrder]]
"""A function that carries out orders of different devices and returns results in the order of the jobs."""


@dataclass(frozen=True, slots=True)
class _DeliveredOrder:
    """An order that reached its device. `ends`: the earliest time of its answer, with instant upload."""

    order: Order
    action: Action
    begins: float
    ends: float
    bytes_down: int


@dataclass(frozen=True, slots=True, order=True)
class _PendingAnswer:
    """An answer due at a time; ties are broken by round, label and device."""

    at: float
    round: int
    label: str
    device_id: str
    answer: Answer = field(compare=False)
    action: Action = field(compare=False)


@dataclass(frozen=True, slots=True)
class _DeviceView:
    """What methods see of a device, and its numbers of samples."""

    data: DeviceData | None
    device: Device
    n_shared: int
    n_train: int
    n_val: int


class SimulatedFleet(Evidence):
    """The `Fleet` of simulated devices: workers by device id.

    `seconds`: simulated time so far; a step lasts as long as its slowest answer, or until the deadline if an answer is
    missing. `bytes_up`, `bytes_down`: bytes of tensors sent so far. `workers`: by ascending id.

    Args:
        task: what is learned.
        layout: the layout of the model.
        workers: the workers by device id; if created on demand, in ascending order of ids.
        seed: the seed of orders and of the clock.
        hardware: the hardware of each device; devices without hardware take no time and are always present.
        deadline_s: time limit of `run`. A slower answer is dropped, and costs this time. None if nobody is late.
        arrives: the first round of a device; by default the device is present from the beginning.
        leaves: the first round in which a device is gone for good; by default the device stays.
        rules: what the devices' owners let out; by default everything.
        alike: whether all devices have as many samples as the first, so that none is created just to count them.
        execute: how a step's orders are carried out; `batched.execute_singly` equals real devices to the last bit.
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
        execute: Execute = batched.execute_jobs,
    ) -> None:
        super().__init__(task)
        tune_malloc(large=True)
        self.seconds = 0.0
        self.bytes_up = 0
        self.bytes_down = 0
        self.workers = dict(sorted(workers.items())) if isinstance(workers, dict) else workers
        self._layout = layout
        self._fingerprint = task.compute_fingerprint()
        self._seed = seed
        self._hardware = dict.fromkeys(self.workers, INSTANT) | dict(hardware or {})
        self._timed = hardware is not None
        self._deadline_s = deadline_s
        self._arrives, self._leaves = dict(arrives or {}), dict(leaves or {})
        self._rules = dict.fromkeys(self.workers, ALL) | dict(rules or {})
        self._alike, self._execute = alike, execute
        self._held = defaultdict[str, list[str]](list)  # digests, most recently used last
        self._known: dict[str, _DeviceView] = {}
        self._lost: dict[tuple[str, str], str] = {}  # the last order of a device and step whose report was not accepted
        self._there = dict[str, bool]()
        self._there_in = -1  # the round of `_there`
        self._waiting: list[_DeliveredOrder] = []  # streamed orders not carried out yet
        self._under_way: list[_PendingAnswer] = []  # heap of answers to streamed orders
        self.on_event: Callable[[str, Mapping[str, object]], None] = lambda _event, _fields: None

    def get_devices(self) -> tuple[Device, ...]:
        """Return the workers that train and are present in this round."""
        there = [self._get_view(i).device for i in self._find_present()]
        return tuple(device for device in there if device.trains)

    def get_inference_devices(self) -> tuple[Device, ...]:
        """Return the workers that do not train and are present in this round."""
        there = [self._get_view(i).device for i in self._find_present()]
        return tuple(device for device in there if not device.trains)

    def _get_view(self, device_id: str) -> _DeviceView:
        """Return what the fleet knows of a device by its data alone; data made on demand never change."""
        known = self._known.get(device_id)
        if known is None or (isinstance(self.workers, dict) and known.data is not self.workers[device_id].data):
            worker, rules = self.workers[next(iter(self.workers)) if self._alike else device_id], self._rules[device_id]
            data = worker.data
            n_samples = data.n_shared if worker.trains else 0
            device = Device(
                device_id,
                n_samples if Reveals.COUNT in rules.allowed else 0,
                self._make_context(device_id, n_samples),
                trains=worker.trains,
                steps=worker.versions,
                withholds=rules.withheld,
            )
            kept = data if isinstance(self.workers, dict) else None  # else memory would hold everybody's samples
            known = self._known[device_id] = _DeviceView(kept, device, data.n_shared, data.n_train, len(data.y_val))
        return known

    def _make_context(self, device_id: str, n_samples: int) -> Context | None:
        own = self._hardware[device_id]
        if own.cpu_ghz is None and own.free_ram_gb is None:
            return None
        context = Context(
            device_id=device_id,
            cpu_ghz=own.cpu_ghz,
            free_ram_gb=own.free_ram_gb,
            link_mbit_s=own.link_mbit_s,
            n_samples=n_samples,
        )
        return self._rules[device_id].strip(context)

    def _find_present(self) -> list[str]:
        """Find the present devices, by advancing each device's Markov chain from its first round to this one."""
        if self.round < self._there_in:
            self._there, self._there_in = {}, -1
        for number in range(self._there_in + 1, self.round + 1):
            self._there = {
                i: clock.is_present(own, self._there.get(i), clock.Occasion(self._seed, number, "", i))
                for i, own in self._hardware.items()
            }
        self._there_in = self.round
        out = find_quarantined(self.offences.values(), self.round)
        return [i for i in self.workers if self._there[i] and self._has_arrived(i) and i not in out]

    def _has_arrived(self, device_id: str) -> bool:
        return self._arrives.get(device_id, 0) <= self.round < self._leaves.get(device_id, self.round + 1)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Execute the actions; answers by ascending device id. Errors of a user's network become `Failed`."""
        self._catch_up()
        orders, answers, actions = self._make_orders(label, actions, self._deadline_s)
        answers |= {answer.device_id: answer for answer in self._carry_out(orders, self._deadline_s)}
        answers = dict(sorted(answers.items()))
        waits = {i: max(0.0, free_at - self.seconds) for i, free_at in self._get_free_times().items()}
        answers = self._record_evidence(screen_answers(answers, actions, self._layout, self.get_norms))
        self.seconds += max((waits.get(i, 0.0) + answer.seconds for i, answer in answers.items()), default=0.0)
        await asyncio.sleep(0)  # lets Ctrl-C in
        return answers

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Stream answers in the order of the simulated clock, which advances to each answer.

        All waiting orders are carried out at once, when the next answer may be one of theirs, so that more of them
        train together.
        """
        guard = AnswerScreen(self._layout, self.get_norms, seen)
        if self.get_busy_devices().intersection(actions):
            self._catch_up()
        free_at = self._get_free_times()
        orders, answers, actions = self._make_orders(label, actions)
        self._waiting += orders
        for i, answer in answers.items():
            self._add_pending(label, actions[i], answer, max(self.seconds, free_at.get(i, 0.0)))
        while self._waiting or self._under_way:
            if not self._under_way or self._under_way[0].at >= min((a.ends for a in self._waiting), default=math.inf):
                self._catch_up()
            coming = self._under_way[0]
            (answer,) = self._record_evidence(guard.screen(coming.answer, coming.action)).values()
            heapq.heappop(self._under_way)
            self.seconds = max(self.seconds, coming.at)
            await asyncio.sleep(0)
            yield answer

    def _record_evidence(self, found: ScreenedAnswers) -> dict[str, Answer]:
        """Record the evidence against devices, and return the answers that are accepted."""
        for i, error in found.refused.items():
            self.accuse(i, error)
        for i, detail in found.suspects.items():
            self._record_offence(i, LONG_UPDATE, detail)
        return found.answers

    def _catch_up(self) -> None:
        """Carry out the streamed orders that wait."""
        waiting, self._waiting = self._waiting, []
        for each, answer in zip(waiting, self._carry_out(waiting), strict=True):
            self._add_pending(each.order.label, each.action, answer, each.begins)

    def _add_pending(self, label: str, action: Action, answer: Answer, begins: float) -> None:
        coming = _PendingAnswer(begins + answer.seconds, answer.round, label, answer.device_id, answer, action)
        heapq.heappush(self._under_way, coming)

    def get_busy_devices(self) -> frozenset[str]:
        """Return the devices with a streamed order whose answer has not been yielded."""
        waiting = (each.order.device_id for each in self._waiting)
        return frozenset((*waiting, *(coming.device_id for coming in self._under_way)))

    def find_needed_blobs(self) -> set[str]:
        """Return the digests of frozen tensors, of answers not yet yielded, and of their orders."""
        actions = (*(waiting.action for waiting in self._waiting), *(coming.action for coming in self._under_way))
        results = (coming.answer.result for coming in self._under_way)
        named = (find_device_weights(self.task), *actions, *results)
        return {ref.digest for each in named for ref in iterate_blobs(each)}

    def _get_free_times(self) -> dict[str, float]:
        """Return when devices finish their streamed orders; devices that were not reached are left out."""
        return {c.device_id: c.at for c in sorted(self._under_way) if c.answer.result is not None}

    def _make_orders(
        self, label: str, actions: Mapping[str, Action], deadline_s: float | None = None
    ) -> tuple[list[_DeliveredOrder], dict[str, Answer], dict[str, Action]]:
        """Return the orders that reach their devices, other devices' answers, and the actions sent; ascending ids."""
        require_sendable(actions.values())
        present, free_at = set(self._find_present()), self._get_free_times()
        own, refused = prepare_actions({i: self._get_view(i).device for i in actions}, actions, self.task)
        kinds = {id(action): action for action in own.values()}  # usually one action shared by all
        bodies = {key: encode_body(action) for key, action in kinds.items()}
        named = {key: {ref.digest: ref for ref in iterate_blobs(action)} for key, action in kinds.items()}
        reached: list[_DeliveredOrder] = []
        answers: dict[str, Answer] = {}
        for i in sorted(actions):
            if i in refused:
                self._record_refusal(i, label, refused[i])
                answers[i] = Answer(i, refused[i], 0.0, self.round)
            elif i not in present or self._drops(label, i):
                self._record_problem(i, SILENT)
                answers[i] = Answer(i, None, deadline_s or GIVEN_UP_S, self.round)
            else:
                action, key = own[i], id(own[i])
                order = make_order(
                    *(RUN, self._seed, self.round, label, i, self._fingerprint, action),
                    left_s=MAX_LEFT_S,
                    body=bodies[key],
                )
                bytes_down = self._count_downloaded(i, named[key])
                self.bytes_down += bytes_down
                begins = max(self.seconds, free_at.get(i, 0.0))
                reached.append(
                    _DeliveredOrder(
                        order, action, begins, begins + self._compute_seconds(order, action, bytes_down), bytes_down
                    )
                )
        return reached, answers, {**actions, **own}

    def _carry_out(self, asked: Sequence[_DeliveredOrder], deadline_s: float | None = None) -> list[Answer]:
        """Carry out the orders, and return their raw results, in order."""
        finished: list[FinishedOrder] = []
        with skip_fsync(), share_memory(self._compute_room()), self._tracebacks.filter_agents():
            for first in range(0, len(asked), AT_ONCE):
                lot = asked[first : first + AT_ONCE]
                finished += self._execute([self._make_job(each) for each in lot])
        return [self._make_answer(each, done, deadline_s) for each, done in zip(asked, finished, strict=True)]

    def _make_job(self, asked: _DeliveredOrder) -> batched.Job:
        worker = self.workers[asked.order.device_id]
        worker.accepted = partial(ne, self._lost.get((worker.id, asked.order.step)))
        return batched.Job(worker, asked.order, asked.action, self._load_blob)

    def _drops(self, label: str, device_id: str) -> bool:
        return clock.is_dropped(self._hardware[device_id], clock.Occasion(self._seed, self.round, label, device_id))

    def _make_answer(self, asked: _DeliveredOrder, finished: FinishedOrder, deadline_s: float | None) -> Answer:
        """Return the answer as received, without a result if it is late; what a late device sent is discarded."""
        device_id, number = asked.order.device_id, asked.order.round
        bytes_up = sum(ref.size_bytes for ref in iterate_blobs(finished.result))
        self.bytes_up += bytes_up
        taken = self._compute_seconds(asked.order, asked.action, asked.bytes_down, bytes_up)
        if deadline_s is not None and taken > deadline_s:
            self._record_problem(device_id, LATE)
            self._record_loss(asked.order, finished.result)
            return Answer(device_id, None, deadline_s, number)
        result, action = finished.result, asked.action
        try:
            if not isinstance(result, Refusal) and self._get_view(device_id).device.withholds:
                result = self._rules[device_id].strip(result, action.reveals())
            result = require_answer(action, result, self.task)
        except ProtocolError as error:
            self.accuse(device_id, error)
            self._record_loss(asked.order, finished.result)
            return Answer(device_id, None, taken, number)
        if isinstance(result, Refusal):
            self._record_refusal(device_id, asked.order.label, result)
        self._blobs |= finished.blobs
        self._blobs |= finished.unpacked
        if isinstance(finished, RemoteFinished):
            self._blobs |= finished.held
        return Answer(device_id, result, taken, number)

    def _record_loss(self, order: Order, result: Result) -> None:
        """Record that a report is not accepted; a refusal is no report."""
        if not isinstance(result, Refusal):
            self._lost[order.device_id, order.step] = order.id

    def _count_downloaded(self, device_id: str, named: Mapping[str, BlobRef]) -> int:
        """Count the bytes that a device fetches to have the models that an order names, by digest."""
        held, n_bytes = self._held[device_id], 0
        descents = self.descents if self.descents and self._get_view(device_id).device.trains else {}
        for ref in (*find_shared_bases(named.values(), descents), *named.values()):
            if ref.digest in held:
                continue
            if (way := find_way(ref, descents, held)) is not None:
                n_bytes += sum(step.size_bytes for step in way[1])
            elif ref.digest in named:
                n_bytes += ref.size_bytes
            else:
                continue
            held.append(ref.digest)
        others = [digest for digest in held if digest not in named]
        self._held[device_id] = [*others[-CACHED_MODELS:], *named]
        return n_bytes

    def _compute_seconds(self, order: Order, action: Action, bytes_down: int, bytes_up: int = 0) -> float:
        if not self._timed:
            return 0.0
        work = 0.0  # no work in torch, only a few calls of ONNX Runtime
        if action.TRAINS:
            own, network = self._get_view(order.device_id), get_shared_network(self.task, self._fingerprint)
            work = action.passes(own.n_shared, own.n_train, own.n_val) * count_flops(network)
        hardware, when = self._hardware[order.device_id], (self._seed, order.round, order.label, order.device_id)
        return clock.compute_seconds(
            hardware, clock.Occasion(*when), work=work, bytes_down=bytes_down, bytes_up=bytes_up
        )

    def record_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Pass the event to who watches; nothing is kept."""
        self.on_event(event, fields)
