"""How a relay carries out its orders: it asks the devices of its site, and averages their updates.

Upwards a relay is an agent (`edge_agent.agent`), which keeps each order until it is answered; this file is the agent's
worker. Downwards a relay is a fleet (`coordinator.fleet.mqtt`) on the site's own broker, whose store keeps each answer.
So an order repeated after a crash does not repeat answered work, and ends in the same report. Each run of the
coordinator above has its own store, HOME/site/RUN.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from coordinator.fleet.fleet import Answer, require_answer
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.relayed import Relay, Relayed, SiteAnswer, SiteOrders, Sum, Summed, list_updates
from coordinator.fleet.sites import SiteSums, average_updates
from coordinator.store.records import Device, DeviceFacts
from coordinator.store.store import Store
from edge_agent.device.worker import FinishedOrder
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.steps.contract import Action, Unsupported, decode_action, load_installed_steps, make_report
from fedge.steps.training.train import Train, Trained
from fedge.system.files import compute_digest, write_atomically
from fedge.system.stopping import Stop, StoppedError
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, Tensors, unflatten
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import MAX_SITE, BlobRef, Order, SiteDevice

log = logging.getLogger("fedge.relay")

T = TypeVar("T")

LOOK_S: Final = 1.0
"""Pause between two looks at which devices of the site are present."""
REPEAT_S: Final = 10.0
"""Time for the broker to repeat the statuses of the site's devices when a new run begins."""
MARGIN: Final = 0.1
"""Share of an order's time that the relay keeps for itself, at most 10 s."""
POLL_S: Final = 0.2
"""Pause between two checks whether the relay is to stop."""
NO_RELAYS: Final = "a relay below a relay is not supported"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The run of the coordinator above in which the site's devices take part."""

    id: str = "none"
    seed: int = 0
    layout: Layout = Layout(tensors=())


class SiteFleet(MqttFleet):
    """The fleet of a site, with the time per step that the relay allows."""

    left_s = 0.0

    def _compute_allowed_s(self, actions: Mapping[str, Action]) -> dict[str, float]:
        return dict.fromkeys(actions, self.left_s)

    async def enter_round(self, number: int, ids: set[str], keep: set[str]) -> None:
        """Enter a round of the coordinator above, if it is new. `ids`: the devices asked in it.

        Devices known at that time belong to the round even if absent, since the coordinator has seen them and they may
        return. Data that are no longer needed are deleted. `keep`: digests that the coordinator may still need.
        """
        if self._round == number:
            return

        async def wait_for_devices() -> None:
            await self.wait_for_status(ids, self.left_s / 4)
            await asyncio.to_thread(self._store.remove_others, keep | self.find_needed_blobs())

        await self._enter(number, wait_for_devices)

    def _find_present(self) -> tuple[Device, ...]:
        return self.registry.list_known()

    def list_present(self) -> tuple[SiteDevice, ...]:
        """Return the devices present, as the relay's status lists them."""
        there = sorted(
            (*self.registry.list_online(), *self.registry.list_inference_only()), key=lambda device: device.id
        )
        if len(there) > MAX_SITE:
            log.warning("event=site_full devices=%d most=%d", len(there), MAX_SITE)
        facts = {device.id: device for device in self.registry.list_facts()}
        return tuple(_make_site_device(device, facts[device.id]) for device in there[:MAX_SITE])


def _make_site_device(device: Device, facts: DeviceFacts) -> SiteDevice:
    return SiteDevice(
        device.id,
        device.n_samples,
        device.incarnation,
        device.trains,
        device.drift,
        device.release,
        device.withholds,
        device.context,
        facts.data_version,
        facts.n_arrived,
        facts.drift_kind if device.drift else None,
    )


class Site:
    """The worker of a relay (`edge_agent.agent.carrier.OrderExecutor`). As an async context manager, it is connected.

    Args:
        broker: the site's broker.
        federation: name of the federation below.
        home: the relay's folder.
        task: what is learned.
        observe: called with the site's events.
    """

    def __init__(
        self,
        broker: BrokerSettings,
        federation: str,
        home: Path,
        task: TaskSpec,
        observe: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._broker = broker
        self._federation = federation
        self._folder = home / "site"
        self._task = task
        self._observe = observe
        self._open = AsyncExitStack()
        self._run = Run()

    async def __aenter__(self) -> Site:
        self._loop = asyncio.get_running_loop()
        file = self._folder / "run"
        await self._start_run(msgspec.json.decode(file.read_bytes(), type=Run) if file.exists() else self._run)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def _start_run(self, run: Run, there: Callable[[], tuple[SiteDevice, ...]] = tuple) -> None:
        """Start to take part in a run, and delete earlier runs.

        `there`: lists the devices that are on the site. `list_present` uses this list until the new fleet has heard of
        them; otherwise the coordinator above would begin rounds without them.
        """
        before = {device.id for device in there()}
        await self._open.aclose()
        home = self._folder / run.id
        store = self._open.enter_context(contextlib.closing(Store(home)))
        about = Assignment(
            federation=self._federation,
            task=self._task,
            layout=run.layout,
            run=run.id,
            seed=run.seed,
            deadline_s=1.0,
            no_relays=NO_RELAYS,
        )
        fleet = SiteFleet(self._broker, store, about, self._observe)
        write_atomically(self._folder / "run", msgspec.json.encode(run))
        for other in self._folder.iterdir():
            if other.is_dir() and other != home:
                shutil.rmtree(other)
        await self._open.enter_async_context(fleet)
        await fleet.wait_for_status(before, REPEAT_S)
        self.store, self.fleet, self._run = store, fleet, run

    def list_present(self) -> tuple[SiteDevice, ...]:
        """Return the devices present."""
        return self.fleet.list_present()

    async def watch(self, tell: Callable[[], None]) -> None:
        """Report changes of the present devices at once, endlessly."""
        published: tuple[SiteDevice, ...] | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = tuple(msgspec.structs.replace(device, context=None) for device in self.list_present())
            if now != published:
                published = now
                tell()

    # ------------------------------------------------------------------------------------------------- orders

    def execute(self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Stop, action: Action) -> FinishedOrder:
        """Carry out an order, in the agent's worker thread.

        Raises:
            StoppedError: `stop()` was true.
            StoreError: the disk is full or broken.
            msgspec.DecodeError: the order cannot be read.
        """
        if isinstance(action, Sum):
            return self._compute_means(msgspec.msgpack.decode(fetch(action.wanted), type=SiteSums))
        assert isinstance(action, Relay)
        began = time.monotonic()
        orders = msgspec.msgpack.decode(fetch(action.orders), type=SiteOrders)
        run = Run(id=order.run, seed=orders.seed, layout=orders.layout)
        if run != self._run:
            self._run_in_loop(self._start_run(run, self.list_present), stop)
        left_s = order.left_s - min(10.0, MARGIN * order.left_s)
        self.fleet.left_s = left_s
        keep = {*orders.keep, *(ref.digest for ref in action.models)}
        self._run_in_loop(self.fleet.enter_round(order.round, set(orders.devices), keep), stop)
        for ref in action.models:
            if ref.digest not in self.store.blobs:
                self.store.blobs.put_as(ref.digest, fetch(ref))
        self.fleet.left_s = max(left_s - (time.monotonic() - began), 1.0)
        results = self._run_in_loop(self._run_orders(order, orders), stop)
        data = msgspec.msgpack.encode(results)
        answers = BlobRef(digest=compute_digest(data), size_bytes=len(data))
        return FinishedOrder(Relayed(answers=answers), {answers.digest: data})

    def _run_in_loop(self, work: Coroutine[Any, Any, T], stop: Stop) -> T:
        """Run work on the loop until it is done or `stop` is true."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                if stop():
                    future.cancel()
                    raise StoppedError from None

    async def _run_orders(self, order: Order, orders: SiteOrders) -> dict[str, SiteAnswer]:
        """Run the orders, and return the devices' answers that fit what the coordinator above asked for."""
        known = load_installed_steps()
        actions = [
            decode_action(msgspec.structs.replace(order, step=a.step, version=a.version, body=a.body), known)
            for a in orders.asked
        ]
        there = {device.id for device in (*self.fleet.get_devices(), *self.fleet.get_inference_devices())}
        asked: dict[str, Action] = {}
        answers: dict[str, Answer] = {}
        for i, number in orders.devices.items():
            action = actions[number]
            if isinstance(action, Unsupported):
                answers[i] = Answer(i, action)
            elif i in there:
                asked[i] = action
        answers |= await self.fleet.run(order.label, asked)
        return {
            i: self._make_answer(order, answer, asked.get(i))
            for i, answer in sorted(answers.items())
            if answer.result is not None and self._is_fitting(asked.get(i), answer)
        }

    def _is_fitting(self, action: Action | None, answer: Answer) -> bool:
        """Return whether an answer fits the action from above; a device that withholds more was asked for less."""
        try:
            if action is not None and answer.result is not None:
                require_answer(action, answer.result, self._task)
        except ProtocolError as error:
            log.warning("event=not_told device=%s name=%s detail=%r", answer.device_id, error.name, str(error))
            return False
        return True

    def _make_answer(self, order: Order, answer: Answer, action: Action | None) -> SiteAnswer:
        assert answer.result is not None
        report = make_report(order, answer.result, answer.seconds)
        told = SiteAnswer(seconds=report.seconds, outcome=report.outcome, why=report.why, body=report.body)
        if isinstance(answer.result, Trained) and isinstance(action, Train):
            updates = list_updates(action, answer.result, self._run.layout)
            norms, *further = (self.fleet.get_norms(ref, part) for ref, part in updates.items())
            told = msgspec.structs.replace(told, norms=norms, further=tuple(further))
        return told

    # --------------------------------------------------------------------------------------------------- sums

    def _compute_means(self, wanted: SiteSums) -> FinishedOrder:
        """Return the mean of each cluster over the updates stored here, by ascending device id."""
        here = [i for i, ref in wanted.updates.items() if ref.digest in self.store.blobs]
        means, found = average_updates(
            wanted,
            here,
            lambda ref: codecs.decode(self.store.blobs.get(ref.digest), ref.codec, wanted.layout, again=True),
        )
        directions: Tensors = {i: direction.astype(np.float32) for i, direction in found.items()}
        models = [None if mean is None else mean.to_model() for mean in means]
        blobs: dict[str, bytes] = {}

        def put_blob(data: bytes) -> BlobRef:
            ref = BlobRef(digest=compute_digest(data), size_bytes=len(data))
            blobs[ref.digest] = data
            return ref

        result = Summed(
            means=tuple(None if m is None else put_blob(_encode(unflatten(m, wanted.layout))) for m in models),
            missing=tuple(i for i in wanted.updates if i not in here),
            directions=put_blob(_encode(directions)) if directions else None,
        )
        return FinishedOrder(result, blobs)


def _encode(tensors: Tensors) -> bytes:
    return codecs.encode(tensors, Codec.FLOAT32)
