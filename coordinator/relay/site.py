"""How a relay carries out its orders: it asks the devices of its site, and averages their updates.

Upwards it is an agent (`edge_agent.agent`), which keeps each order until it is answered; this is the agent's worker.
Downwards it is a fleet (`coordinator.fleet.mqtt`) on the site's own broker, whose store keeps each answer. So an order
repeated after a crash does not repeat answered work, and ends in the same report. Each run of the coordinator above has
its own store: HOME/site/RUN.
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

from coordinator.fleet.fleet import Answer, answering
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.relayed import Relay, Relayed, SiteOrders, Sum, Summed, Told
from coordinator.fleet.sites import SiteSums, averages
from coordinator.store.records import Device
from coordinator.store.store import Store
from edge_agent.device.worker import Finished
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.steps.contract import Action, Unsupported, installed_steps, read_action, report_of
from fedge.steps.training.train import Train, Trained
from fedge.system.files import digest_of, write_atomically
from fedge.system.stopping import Stop, StoppedError
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, Tensors, unflatten
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import MAX_SITE, BlobRef, Order, SiteDevice

log = logging.getLogger("fedge.relay")

T = TypeVar("T")

LOOK_S: Final = 1.0
"""Pause between two looks at who is there on the site."""
REPEAT_S: Final = 10.0
"""When a new run begins, the broker has so long to repeat the statuses of the devices that were there."""
MARGIN: Final = 0.1
"""Share of an order's time that the relay has for itself, at most 10 s."""
POLL_S: Final = 0.2
"""How soon a relay that is told to stop does."""
NO_RELAYS: Final = "a relay below a relay is not supported"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The run of the coordinator above in which the site's devices take part."""

    id: str = "none"
    seed: int = 0
    layout: Layout = Layout(tensors=())


class SiteFleet(MqttFleet):
    """The fleet below, with the time per step that the relay allows."""

    left_s = 0.0

    def _allowed_s(self, actions: Mapping[str, Action]) -> dict[str, float]:
        return dict.fromkeys(actions, self.left_s)

    async def enter(self, number: int, ids: set[str], keep: set[str]) -> None:
        """Enter a round of the coordinator above, if it is new; `ids`: devices asked there.

        Devices known at that time belong to it even if absent: the coordinator has seen them, and they may return. Data
        no longer needed is deleted. `keep`: digests that the coordinator may still need.
        """
        if self._round == number:
            return

        async def heard() -> None:
            await self.hear_of(ids, self.left_s / 4)
            await asyncio.to_thread(self._store.keep_only, keep | self.needed())

        await self._enter(number, heard)

    def _present(self) -> tuple[Device, ...]:
        return self.registry.known()

    def listed(self) -> tuple[SiteDevice, ...]:
        """The devices present, as the relay's status lists them."""
        there = sorted((*self.registry.online(), *self.registry.inference_only()), key=lambda device: device.id)
        if len(there) > MAX_SITE:
            log.warning("event=site_full devices=%d most=%d", len(there), MAX_SITE)
        return tuple(
            SiteDevice(d.id, d.n_samples, d.incarnation, d.trains, d.drift, d.release, d.withholds, d.context)
            for d in there[:MAX_SITE]
        )


class Site:
    """A relay's worker (`edge_agent.agent.carrier.Works`). Async context manager: inside it, the site is connected.

    Args:
        broker: of the site.
        federation: name of the federation below.
        home: of the relay.
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
        await self._begin(msgspec.json.decode(file.read_bytes(), type=Run) if file.exists() else self._run)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def _begin(self, run: Run, there: Callable[[], tuple[SiteDevice, ...]] = tuple) -> None:
        """Take part in a run, and delete earlier ones.

        `there`: lists the devices that are on the site. `listed` goes on doing so until the new fleet has heard of
        them; else the coordinator above would begin rounds without them.
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
        await fleet.hear_of(before, REPEAT_S)
        self.store, self.fleet, self._run = store, fleet, run

    def listed(self) -> tuple[SiteDevice, ...]:
        """The devices present."""
        return self.fleet.listed()

    async def watch(self, tell: Callable[[], None]) -> None:
        """Report changes in the devices present immediately. Never returns."""
        told: tuple[SiteDevice, ...] | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = tuple(SiteDevice(*msgspec.structs.astuple(device)[:-1]) for device in self.listed())
            if now != told:
                told = now
                tell()

    # ------------------------------------------------------------------------------------------------- orders

    def execute(self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Stop, action: Action) -> Finished:
        """Carry out an order, in the agent's worker thread.

        Raises:
            StoppedError: `stop()` was true.
            StoreError: the disk is full or broken.
            msgspec.DecodeError: the order cannot be read.
        """
        if isinstance(action, Sum):
            return self._sum(msgspec.msgpack.decode(fetch(action.wanted), type=SiteSums))
        assert isinstance(action, Relay)
        began = time.monotonic()
        orders = msgspec.msgpack.decode(fetch(action.orders), type=SiteOrders)
        run = Run(id=order.run, seed=orders.seed, layout=orders.layout)
        if run != self._run:
            self._in_loop(self._begin(run, self.listed), stop)
        left_s = order.left_s - min(10.0, MARGIN * order.left_s)
        self.fleet.left_s = left_s
        keep = {*orders.keep, *(ref.digest for ref in action.models)}
        self._in_loop(self.fleet.enter(order.round, set(orders.devices), keep), stop)
        for ref in action.models:
            if ref.digest not in self.store.blobs:
                self.store.blobs.put_as(ref.digest, fetch(ref))
        self.fleet.left_s = max(left_s - (time.monotonic() - began), 1.0)
        told = self._in_loop(self._ask(order, orders), stop)
        data = msgspec.msgpack.encode(told)
        answers = BlobRef(digest=digest_of(data), size_bytes=len(data))
        return Finished(Relayed(answers=answers), {answers.digest: data})

    def _in_loop(self, work: Coroutine[Any, Any, T], stop: Stop) -> T:
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

    async def _ask(self, order: Order, orders: SiteOrders) -> dict[str, Told]:
        """The devices' answers, without those that did not answer what was asked above."""
        known = installed_steps()
        actions = [
            read_action(msgspec.structs.replace(order, step=a.step, version=a.version, body=a.body), known)
            for a in orders.asked
        ]
        there = {device.id for device in (*self.fleet.devices(), *self.fleet.inference_only())}
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
            i: self._told(order, answer, asked.get(i))
            for i, answer in sorted(answers.items())
            if answer.result is not None and self._answers(asked.get(i), answer)
        }

    def _answers(self, action: Action | None, answer: Answer) -> bool:
        """Whether an answer fits: a device was asked for less if it withholds more than the coordinator above knew."""
        try:
            if action is not None and answer.result is not None:
                answering(action, answer.result, self._task)
        except ProtocolError as error:
            log.warning("event=not_told device=%s name=%s detail=%r", answer.device_id, error.name, str(error))
            return False
        return True

    def _told(self, order: Order, answer: Answer, action: Action | None) -> Told:
        assert answer.result is not None
        report = report_of(order, answer.result, answer.seconds)
        norms = None
        if isinstance(answer.result, Trained) and isinstance(action, Train):
            norms = self.fleet.norms(answer.result.update, self._run.layout.without(action.personal))
        return Told(seconds=report.seconds, outcome=report.outcome, why=report.why, body=report.body, norms=norms)

    # --------------------------------------------------------------------------------------------------- sums

    def _sum(self, wanted: SiteSums) -> Finished:
        """The mean of each cluster over the updates stored here, by ascending device id."""
        here = [i for i, ref in wanted.updates.items() if ref.digest in self.store.blobs]
        means, found = averages(
            wanted,
            here,
            lambda ref: codecs.decode(self.store.blobs.get(ref.digest), ref.codec, wanted.layout, again=True),
        )
        directions: Tensors = {i: direction.astype(np.float32) for i, direction in found.items()}
        models = [None if mean is None else mean.as_model() for mean in means]
        blobs: dict[str, bytes] = {}

        def put(data: bytes) -> BlobRef:
            ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
            blobs[ref.digest] = data
            return ref

        result = Summed(
            means=tuple(None if m is None else put(_encoded(unflatten(m, wanted.layout))) for m in models),
            missing=tuple(i for i in wanted.updates if i not in here),
            directions=put(_encoded(directions)) if directions else None,
        )
        return Finished(result, blobs)


def _encoded(tensors: Tensors) -> bytes:
    return codecs.encode(tensors, Codec.FLOAT32)
