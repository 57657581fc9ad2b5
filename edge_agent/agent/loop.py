"""The agent on a device: one asyncio loop that carries out what `edge_agent.agent.session` decides.

The loop handles everything that must not wait (keep-alive, orders, acknowledgements, serving chunks); one worker thread
waits for the work (`edge_agent.agent.carrier`), so that a busy device never looks dead to its broker. `fedge agent`
does the work in a separate process (`edge_agent.agent.workplace`), so an idle agent stays small.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from msgspec.structs import replace

from edge_agent.agent import session
from edge_agent.agent.carrier import Carrier, OrderExecutor, may_still_leave
from edge_agent.agent.context import Limits, measure_context
from edge_agent.agent.events import Events, Observe, get_order_fields, ignore_event
from edge_agent.agent.identity import CountedSamples, Identity, Member, SampleCounts, make_status
from edge_agent.agent.models import Models, collect_model_digests
from edge_agent.agent.outbox import Outbox
from edge_agent.agent.speech.ears import Listener
from edge_agent.agent.speech.voice import Publisher
from edge_agent.agent.uptime import get_uptime_s
from edge_agent.device.own_task import explain_other_task
from fedge.data.classes import AddedClasses
from fedge.errors import StoreError
from fedge.identity.names import Role, Subject
from fedge.membership.renewal import Renewal
from fedge.membership.signed_messages import make_speaker
from fedge.privacy.egress import Door, Rules
from fedge.steps.contract import Action, Unsupported, decode_action
from fedge.system.background import Background, run_in_daemon
from fedge.system.files import BlobFolder, find_highest_release
from fedge.system.logs import bind_temporarily
from fedge.system.systemd import notify_ready
from fedge.wire.connection.broker import BrokerSettings, Will
from fedge.wire.messages import Beacon, Context, Order, Presence, Status, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import SHORT_SESSION_S, Transport

log = logging.getLogger("fedge.agent")

WILL_DELAY_S: Final = 10
"""Time within which a device can return and not count as gone, since Wi-Fi roaming takes a few seconds."""

LOOK_SHARE: Final = 20.0
"""Pause between two looks at the samples, in times that the last one took."""

GOODBYE_S: Final = 5.0
"""Time limit for a stopping agent to announce that it sleeps; after that, its last will says that it is gone."""

UNANSWERED: Final = 5
"""Number of times a report is sent, in about a minute, before the log says that nobody answers it."""
CHECK_UNANSWERED: Final = (
    "the broker takes this report and nobody answers it: the coordinator is not running, refuses what this device says "
    "(its log says so), or messages get lost on their way (the broker's own log)"
)

CHECK_RUN: Final = (
    "the coordinator has begun anew with another home, or another coordinator speaks for this federation; this device "
    "works for it, and gets its bundles, from now on"
)

CHECK_TASK: Final = (
    "another task is another federation, and this device gets no orders of this one: start its agent with the "
    "task.json of the coordinator's home, or with another --federation"
)
MAX_WORDS: Final = 1000
"""Longest text in a status."""


@dataclass(eq=False)
class Agent:
    """The agent of one device in one federation; `run` lasts until `stop`.

    Args:
        identity: who the device is.
        broker: how to reach the broker.
        home: durable folder with `outbox` and `models` (received); the worker has its own files beside them.
        make_worker: called once, in the worker thread, when the first order needs a worker.
        limits: limits beyond which the device declines orders.
        context_interval_s: how often the device reports its context.
        rules: what may leave, by the device's owner.
        observe: called with every event and its fields, on the event loop.
        samples: the device's samples if they may change while the agent runs, which then closes them.
        adopt: called with the federation's classes if its task is another one; returns whether the device's is that one
            now. Then `run` returns, and another agent goes on with the new task.

    Attributes:
        is_outdated: whether `run` has returned because another agent must go on.
    """

    identity: Identity
    broker: BrokerSettings
    home: Path
    make_worker: Callable[[], OrderExecutor]
    _: KW_ONLY
    limits: Limits = Limits()
    context_interval_s: float = 10.0
    rules: Rules = Rules()
    observe: Observe = ignore_event
    samples: CountedSamples | None = None
    adopt: Callable[[AddedClasses], bool] | None = None

    def __post_init__(self) -> None:
        self._events = Events(self.identity.device_id, self.observe)
        self._topics = Topics(self.identity.federation)
        self._incarnation = uuid.uuid4().hex
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._background = Background(self._fail)
        self._run = ""  # run of the last order
        self.is_outdated = False
        self._other_task = ""  # in which way the federation's task is another one
        self._release = 0  # release in the last status sent
        self._told = self._counts  # of samples, in the last status sent
        self._end: asyncio.Future[None] | None = None
        self._connecting: asyncio.Task[Any] | None = None  # set in `run` until a broker lets us in

    @property
    def refused(self) -> Counter[str]:
        """Messages that violated the contract, by the rule that they violated."""
        return self._events.refused

    def publish_status(self) -> None:
        """Publish the status again, since something in it has changed."""
        if self._end is not None and self._transport.connected:
            self._voice.send(self._make_status(Presence.ONLINE))

    # ------------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Take part until `stop` is called.

        Raises:
            ConfigError: another agent uses the folder, or the certificate is not this device's.
            StoreError: durable state cannot be written; nothing accepted is lost.
            TransportError: the broker refused us for good.
        """
        self._end = asyncio.get_running_loop().create_future()
        with (
            Outbox(self.home / "outbox") as self._outbox,
            closing(Door(self.rules, self.home, self._topics, self._find_action)) as door,
            ThreadPoolExecutor(1, "worker") as pool,
        ):
            orders = {order.id: order for order in self._outbox.load_orders()}
            self._run = _find_last_run([*(verdict.order_id for verdict in self._outbox.verdicts), *orders])
            self._session = session.Session(
                self.identity.device_id,
                orders=orders.values(),
                reports=[
                    report
                    for report in self._outbox.load_reports()
                    if may_still_leave(report, orders[report.order_id], self.identity.steps, self.rules)
                ],
                acked=[verdict.order_id for verdict in self._outbox.verdicts],
                now=get_uptime_s(),
            )
            self._transport = await self._make_transport(door, pool)
            self._connecting = asyncio.current_task()
            try:
                async with self._transport, self._sender:
                    self._connecting = None
                    await self._serve()
            except asyncio.CancelledError:
                if self._connecting is None or not self._end.done():  # not by `stop`
                    raise
                self._connecting.uncancel()
            finally:
                self._stop_all()

    def stop(self) -> None:
        """Make `run` return soon: training stops between two batches, and the agent announces sleep."""
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
            if self._connecting is not None:  # not connected yet, so no goodbye
                self._connecting.cancel()

    async def _make_transport(self, door: Door, pool: Executor) -> Transport:
        """Make the transport with its initial subscriptions, and the objects that speak, hear and work over it."""
        name, topics = self.identity.device_id, self._topics
        role = Role.DEVICE if self.identity.site is None else Role.RELAY
        self._signed = make_speaker(self.broker, Subject(self.identity.federation, role, name), self.home)
        me = Member(self.identity, topics, self._signed, self.rules, self._events)
        status = me.make_topic("status")
        last_words = self._signed.seal(status, encode_message(self._make_status(Presence.OFFLINE)), will=True)
        will = Will(status, last_words, delay_s=WILL_DELAY_S)
        client = topics.make_client_id(
            "agent", f"{name}:{token_hex(8)}"
        )  # no other client, nor a copy of this card, can disconnect it
        transport = Transport(self.broker, client, will=will, session_expiry_s=SHORT_SESSION_S, door=door)
        # Not durable: a model can be fetched again.
        folder = BlobFolder(self.home / "models")
        self._receiver = Receiver(transport, folder, durable=False, seal=self._signed.seal)
        self._models = Models(folder, self._receiver, me)
        self._sender = Sender(transport, self._outbox.find_blob)
        self._voice = Publisher(me, transport, partial(self._run_timed, self._resume_speaking))
        ears = Listener(
            *(me, self._incarnation, self._voice, self._sender, self._handle_event),
            *(self._resume_speaking, self._handle_beacon),
        )
        work = self.home, self.make_worker, self.limits, self._measure_context
        self._carrier = Carrier(me, *work, self._models, self._outbox, pool)
        await ears.attach(transport)
        await self._signed.follow_revocations(transport, topics)
        transport.on_connect(self._on_connect)
        await Renewal(transport, topics, name).attach()
        return transport

    async def _serve(self) -> None:
        """Work until the end, then say goodbye. The end is an exception if a background task failed."""
        assert self._end is not None
        self._background.spawn(self._voice.publish_queued(self._awaits_answer))
        self._background.spawn(self._publish_context())
        if self.samples is not None:
            self._background.spawn(self._watch_samples(self.samples))
        await self._end
        self._events.log_event("stopping", logging.DEBUG)
        self._handle_event(session.LocalEvent.CLOSING)
        if self._work is not None:
            await self._work
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                status = self._topics.make_agent_topic(self.identity.device_id, "status")
                good_bye = self._signed.seal(status, encode_message(self._make_status(Presence.SLEEPING)))
                await self._transport.publish(status, good_bye, retain=True)
        self._events.log_event("sleeping", logging.DEBUG)

    def _stop_all(self) -> None:
        """Stop everything, however `run` ends."""
        self._carrier.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._voice.resume()
        self._background.cancel()
        if self.samples is not None:
            self.samples.close()

    def _fail(self, error: BaseException) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)

    # ------------------------------------------------------------------------------------------------- speaking

    def _resume_speaking(self) -> None:
        """Speak as this device, with numbers above those of whoever did so meanwhile."""
        self._voice.resume()
        try:
            self._signed.start_new_life()
        except StoreError as error:  # the present life goes on
            self._events.log_event("life_not_stored", logging.WARNING, detail=str(error))
        self._voice.send(self._make_status(Presence.ONLINE))
        self._voice.send(self._measure_context())
        self._handle_event(session.LocalEvent.CONNECTED)

    async def _on_connect(self) -> None:
        where = f"{self.broker.host}:{self.broker.port}"
        notify_ready()
        self._events.log_event("online", logging.DEBUG, broker=where, protocol=self._transport.protocol)
        self._resume_speaking()

    def _handle_beacon(self, beacon: Beacon) -> None:
        """Compare the federation's task with ours: take up classes that have joined, or say what differs."""
        task, other = self.identity.task, ""
        if beacon.classes is not None and beacon.classes.fingerprint != task.compute_fingerprint():
            try:
                self.is_outdated = self.adopt is not None and self.adopt(beacon.classes)
            except StoreError as error:
                self._fail(error)
                return
            if self.is_outdated:
                self._events.log_event("classes_joined", classes=", ".join(beacon.classes.names))
                self.stop()
                return
            other = explain_other_task(task, beacon.task)
        if other != self._other_task:
            self._other_task = other
            if other:
                self._events.log_event("other_task", logging.WARNING, reason=other, check=CHECK_TASK)
            self.publish_status()

    # ------------------------------------------------------------------------------------------------- deciding

    def _handle_event(self, event: session.Event) -> None:
        """Let the session decide, and carry out its actions in order."""
        try:
            for action in self._session.handle(event, get_uptime_s()):
                self._perform(action)
        finally:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakeup = self._session.find_next_wakeup()
        if wakeup is not None:
            # At least a moment ahead: the loop's clock and ours differ slightly. At most LAST_RESEND_S: the loop's
            # clock stands still while the machine is suspended.
            delay_s = min(max(wakeup - get_uptime_s(), 0.01), session.LAST_RESEND_S)
            tick = partial(self._handle_event, session.LocalEvent.TICK)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._run_timed, tick)

    def _run_timed(self, work: Callable[[], None]) -> None:
        """Do the work of a timer, and fail if the disk is full or broken, since nobody else would notice."""
        try:
            work()
        except StoreError as error:
            self._fail(error)

    def _perform(self, action: session.Action) -> None:
        match action:
            case session.SaveOrder(order):
                self._outbox.save_order(order)
                self._record_run(order)
                self._events.log_event(
                    "order_received", logging.DEBUG, **get_order_fields(order), left_s=round(order.left_s, 1)
                )
            case session.Run(order):
                self._carrier.resume()
                self._work = self._background.spawn(self._run_order(order))
            case session.Stop(order_id):
                self._events.log_event("order_stopping", logging.DEBUG, order=order_id)
                self._carrier.stop()
            case session.SaveReport(report):
                self._outbox.save_report(report)
                self._events.log_event(
                    "order_done", order=report.order_id, result=str(report.outcome), seconds=round(report.seconds, 3)
                )
                self._voice.send(self._measure_context())
            case session.Publish(report):
                again = self._voice.count_sent(report.order_id)
                if again == UNANSWERED and self._transport.connected:
                    self._events.log_event("unanswered", logging.WARNING, order=report.order_id, check=CHECK_UNANSWERED)
                self._voice.send(replace(report, again=again))
                if find_highest_release(self.home) != self._release:  # after the report, or the order would come again
                    self._voice.send(self._make_status(Presence.ONLINE))
            case session.Acknowledge(ack):
                self._voice.drop_report(ack.order_id)
                self._outbox.acknowledge(ack, remember=session.MAX_ACKED)
                level = logging.DEBUG if ack.accepted else logging.WARNING
                self._events.log_event(
                    "report_acked", level, order=ack.order_id, accepted=ack.accepted, reason=ack.reason
                )
            case session.RemoveOrder(order_id, reason):
                self._voice.drop_report(order_id)
                self._outbox.remove_order(order_id)
                self._events.log_event("order_discarded", logging.WARNING, order=order_id, reason=reason)

    def _record_run(self, order: Order) -> None:
        """Warn the owner if another run gives the orders, since bundles come from that run from now on."""
        if self._run not in {order.run, ""}:
            self._events.log_event("other_run", logging.WARNING, run=order.run, before=self._run, check=CHECK_RUN)
        self._run = order.run

    # ------------------------------------------------------------------------------------------------- working

    async def _run_order(self, order: Order) -> None:
        """Do one order, and let the session decide about its report."""
        with bind_temporarily(**get_order_fields(order)):
            report = await self._carrier.run_order(order)
            self._models.remove_unneeded(collect_model_digests(self._session.orders, self.identity.steps))
            self._handle_event(report or session.LocalEvent.STOPPED)

    def _find_action(self, order_id: str) -> Action | None:
        """Return the action of an open order, or None if this device does not know its step."""
        for order in self._session.orders:
            if order.id == order_id:
                action = decode_action(order, self.identity.steps)
                return None if isinstance(action, Unsupported) else action
        return None

    # ------------------------------------------------------------------------------------------------- outwards

    def _make_status(self, presence: Presence) -> Status:
        self._release, self._told = find_highest_release(self.home), self._counts
        status = make_status(
            self.identity, presence, self._told, incarnation=self._incarnation, release=self._release, rules=self.rules
        )
        return replace(status, other_task=self._other_task[:MAX_WORDS])

    @property
    def _counts(self) -> SampleCounts:
        return SampleCounts(self.identity.n_shared) if self.samples is None else self.samples.counts

    def _measure_context(self) -> Context:
        return measure_context(self.identity.device_id, self._counts.n_shared, self.home, self._receiver.mbit_s)

    def _awaits_answer(self, order_id: str) -> bool:
        """Return whether the report of an order is to be repeated."""
        return self._session.get_phase(order_id) is session.Phase.REPORTED

    async def _publish_context(self) -> None:
        while True:
            await asyncio.sleep(self.context_interval_s)
            if self._transport.connected:
                self._voice.send(self._measure_context())

    async def _watch_samples(self, samples: CountedSamples) -> None:
        """Look after the samples, and publish their counts when they change; a long look makes a longer pause."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(self.context_interval_s, LOOK_SHARE * took_s))
            began = time.monotonic()
            await run_in_daemon(samples.refresh)
            took_s = time.monotonic() - began
            if samples.counts != self._told and self._transport.connected:
                self._voice.send(self._make_status(Presence.ONLINE))


def _find_last_run(order_ids: Sequence[str]) -> str:
    """Return the run of the last of these orders, or "" if there is none."""
    return order_ids[-1].partition(".")[0].partition("-")[0] if order_ids else ""
