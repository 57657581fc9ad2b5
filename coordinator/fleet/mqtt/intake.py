"""Reports and their updates: fetched, checked, accepted once, acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.fleet.mqtt.process import Process
from coordinator.fleet.mqtt.uploads import NO_EVIDENCE, Uploads, read_answer
from coordinator.store.records import Entry, Offence, OrderStatus
from coordinator.store.store import Store
from fedge.data.classes import AddedClasses
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError, TransportError
from fedge.identity.names import Role
from fedge.steps.contract import Action, Refusal, Unsupported, decode_action, load_installed_steps
from fedge.system.files import BlobFolder
from fedge.tensors.layout import Layout
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Ack, BlobRef, Order, Report, decode_message, encode_message
from fedge.wire.topics import INTAKES

log = logging.getLogger("fedge.coordinator")
ACK_S: Final = 3600
"""How long the broker keeps a verdict for a device that is away."""
MAX_UNDER_WAY: Final = 16_384
"""Most reports under check and messages waiting for the broker. Further ones are dropped; their senders repeat them."""
MAX_REPORTS: Final = 16
"""Most reports of one device under way, since an agent holds no more orders."""
CHECK_LOST: Final = (
    "the broker took earlier copies of this report and gave them to none of our processes: look in its log for limits "
    "that it reached, and at what else is subscribed to the federation's topics"
)
MAX_HEARD: Final = 16_384
"""Latest reports remembered as received, so that reports that we ourselves dropped do not count as the broker's losses.
"""
LOST: Final = 3
"""If the first copy of a report comes after the broker took this many earlier ones, some copies were lost."""
QUIET_S: Final = 60.0
"""Shortest connection after which missed copies are the broker's loss; before, this process may have missed them."""
GROWN: Final = "classes have joined the federation since this process began: start it again"
Key = tuple[str, str]
"""Ids of a device and an order."""


@dataclasses.dataclass(slots=True)
class PendingReport:
    """The report for an order that is being checked. `fetching`: the task, while the report's uploads are fetched.

    `copies`: copies of the same report that have come since; they say nothing new while its uploads are fetched.
    """

    report: Report
    fetching: asyncio.Task[None] | None = None
    copies: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of a federation's devices.

    federation: its name. task: what is learned. layout: of the model. steps: of the method, in addition to the
    installed ones. run: part of the orders' ids, since devices remember the orders of an earlier coordinator of this
    name. issue: another part of the ids, new after a restore from a backup, so that devices repeat what they did since
    the backup. seed: source of all devices' random numbers. deadline_s: minimum time for one step; extended for devices
    whose earlier reports show that they need more (`coordinator.fleet.mqtt.pace`). no_relays: why relays are not
    possible; empty if they are. classes: those that have joined, which `task` has.
    """

    federation: str
    task: TaskSpec
    layout: Layout
    steps: Iterable[type[Action]] = ()
    run: str = ""
    issue: str = ""
    seed: int = 0
    deadline_s: float = 60.0
    no_relays: str = ""
    classes: AddedClasses = dataclasses.field(default_factory=AddedClasses)


class Intake(Process):
    """The process that fetches, checks, accepts and acknowledges reports.

    Args:
        broker: how to reach the broker.
        store: the store of the federation.
        home: exclusive folder of this process, on the same disk as the blob folder.
        about: what the devices work on.
        role: as in `Process`.
    """

    def __init__(
        self, broker: BrokerSettings, store: Store, home: Path, about: Assignment, role: Role = Role.INTAKE
    ) -> None:
        super().__init__(broker, store, about.federation, home, role)
        self.task, self._layout = about.task, about.layout
        self._fingerprint = about.task.compute_fingerprint()
        self._steps = {**load_installed_steps(), **{kind.STEP: kind for kind in about.steps}}
        received = store.blobs.get_received() if role is Role.COORDINATOR else BlobFolder(home / "received")
        seal = lambda topic, payload: self._seal(topic, payload, topic.rpartition("/")[2])  # noqa: E731
        self._uploads = Uploads(self._transport, received, store.blobs, self._topics, about.layout, seal)
        self._taking: dict[Key, asyncio.Task[None]] = {}  # the last report under way for each order
        self._n_taking: Counter[str] = Counter()  # reports under way, of each device
        self._n_all = 0  # of all devices
        self._judging: dict[Key, PendingReport] = {}
        self._copies: dict[Key, None] = {}  # reports of which a copy came, the latest last
        self._brought: dict[Key, frozenset[BlobRef]] = {}  # their uploads

    async def serve(self) -> None:
        """Serve until cancelled.

        Raises:
            StoreError: the store cannot be written; nothing accepted is lost.
            TransportError: the broker refused us for good.
        """
        await self._subscribe()
        with contextlib.closing(self._uploads):
            await self._run_until_failure()

    async def _subscribe(self) -> None:
        reports = self._topics.make_shared_filter(INTAKES, self._secret, self._topics.make_agent_topic("+", "reports"))
        await self._transport.subscribe(reports, self._make_handler(self._on_report))

    def _on_report(self, device: str, inbound: Inbound) -> None:
        report = decode_message(inbound.payload, Report)
        if report.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {report.device_id}")
        key = device, report.order_id
        if self._record_copy(key):
            report = msgspec.structs.replace(report, again=0)
        judging = self._judging.get(key)
        if judging is not None and judging.report == msgspec.structs.replace(report, again=0):
            judging.copies += 1
            return
        if self._n_all >= MAX_UNDER_WAY or self._n_taking[device] >= MAX_REPORTS:
            return
        self._n_all += 1
        self._n_taking[device] += 1
        work = self._receive_after(self._taking.get(key), report, inbound.topic)
        self._taking[key] = task = self._background.spawn(work)
        task.add_done_callback(lambda task: self._finish_taking(key, task))

    def _record_copy(self, key: Key) -> bool:
        """Record that a copy of a report came; return whether another copy had come before."""
        before = key in self._copies
        self._copies[key] = None
        if len(self._copies) > MAX_HEARD:
            del self._copies[next(iter(self._copies))]
        return before

    def _finish_taking(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._taking[key] is task:
            del self._taking[key]
        self._n_all -= 1
        self._n_taking[key[0]] -= 1
        if not self._n_taking[key[0]]:
            del self._n_taking[key[0]]

    async def _receive_after(self, before: asyncio.Task[None] | None, report: Report, topic: str) -> None:
        """Receive a report after the verdict on the previous report for the same order, which decides the answer."""
        if before is not None:
            await asyncio.wait([before])
        key = report.device_id, report.order_id
        self._judging[key] = judging = PendingReport(msgspec.structs.replace(report, again=0))
        why = ProtocolError("replayed-report", f"{report.order_id} has its verdict")
        try:
            await self._receive(report, judging)
        except ProtocolError as error:
            why = error
            self._refuse(error, report.device_id, topic)
        finally:
            del self._judging[key]
        for _ in range(judging.copies):
            self._refuse(why, report.device_id, topic)

    async def _receive(self, report: Report, judging: PendingReport) -> None:
        """Close the report's order, unless it is closed, and tell the device what the store says.

        Raises:
            ProtocolError: as in `_get_stored_order`.
        """
        try:
            order = self._find_order(report) or await self._get_stored_order(report)
            action = decode_action(order, self._steps)
            if isinstance(action, Unsupported):
                log.error("event=unknown_step order=%s reason=%r", order.id, action.reason)
                judging.copies = 0
                return
            self._find_losses(report)
            report = msgspec.structs.replace(report, again=0)
            judging.fetching = asyncio.current_task()
            error = await self._examine(order, action, report)
            judging.fetching, judging.copies = None, 0
            entry = Entry(order=order, status=OrderStatus.ACCEPTED, report=report)
            if error is not None:
                for ref in self._brought.get((order.device_id, order.id), ()):
                    self._uploads.norms.pop(ref, None)
                entry = Entry(order=order, status=OrderStatus.REJECTED, reason=error)
            await self._close(entry)
        finally:
            self._brought.pop((report.device_id, report.order_id), None)

    def _find_order(self, _report: Report) -> Order | None:
        """Return the order of a report if this process knows it as open; None if the store must decide.

        Raises:
            ProtocolError: `foreign-id`.
        """
        return None

    async def _get_stored_order(self, report: Report) -> Order:
        """Return the order of a report if it is open; otherwise send the device the verdict.

        Raises:
            ProtocolError: `unknown-order`, `foreign-id` or `replayed-report`.
        """
        entry = await asyncio.to_thread(self._store.find_entry, report.order_id)
        if entry is None:
            await self._acknowledge(report.order_id, report.device_id, accepted=False, reason="unknown-order")
            raise ProtocolError("unknown-order", report.order_id)
        require_own(entry.order, report)
        if entry.status is OrderStatus.EXPIRED:
            self._find_losses(report)
        if entry.status is not OrderStatus.OPEN:
            await self._send_verdict(entry)
            raise ProtocolError("replayed-report", f"{report.order_id} is {entry.status}")
        if entry.order.task_fingerprint != self._fingerprint:
            self._fail(ConfigError(GROWN))
            raise ProtocolError("task-behind", GROWN)
        return entry.order

    def _find_losses(self, report: Report) -> None:
        """Report losses if earlier copies of a report came neither to us nor, by the store, to another intake."""
        if report.again >= LOST and time.monotonic() - self._connected_at > QUIET_S:
            self._report_losses(report)

    def _report_losses(self, report: Report) -> None:
        """Log that messages get lost on their way to us."""
        if (untold := self._lines.count_suppressed("reports_lost", time.monotonic())) is not None:
            text = "event=reports_lost device=%s order=%s copies=%d check=%r untold=%d"
            log.error(text, report.device_id, report.order_id, report.again, CHECK_LOST, untold)

    async def _close(self, entry: Entry) -> None:
        """Close an order in the store and send the stored verdict, since another process may have closed it first."""
        order, now = entry.order, time.time()
        if entry.report is not None:
            ours = self._store.accept(entry.report, now)
        elif entry.status is OrderStatus.REJECTED:
            ours = self._store.reject(order.id, entry.reason, now)
        else:
            ours = self._store.expire(order.id, now)
        found: Entry | None = entry
        if not await asyncio.wrap_future(ours):
            found = await asyncio.to_thread(self._store.find_entry, order.id)
        if found is None:  # deleted with its round
            await self._acknowledge(order.id, order.device_id, accepted=False, reason="unknown-order")
            return
        self._handle_closed(found)
        if entry.status is not OrderStatus.EXPIRED:
            await self._send_verdict(found)

    def _handle_closed(self, _entry: Entry) -> None:
        """Handle the end of an order: drop measured norms, since the dispatcher measures them again."""
        self._uploads.norms.clear()  # the dispatcher measures them again

    async def _examine(self, order: Order, action: Action, report: Report) -> str | None:
        """Fetch and check a report's uploads; return why they are not acceptable, or None."""
        try:
            result = read_answer(order, action, report, self.task, self._signed)
            if not isinstance(result, Refusal):
                uploads = action.uploads(result, self._layout)
                self._brought[order.device_id, order.id] = frozenset(uploads)
                for ref, layout in uploads.items():
                    await self._uploads.fetch(ref, order.device_id, layout, wanted=lambda: self._is_open(order.id))
        except ProtocolError as refusal:
            self._refuse(refusal, order.device_id, self._topics.make_agent_topic(order.device_id, "reports"))
            if refusal.name not in NO_EVIDENCE:
                await self._store_offence(order.device_id, order.round, refusal.name, str(refusal))
            return str(refusal)
        except TransportError as refusal:
            return f"the broker does not let us fetch it: {refusal}"
        if not self._admits(order.device_id):
            return f"revoked: {order.device_id} does not belong to the federation any more"
        return None

    def _is_open(self, order_id: str) -> bool:
        entry = self._store.find_entry(order_id)
        return entry is not None and entry.status is OrderStatus.OPEN

    def _cancel_fetch(self, order: Order) -> None:
        """Stop fetching the uploads of an order that is closed."""
        judging = self._judging.get((order.device_id, order.id))
        if judging is not None and judging.fetching is not None:
            judging.fetching.cancel()

    async def _store_offence(self, device_id: str, number: int, name: str, detail: str) -> bool:
        """Store evidence against a device, which counts from the next round on; False if it is already known."""
        offence = Offence(device_id=device_id, round=number, name=name, detail=detail)
        return await asyncio.wrap_future(self._store.record_offence(offence))

    async def _send_verdict(self, entry: Entry) -> None:
        """Send the verdict on a report."""
        accepted = entry.status is OrderStatus.ACCEPTED
        await self._acknowledge(entry.order.id, entry.order.device_id, accepted=accepted, reason=entry.reason)

    async def _acknowledge(self, order_id: str, device_id: str, *, accepted: bool, reason: str) -> None:
        ack = Ack(order_id=order_id, device_id=device_id, accepted=accepted, reason=reason[:1000])
        topic = self._topics.make_agent_topic(device_id, "acks")
        await self._publish(topic, self._seal(topic, encode_message(ack), device_id), expires_in_s=ACK_S)

    async def _publish(self, topic: str, payload: bytes, **how: Any) -> None:
        try:
            await self._transport.publish(topic, payload, **how)
        except TransportError as error:  # only this topic is affected; what matters is repeated
            log.error("event=publish_refused topic=%s reason=%r", topic, str(error))  # noqa: TRY400 - the text is all


def require_own(order: Order, report: Report) -> None:
    """Refuse another device's report.

    Raises:
        ProtocolError: `foreign-id`.
    """
    if order.device_id != report.device_id:
        raise ProtocolError("foreign-id", f"{report.device_id} reports an order of {order.device_id}")
