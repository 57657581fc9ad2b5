"""Processes of a coordinator at the broker: what all have in common, intakes, and model servers.

`fedge coordinator` can do everything alone. Each helper joins a shared subscription: the broker hands every report, or
every Want, to one of its members. The dispatcher (`coordinator.fleet.mqtt`) is an intake, too. All of them share the
store and the blob folder, and may be killed at any time: a device repeats its report until it is acknowledged, and an
order is closed only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.fleet.mqtt.uploads import NO_EVIDENCE, Uploads, answer_to
from coordinator.provision.members import Watched
from coordinator.store.records import Offence, OrderStatus
from coordinator.store.store import OFFERED, Entry, Store
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError, TransportError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Plain, Signed, speaker
from fedge.steps.contract import Action, Refusal, Unsupported, installed_steps, read_action
from fedge.system.background import Background
from fedge.system.files import BlobFolder, InUseError, locked
from fedge.system.logs import Lines
from fedge.tensors.layout import Layout
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import Ack, BlobRef, Order, Report, Status, Want, decode, encode
from fedge.wire.topics import INTAKES, MODELS, Topics
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")

ACK_S: Final = 3600
"""How long the broker keeps a verdict for a device that is away."""
MAX_UNDER_WAY: Final = 16_384
"""Most reports under check and messages waiting for the broker. Further ones are dropped; their senders repeat them."""
MAX_REPORTS: Final = 16
"""Reports of one device under way: an agent holds no more orders."""
LOOK_S: Final = 3.0
"""Pause between two checks of who belongs to the federation: a revoked device is refused from the next one on."""
LOOK_AGAIN_S: Final = 0.02
"""Shortest pause between two reads of which models are offered."""
CHECK_LOST: Final = (
    "the broker took earlier copies of this report and gave them to none of our processes: look in its log for limits "
    "that it reached, and at what else is subscribed to the federation's topics"
)
SAYS_NOTHING: Final = frozenset({"replayed-report", "unknown-order"})
"""Refusals of repeated messages, which are not the device's fault."""

MAX_HEARD: Final = 16_384
"""Latest reports of which we remember that a copy came: what we ourselves did not take is no loss of the broker's."""
LOST: Final = 3
"""A report that comes for the first time after the broker took it so often before: some of its copies were lost."""
QUIET_S: Final = 60.0
"""A process that was connected for less time may have missed them itself."""

Key = tuple[str, str]
"""Device and order."""


@dataclasses.dataclass(slots=True)
class Judging:
    """The report for an order that is being looked at. `fetching`: the task, while its uploads are fetched.

    `copies`: of the same report, which have come since; they say nothing new while its uploads are fetched.
    """

    report: Report
    fetching: asyncio.Task[None] | None = None
    copies: int = 0


def signing(broker: BrokerSettings, federation: str, home: Path, role: Role) -> tuple[Plain | Signed, Watched | None]:
    """Our identity and, if messages are signed, the federation's members.

    Raises:
        ConfigError: the certificate is not of this role in this federation, or there is no list of members.
    """
    signed = speaker(broker, Subject(federation, role, role), home)
    if isinstance(signed, Plain):
        return signed, None
    assert broker.ca_file is not None
    members = Watched(Path(broker.ca_file).parent, federation)
    signed.admit = members.admit
    return signed, members


class Process:
    """A connection to the broker, with the checks of who may send what.

    Args:
        broker: how to reach it.
        store: of the federation.
        federation: its name.
        home: exclusive folder of this process.
        role: a helper's, or the coordinator's.
    """

    def __init__(
        self, broker: BrokerSettings, store: Store, federation: str, home: Path, role: Role = Role.INTAKE
    ) -> None:
        self._store = store
        self._topics = Topics(federation)
        self._signed, self._members = signing(broker, federation, home, role)
        self._secret = store.at_broker()
        if role is Role.COORDINATOR:
            gone = Will(self._topics.claims, b"", delay_s=0)
            ours = hashlib.sha256(f"client {self._secret}".encode()).hexdigest()[:32]  # ids are logged; groups are not
            self._transport = Transport(broker, self._topics.client_id("coordinator", ours), will=gone)
        else:  # without a session: the broker would keep a killed helper's messages for an hour
            name = self._topics.client_id("intake", uuid.uuid4().hex)
            self._transport = Transport(broker, name, session_expiry_s=0)
        self._incarnations: dict[str, str] = {}
        self._lines = Lines()
        self._connected_at = math.inf
        self._transport.on_connect(self._note_connection)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = Background(self._fail)

    async def _note_connection(self) -> None:
        self._connected_at = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _until_failure(self) -> None:
        """Work until something fails for good."""
        if isinstance(self._signed, Signed):
            await self._transport.subscribe(self._topics.agent("+", "status"), self._guard(self._on_status))
        async with self._transport:
            self._background.spawn(self._watch_members())
            try:
                await self._failure
            finally:
                self._background.cancel()

    async def _watch_members(self) -> None:
        """Check the list of members, if there is one."""
        while self._members is not None and isinstance(self._signed, Signed):
            await asyncio.sleep(LOOK_S)
            if self._members.look(self._signed.authority):
                await self._members_changed()

    async def _members_changed(self) -> None:
        """Act upon a changed list."""

    def _admits(self, device: str) -> bool:
        """Whether it belongs to the federation, as a device or a relay."""
        return self._members is None or any(self._members.admits(device, r) for r in (Role.DEVICE, Role.RELAY))

    def _guard(self, handle: Callable[[str, Inbound], None]) -> Callable[[Inbound], Awaitable[None]]:
        """Drop messages that violate the contract: one line, one count, no change."""

        async def guarded(inbound: Inbound) -> None:
            device = self._topics.parts(inbound.topic)[1]
            if not inbound.payload:  # a cleared retained message
                return
            try:
                payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
                handle(device, dataclasses.replace(inbound, payload=payload))
                self._heard(device, inbound)
            except ProtocolError as error:
                self._refuse(self._explained(error, device, inbound), device, inbound.topic)

        return guarded

    def _heard(self, device: str, inbound: Inbound) -> None:
        """Note a valid message."""

    def _explained(self, error: ProtocolError, _device: str, _inbound: Inbound) -> ProtocolError:
        """The error to report for an invalid message."""
        return error

    def _refuse(self, error: ProtocolError, device: str, topic: str) -> None:
        level = logging.INFO if error.name in SAYS_NOTHING else logging.WARNING
        if (untold := self._lines.untold(error.name, time.monotonic())) is not None:
            text = "event=refused name=%s device=%s topic=%s detail=%r untold=%d"
            log.log(level, text, error.name, device, topic, str(error), untold)

    def _on_status(self, device: str, inbound: Inbound) -> None:
        self._incarnations[device] = decode(inbound.payload, Status).incarnation

    def _incarnation(self, device: str) -> str:
        """Of the device's agent; empty: not known yet."""
        return self._incarnations.get(device, "")

    def _seal(self, topic: str, payload: bytes, device: str) -> bytes:
        """Sign for the agent's present incarnation; a restarted one gets the next message."""
        return self._signed.seal(topic, payload, to=self._incarnation(device))


class Intake(Process):
    """Fetches, checks, accepts and acknowledges reports.

    Args:
        broker: how to reach the broker.
        store: of the federation.
        home: exclusive folder of this process, on the same disk as the blob folder.
        federation: its name.
        task: what is learned.
        layout: of the model.
        steps: of the method, in addition to the installed ones.
        role: as of `Process`.
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
        steps: Iterable[type[Action]] = (),
        role: Role = Role.INTAKE,
    ) -> None:
        super().__init__(broker, store, federation, home, role)
        self.task, self._layout = task, layout
        self._steps = {**installed_steps(), **{kind.STEP: kind for kind in steps}}
        received = store.blobs.received() if role is Role.COORDINATOR else BlobFolder(home / "received")
        seal = lambda topic, payload: self._seal(topic, payload, topic.rpartition("/")[2])  # noqa: E731
        self._uploads = Uploads(self._transport, received, store.blobs, self._topics, layout, seal)
        self._taking: dict[Key, asyncio.Task[None]] = {}  # the last report under way for each order
        self._n_taking: Counter[str] = Counter()  # reports under way, of each device
        self._n_all = 0  # of all devices
        self._judging: dict[Key, Judging] = {}
        self._copies: dict[Key, None] = {}  # reports of which a copy came, the latest last
        self._brought: dict[Key, frozenset[BlobRef]] = {}  # their uploads

    async def serve(self) -> None:
        """Work until cancelled.

        Raises:
            StoreError: the store cannot be written; nothing accepted is lost.
            TransportError: the broker refused us for good.
        """
        await self._listen()
        with contextlib.closing(self._uploads):
            await self._until_failure()

    async def _listen(self) -> None:
        reports = self._topics.shared(INTAKES, self._secret, self._topics.agent("+", "reports"))
        await self._transport.subscribe(reports, self._guard(self._on_report))

    def _on_report(self, device: str, inbound: Inbound) -> None:
        report = decode(inbound.payload, Report)
        if report.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {report.device_id}")
        key = device, report.order_id
        if self._hear(key):
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
        task.add_done_callback(lambda task: self._taken(key, task))

    def _hear(self, key: Key) -> bool:
        """Remember that a copy of a report came; whether one had come before."""
        before = key in self._copies
        self._copies[key] = None
        if len(self._copies) > MAX_HEARD:
            del self._copies[next(iter(self._copies))]
        return before

    def _taken(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._taking[key] is task:
            del self._taking[key]
        self._n_all -= 1
        self._n_taking[key[0]] -= 1
        if not self._n_taking[key[0]]:
            del self._n_taking[key[0]]

    async def _receive_after(self, before: asyncio.Task[None] | None, report: Report, topic: str) -> None:
        """Let the report before it for the same order have its verdict first: that decides what is said to this one."""
        if before is not None:
            await asyncio.wait([before])
        key = report.device_id, report.order_id
        self._judging[key] = judging = Judging(msgspec.structs.replace(report, again=0))
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

    async def _receive(self, report: Report, judging: Judging) -> None:
        """Close the report's order, unless it is closed, and tell the device what the store says.

        Raises:
            ProtocolError: as `_stored`.
        """
        try:
            order = self._order(report) or await self._stored(report)
            action = read_action(order, self._steps)
            if isinstance(action, Unsupported):
                log.error("event=unknown_step order=%s reason=%r", order.id, action.reason)
                judging.copies = 0
                return
            self._look_for_losses(report)
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

    def _order(self, _report: Report) -> Order | None:
        """The order of a report, if this process knows it as open; None: the store decides.

        Raises:
            ProtocolError: `foreign-id`.
        """
        return None

    async def _stored(self, report: Report) -> Order:
        """The order of a report, if it is open. Otherwise the device is told the verdict.

        Raises:
            ProtocolError: `unknown-order`, `foreign-id` or `replayed-report`.
        """
        entry = await asyncio.to_thread(self._store.entry, report.order_id)
        if entry is None:
            await self._acknowledge(report.order_id, report.device_id, accepted=False, reason="unknown-order")
            raise ProtocolError("unknown-order", report.order_id)
        require_own(entry.order, report)
        if entry.status is OrderStatus.EXPIRED:
            self._look_for_losses(report)
        if entry.status is not OrderStatus.OPEN:
            await self._tell(entry)
            raise ProtocolError("replayed-report", f"{report.order_id} is {entry.status}")
        return entry.order

    def _look_for_losses(self, report: Report) -> None:
        """Notice that earlier copies of a report have not come to us nor, by the store, to another intake."""
        if report.again >= LOST and time.monotonic() - self._connected_at > QUIET_S:
            self._lost(report)

    def _lost(self, report: Report) -> None:
        """Say that messages get lost on their way to us."""
        if (untold := self._lines.untold("reports_lost", time.monotonic())) is not None:
            text = "event=reports_lost device=%s order=%s copies=%d check=%r untold=%d"
            log.error(text, report.device_id, report.order_id, report.again, CHECK_LOST, untold)

    async def _close(self, entry: Entry) -> None:
        """Close an order in the store and send the device the stored verdict: another process may have been first."""
        order, now = entry.order, time.time()
        if entry.report is not None:
            ours = self._store.accept(entry.report, now)
        elif entry.status is OrderStatus.REJECTED:
            ours = self._store.reject(order.id, entry.reason, now)
        else:
            ours = self._store.expire(order.id, now)
        found: Entry | None = entry
        if not await asyncio.wrap_future(ours):
            found = await asyncio.to_thread(self._store.entry, order.id)
        if found is None:  # deleted with its round
            await self._acknowledge(order.id, order.device_id, accepted=False, reason="unknown-order")
            return
        self._closed(found)
        if entry.status is not OrderStatus.EXPIRED:
            await self._tell(found)

    def _closed(self, _entry: Entry) -> None:
        """Note that an order is closed."""
        self._uploads.norms.clear()  # the dispatcher measures them again

    async def _examine(self, order: Order, action: Action, report: Report) -> str | None:
        """Fetch and check a report's uploads; returns why they are not acceptable, or None."""
        try:
            result = answer_to(order, action, report, self.task, self._signed)
            if not isinstance(result, Refusal):
                uploads = action.uploads(result, self._layout)
                self._brought[order.device_id, order.id] = frozenset(uploads)
                for ref, layout in uploads.items():
                    await self._uploads.fetch(ref, order.device_id, layout, wanted=lambda: self._is_open(order.id))
        except ProtocolError as refusal:
            self._refuse(refusal, order.device_id, self._topics.agent(order.device_id, "reports"))
            if refusal.name not in NO_EVIDENCE:
                await self._accuse(order.device_id, order.round, refusal.name, str(refusal))
            return str(refusal)
        except TransportError as refusal:
            return f"the broker does not let us fetch it: {refusal}"
        if not self._admits(order.device_id):
            return f"revoked: {order.device_id} does not belong to the federation any more"
        return None

    def _is_open(self, order_id: str) -> bool:
        entry = self._store.entry(order_id)
        return entry is not None and entry.status is OrderStatus.OPEN

    def _give_up(self, order: Order) -> None:
        """Stop fetching the uploads of an order that is closed."""
        judging = self._judging.get((order.device_id, order.id))
        if judging is not None and judging.fetching is not None:
            judging.fetching.cancel()

    async def _accuse(self, device_id: str, number: int, name: str, detail: str) -> bool:
        """Store evidence against a device, which counts from the next round on; False: that round already has it."""
        offence = Offence(device_id=device_id, round=number, name=name, detail=detail)
        return await asyncio.wrap_future(self._store.accuse(offence))

    async def _tell(self, entry: Entry) -> None:
        """Send the verdict on a report."""
        accepted = entry.status is OrderStatus.ACCEPTED
        await self._acknowledge(entry.order.id, entry.order.device_id, accepted=accepted, reason=entry.reason)

    async def _acknowledge(self, order_id: str, device_id: str, *, accepted: bool, reason: str) -> None:
        ack = Ack(order_id=order_id, device_id=device_id, accepted=accepted, reason=reason[:1000])
        topic = self._topics.agent(device_id, "acks")
        await self._publish(topic, self._seal(topic, encode(ack), device_id), expires_in_s=ACK_S)

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


class BlobServer(Process):
    """Serves the models named in open orders to devices."""

    def __init__(self, broker: BrokerSettings, store: Store, home: Path, *, federation: str) -> None:
        super().__init__(broker, store, federation, home)
        self._offered: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._sender = Sender(self._transport, self._source)

    async def serve(self) -> None:
        """Work until cancelled; raises as `Intake.serve`."""
        wants = self._topics.shared(MODELS, self._secret, self._topics.agent("+", "wants"))
        await self._transport.subscribe(wants, self._guard(self._on_want))
        async with self._sender:
            await self._until_failure()

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._background.spawn(self._answer(device, inbound))

    async def _answer(self, device: str, inbound: Inbound) -> None:
        try:
            await asyncio.to_thread(self._bring, decode(inbound.payload, Want).digest)
            self._sender.want_of(device, inbound.payload, self._topics)
        except ProtocolError as error:
            self._refuse(error, device, inbound.topic)

    def _bring(self, digest: str) -> None:
        """Fetch a model if it is offered."""
        if digest not in self._offered and time.monotonic() - self._looked_at > LOOK_AGAIN_S:
            self._looked_at = time.monotonic()
            self._offered = frozenset(json.loads(self._store.recall(OFFERED) or "[]"))
            self._store.blobs.let_go(self._offered)
        if digest in self._offered:
            self._store.blobs.bring(digest)

    def _source(self, digest: str) -> Path | None:
        """Devices get only what orders name, since the updates of others are in the same folder."""
        return self._store.blobs.path(digest) if digest in self._offered and digest in self._store.blobs else None


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
