"""Helper processes of a coordinator: intakes, which accept reports, and model servers.

`fedge coordinator` can do everything alone. Each helper joins a shared subscription, in which the broker hands every
report, or every Want, to one member, the dispatcher among them. They share the store and the blob folder, and may be
killed at any time: a device repeats its report until it is acknowledged, and an order is closed only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from coordinator.fleet.mqtt import LOOK_S, Lines, signing
from coordinator.fleet.orders import OrderStatus, verdict
from coordinator.fleet.quarantine import Offence
from coordinator.fleet.uploads import NO_EVIDENCE, Uploads, answer_to
from coordinator.store import OFFERED, Entry, Store
from fedge.background import Background
from fedge.errors import ConfigError, ProtocolError, TransportError
from fedge.files import BlobFolder, InUseError, locked
from fedge.identity import Role
from fedge.messages import Ack, Report, Status, Want, decode, encode
from fedge.sealed import Signed
from fedge.step import Action, Refusal, Unsupported, read_action
from fedge.task import TaskSpec
from fedge.tensors import Layout
from fedge.topics import INTAKES, MODELS, Topics
from fedge.transfer import Sender
from fedge.transport import BrokerSettings, Inbound, Transport

log = logging.getLogger("fedge.coordinator")

ACK_S: Final = 3600
"""How long the broker keeps a verdict for a device that is away."""
LOOK_AGAIN_S: Final = 0.02
"""Pause between two looks at which models are offered."""


@contextlib.contextmanager
def own_folder(home: Path) -> Iterator[Path]:
    """An exclusive folder below HOME for this process, including leftovers of its last owner."""
    for number in range(1, 1000):
        folder = home / "roles" / str(number)
        try:
            with locked(folder, f"{folder} is taken"):
                yield folder
                return
        except InUseError:
            continue
    raise ConfigError(f"{home / 'roles'} has no room for one more process")


class _Helper:
    """A connection to the broker, with the checks of who may send what."""

    def __init__(self, broker: BrokerSettings, store: Store, federation: str, home: Path) -> None:
        self._store = store
        self._topics = Topics(federation)
        self._signed, self._members = signing(broker, federation, home, Role.INTAKE)
        # No session: the broker would keep a killed helper's messages for an hour.
        self._transport = Transport(broker, self._topics.client_id("intake", uuid.uuid4().hex), session_expiry_s=0)
        self._incarnations: dict[str, str] = {}
        self._lines = Lines()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = Background(self._fail)

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def _serve(self) -> None:
        """Work until something fails for good."""
        if isinstance(self._signed, Signed):
            await self._transport.subscribe(self._topics.agent("+", "status"), self._guard(self._on_status))
        async with self._transport:
            if self._members is not None:
                self._background.spawn(self._watch_members())
            try:
                await self._end
            finally:
                self._background.cancel()

    async def _watch_members(self) -> None:
        assert self._members is not None
        assert isinstance(self._signed, Signed)
        while True:
            await asyncio.sleep(LOOK_S)
            self._members.look(self._signed.authority)

    def _guard(self, handle: Callable[[str, Inbound], None]) -> Callable[[Inbound], Awaitable[None]]:
        """Drop messages that violate the contract."""

        async def guarded(inbound: Inbound) -> None:
            device = self._topics.parts(inbound.topic)[1]
            if not inbound.payload:
                return
            try:
                payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
                handle(device, dataclasses.replace(inbound, payload=payload))
            except ProtocolError as error:
                self._refuse(error, device)

        return guarded

    def _refuse(self, error: ProtocolError, device: str) -> None:
        if (untold := self._lines.untold(error.name, time.monotonic())) is not None:
            log.warning("event=refused name=%s device=%s detail=%r untold=%d", error.name, device, str(error), untold)

    def _on_status(self, device: str, inbound: Inbound) -> None:
        self._incarnations[device] = decode(inbound.payload, Status).incarnation

    def _seal(self, topic: str, payload: bytes) -> bytes:
        """Sign for the agent's present incarnation; before it is known, a later Want will do."""
        device = self._topics.parts(topic)[1 if topic.endswith("/acks") else 2]
        return self._signed.seal(topic, payload, to=self._incarnations.get(device, ""))


class Intake(_Helper):
    """Fetches, checks, accepts and acknowledges reports.

    Args:
        broker: how to reach the broker.
        store: beside its dispatcher.
        home: exclusive folder of this process, on the same disk as the blob folder.
        federation: its name.
        task: what is learned.
        layout: of the model.
        steps: what devices are asked.
    """

    def __init__(
        self,
        broker: BrokerSettings,
        store: Store,
        home: Path,
        *,
        federation: str,
        task: TaskSpec,
        layout: Layout,
        steps: Mapping[str, type[Action]],
    ) -> None:
        super().__init__(broker, store, federation, home)
        self._task, self._layout, self._steps = task, layout, steps
        received = BlobFolder(home / "received")
        self._uploads = Uploads(self._transport, received, store.blobs, self._topics, layout, self._seal)
        self._checks: set[str] = set()

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            StoreError: the store cannot be written; nothing accepted is lost.
            TransportError: the broker refused us for good.
        """
        reports = self._topics.shared(INTAKES, self._topics.agent("+", "reports"))
        await self._transport.subscribe(reports, self._guard(self._on_report))
        with contextlib.closing(self._uploads):
            await self._serve()

    def _on_report(self, device: str, inbound: Inbound) -> None:
        report = decode(inbound.payload, Report)
        if report.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {report.device_id}")
        if report.order_id not in self._checks:
            self._checks.add(report.order_id)
            self._background.spawn(self._take(report))

    async def _take(self, report: Report) -> None:
        try:
            entry = await asyncio.to_thread(self._store.entry, report.order_id)
            if entry is None:
                ack = Ack(order_id=report.order_id, device_id=report.device_id, accepted=False, reason="unknown-order")
            elif entry.order.device_id != report.device_id:
                error = ProtocolError("foreign-id", f"{report.device_id} reports an order of {entry.order.device_id}")
                return self._refuse(error, report.device_id)
            elif (closed := await self._closed(entry, report)) is None:
                return None
            else:
                accepted = closed.status is OrderStatus.ACCEPTED
                ack = verdict(closed.order, accepted=accepted, reason=closed.reason)
            topic = self._topics.agent(report.device_id, "acks")
            with contextlib.suppress(TransportError):  # the device asks again
                await self._transport.publish(topic, self._seal(topic, encode(ack)), expires_in_s=ACK_S)
        finally:
            self._checks.discard(report.order_id)

    async def _closed(self, entry: Entry, report: Report) -> Entry | None:
        """The closed order, whoever closed it; None: it has to stay open."""
        action = read_action(entry.order, self._steps)
        if isinstance(action, Unsupported):
            log.error("event=unknown_step order=%s reason=%r", entry.order.id, action.reason)
            return None
        if entry.status is OrderStatus.OPEN:
            error = await self._examine(entry, action, report)
            change = (
                self._store.accept(report, time.time())
                if error is None
                else self._store.reject(entry.order.id, error, time.time())
            )
            await asyncio.wrap_future(change)
        return await asyncio.to_thread(self._store.entry, entry.order.id)

    async def _examine(self, entry: Entry, action: Action, report: Report) -> str | None:
        """Fetch and check a report's uploads; returns why they are not acceptable, or None."""
        order = entry.order
        try:
            result = answer_to(order, action, report, self._task, self._signed)
            if not isinstance(result, Refusal):
                for ref, layout in action.uploads(result, self._layout).items():
                    await self._uploads.fetch(ref, order.device_id, layout, wanted=lambda: self._is_open(order.id))
        except ProtocolError as refusal:
            self._refuse(refusal, order.device_id)
            if refusal.name not in NO_EVIDENCE:
                offence = Offence(device_id=order.device_id, round=order.round, name=refusal.name, detail=str(refusal))
                await asyncio.wrap_future(self._store.accuse(offence))
            return str(refusal)
        except TransportError as refusal:
            return f"the broker does not let us fetch it: {refusal}"
        finally:
            self._uploads.norms.clear()  # the dispatcher measures them again
        return None

    def _is_open(self, order_id: str) -> bool:
        entry = self._store.entry(order_id)
        return entry is not None and entry.status is OrderStatus.OPEN


class BlobServer(_Helper):
    """Serves the models named in open orders to devices."""

    def __init__(self, broker: BrokerSettings, store: Store, home: Path, *, federation: str) -> None:
        super().__init__(broker, store, federation, home)
        self._offered: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._sender = Sender(self._transport, self._source)

    async def run(self) -> None:
        """Work until cancelled; raises as `Intake.run`."""
        wants = self._topics.shared(MODELS, self._topics.agent("+", "wants"))
        await self._transport.subscribe(wants, self._guard(self._on_want))
        async with self._sender:
            await self._serve()

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._background.spawn(self._answer(device, inbound.payload))

    async def _answer(self, device: str, payload: bytes) -> None:
        try:
            await asyncio.to_thread(self._bring, decode(payload, Want).digest)
            self._sender.want_of(device, payload, self._topics)
        except ProtocolError as error:
            self._refuse(error, device)

    def _bring(self, digest: str) -> None:
        """Fetch a model if it is offered."""
        if digest not in self._offered and time.monotonic() - self._looked_at > LOOK_AGAIN_S:
            self._looked_at = time.monotonic()
            self._offered = frozenset(json.loads(self._store.recall(OFFERED) or "[]"))
            self._store.blobs.let_go(self._offered)
        if digest in self._offered:
            self._store.blobs.bring(digest)

    def _source(self, digest: str) -> Path | None:
        """Devices get only what orders name: the updates of others are in the same folder."""
        return self._store.blobs.path(digest) if digest in self._offered and digest in self._store.blobs else None


def begun(store: Store, home: Path, task: TaskSpec, blobs: str | None) -> Layout:
    """The model layout of a federation that its dispatcher has begun.

    Raises:
        ConfigError: it has not begun, learns another task, or keeps its tensors elsewhere than `blobs`.
    """
    known, identity = store.recall("start"), store.recall("identity")
    if known is None or identity is None:
        raise ConfigError(f"{home} holds no federation yet: start `fedge coordinator` without --role first")
    if json.loads(identity)[2] != task.fingerprint():
        raise ConfigError(f"{home} holds a federation with another task: give --task as its coordinator was given")
    store.require_blobs(blobs)
    layout, _ = msgspec.json.decode(known, type=tuple[Layout, msgspec.Raw])
    return layout
