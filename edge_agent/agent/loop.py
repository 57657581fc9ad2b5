"""The agent on a device: one asyncio loop that carries out what `edge_agent.agent.session` decides.

The loop handles everything that must not wait (keep-alive, orders, acknowledgements, serving chunks); one worker thread
waits for the work, so that a busy device never looks dead to its broker. `fedge agent` does the work in a separate
process (`edge_agent.agent.workplace`), so an idle agent stays small.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import random
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol

from msgspec.structs import replace

import fedge
from edge_agent.agent import context, session
from edge_agent.agent.outbox import Outbox
from edge_agent.agent.uptime import uptime_s
from edge_agent.device.device import CACHED_MODELS, failed
from edge_agent.device.worker import Finished
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError, StoreError, TransportError
from fedge.identity.names import Role, Subject
from fedge.membership.renewal import Renewal
from fedge.membership.signed_messages import speaker, unsealed
from fedge.privacy.egress import Door, Rules, WithheldError
from fedge.steps.contract import (
    Action,
    Declined,
    Failed,
    Refusal,
    Result,
    Steps,
    Unsupported,
    installed_steps,
    read_action,
    read_result,
    report_of,
)
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares
from fedge.system.background import Background
from fedge.system.files import BlobFolder, highest_release, volatile
from fedge.system.logs import Lines, bound, note
from fedge.system.systemd import ready
from fedge.system.text import in_words
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import (
    Ack,
    BlobRef,
    Capabilities,
    Context,
    Order,
    Outcome,
    Presence,
    Report,
    SiteDevice,
    Status,
    Want,
    Why,
    blobs_of,
    decode,
    encode,
    shared_bases,
    way_to,
)
from fedge.wire.topics import Topics
from fedge.wire.transfer import Receiver, Sender
from fedge.wire.transport import SHORT_SESSION_S, Transport

log = logging.getLogger("fedge.agent")

WILL_DELAY_S: Final = 10
"""A device that returns within 10 s does not count as gone: Wi-Fi roaming takes a few seconds."""

GOODBYE_S: Final = 5.0
"""Time limit for a stopping agent to announce that it sleeps; after that, its last will says that it is gone."""


FETCH_PATIENCE_S: Final = 120.0
"""An order whose models do not arrive, although the broker is there, fails after this time and makes way for the next:
its sender may be gone, or may never have existed. A restarted coordinator is back sooner."""

UNANSWERED: Final = 5
"""After a report was sent so often, a minute after it was made, the log says that nobody answers it."""
CHECK_UNANSWERED: Final = (
    "the broker takes this report and nobody answers it: the coordinator is not running, refuses what this device says "
    "(its log says so), or messages get lost on their way (the broker's own log)"
)

YIELD_BASE_S: Final = 30.0
YIELD_CAP_S: Final = 600.0
"""Of two processes that speak as one device, each is silent for 15 to 30 s when it hears the other, twice as long each
time, at last 5 to 10 min: meanwhile the other one can work."""
CHECK_RUN: Final = (
    "the coordinator has begun anew with another home, or another coordinator speaks for this federation; this device "
    "works for it, and gets its bundles, from now on"
)
CHECK_TWIN: Final = (
    "another process speaks as this device: a second one of this --id, a copy of its card or container, or a stolen "
    "identity (fedge provision revoke). End one of the two; until then they take turns"
)

SPARE_DISK_BYTES: Final = 64 << 20
"""What an order must leave free, of a small disk a twentieth: for its result, a bundle, the log and everybody else."""


class Works(Protocol):
    """Carries out orders: `edge_agent.agent.workplace.Workplace`, or a stand-in such as a relay's site."""

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> Finished:
        """Do the work of one order. Raises soon after `stop()` became true."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When the device declines work. None: no limit. A limit on a sensor that the device lacks is never exceeded."""

    min_free_ram_gb: float | None = None
    max_temperature_c: float | None = None
    min_battery: float | None = None  # as a share of full charge

    def excuse(self, now: Context) -> Declined | None:
        """Why the device declines work now, or None."""
        ram_gb, temperature_c, battery = self.min_free_ram_gb, self.max_temperature_c, self.min_battery
        if ram_gb is not None and now.free_ram_gb is not None and now.free_ram_gb < ram_gb:
            return Declined(why=Why.MEMORY, reason=f"free RAM {now.free_ram_gb:.2f} GB is below {ram_gb:g} GB")
        if temperature_c is not None and now.temperature_c is not None and now.temperature_c > temperature_c:
            text = f"temperature {now.temperature_c:.0f} C is above {temperature_c:g} C"
            return Declined(why=Why.HOT, reason=text)
        if battery is not None and now.battery is not None and now.battery < battery:
            return Declined(why=Why.BATTERY, reason=f"battery {now.battery:.0%} is below {battery:.0%}")
        return None


@dataclass(frozen=True, slots=True)
class Twin:
    """Another process that speaks as this device.

    since: when it was heard first, seconds since the epoch. heard_at: the last time, by a monotonic clock. times: how
    often we have given way in a row.
    """

    incarnation: str
    since: float
    heard_at: float
    times: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The agent's name and properties.

    n_shared: non-sensitive training samples (the number of sensitive ones is never sent); 0 where nothing is trained.
    steps: what the device can be asked. site: of a relay, the devices behind it.
    """

    device_id: str
    federation: str
    task: TaskSpec
    n_shared: int
    trains: bool = True
    steps: Steps = field(default_factory=installed_steps)
    site: Callable[[], tuple[SiteDevice, ...]] | None = None


def yield_s(times: int, draw: float) -> float:
    """How long to be silent when another process speaks as this device, for the 1st, 2nd, ... time in a row."""
    return min(YIELD_CAP_S, YIELD_BASE_S * 2.0 ** min(times - 1, 16)) * (1 + draw) / 2


def ignore_event(event: str, fields: dict[str, object]) -> None:
    """Ignore the event."""


class Agent:
    """One device in one federation. `run` lasts until `stop`.

    Args:
        identity: of the device.
        broker: how to reach the broker.
        home: durable folder: `outbox`, `models` (received); the worker has its own files beside them.
        make_worker: called once, in the worker thread, when the first order needs it.
        limits: when to decline.
        context_interval_s: how often the device reports its context.
        rules: what may leave, by the device's owner.
        observe: called with every event and its fields, on the event loop.
    """

    def __init__(
        self,
        identity: Identity,
        broker: BrokerSettings,
        home: Path,
        make_worker: Callable[[], Works],
        *,
        limits: Limits = Limits(),
        context_interval_s: float = 10.0,
        rules: Rules = Rules(),
        observe: Callable[[str, dict[str, object]], None] = ignore_event,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._lines = Lines()
        self._identity = identity
        self._broker = broker
        self._home = home
        self._make_worker = make_worker
        self._limits = limits
        self._context_interval_s = context_interval_s
        self._rules = rules
        self._observe = observe
        self._topics = Topics(identity.federation)
        self._incarnation = uuid.uuid4().hex
        self._worker: Works | None = None
        self._models = BlobFolder(home / "models")
        self._stop_work = threading.Event()
        self._work: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._background = Background(self._fail)
        self._run = ""  # of the last order
        self._release = 0  # in the last status sent
        self._twin: Twin | None = None
        self._silent: asyncio.TimerHandle | None = None  # until when we give way to it
        self._outgoing: dict[str, tuple[str, bytes, bool]] = {}  # key -> topic, payload, retain
        self._sent: Counter[str] = Counter()  # how often the broker has taken each unanswered report, by order
        self._something_waits = asyncio.Event()
        self._end: asyncio.Future[None] | None = None
        self._connecting: asyncio.Task[Any] | None = None  # set in `run` until a broker lets us in

    def tell(self) -> None:
        """Publish again which devices are behind this relay."""
        if self._end is not None and self._transport.connected:
            self._send(self._status(Presence.ONLINE))

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
            Outbox(self._home / "outbox") as self._outbox,
            closing(Door(self._rules, self._home, self._topics, self._action_of)) as door,
            ThreadPoolExecutor(1, "worker") as self._pool,
        ):
            orders = {order.id: order for order in self._outbox.orders()}
            self._run = _last_run([*(verdict.order_id for verdict in self._outbox.verdicts), *orders])
            self._session = session.Session(
                self._identity.device_id,
                orders=orders.values(),
                reports=[r for r in self._outbox.reports() if self._may_still_leave(r, orders[r.order_id])],
                acked=[verdict.order_id for verdict in self._outbox.verdicts],
                now=uptime_s(),
            )
            self._transport = await self._wire(door)
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
                self._halt()

    def stop(self) -> None:
        """Finish soon: stop training between two batches, announce sleep, return from `run`."""
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
            if self._connecting is not None:  # not connected yet, so no goodbye
                self._connecting.cancel()

    async def _wire(self, door: Door) -> Transport:
        """Make the transport with its initial subscriptions."""
        me, topics = self._identity.device_id, self._topics
        role = Role.DEVICE if self._identity.site is None else Role.RELAY
        subject = Subject(self._identity.federation, role, me)
        self._signed = speaker(self._broker, subject, self._home)
        status = topics.agent(me, "status")
        last_words = self._signed.seal(status, encode(self._status(Presence.OFFLINE)), will=True)
        will = Will(status, last_words, delay_s=WILL_DELAY_S)
        client = topics.client_id("agent", f"{me}:{token_hex(8)}")  # nobody can throw it off, nor a copy of this card
        transport = Transport(self._broker, client, will=will, session_expiry_s=SHORT_SESSION_S, door=door)
        # Not durable: a model can be fetched again.
        self._receiver = Receiver(transport, self._models, durable=False, seal=self._signed.seal)
        self._sender = Sender(transport, self._outbox.blob)
        await transport.subscribe(status, self._on_own_status, refused=self._cannot_overhear)
        await transport.subscribe(topics.agent(me, "orders"), self._on_order)
        await transport.subscribe(topics.agent(me, "acks"), self._on_ack)
        await transport.subscribe(topics.coordinator_wants(me), self._on_want)
        await self._signed.follow(transport, topics)
        transport.on_connect(self._on_connect)
        await Renewal(transport, topics, me).attach()
        return transport

    async def _serve(self) -> None:
        """Work until the end, then say goodbye. The end is an exception if a background task failed."""
        assert self._end is not None
        self._background.spawn(self._publish_what_waits())
        self._background.spawn(self._tell_context())
        await self._end
        self._say("stopping", logging.DEBUG)
        self._feed(session.Happened.CLOSING)
        if self._work is not None:
            await self._work
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                status = self._topics.agent(self._identity.device_id, "status")
                good_bye = self._signed.seal(status, encode(self._status(Presence.SLEEPING)))
                await self._transport.publish(status, good_bye, retain=True)
        self._say("sleeping", logging.DEBUG)

    def _halt(self) -> None:
        """Stop everything, however `run` ends."""
        self._stop_work.set()
        for timer in (self._timer, self._silent):
            if timer is not None:
                timer.cancel()
        self._background.cancel()

    def _fail(self, error: BaseException) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)

    # ------------------------------------------------------------------------------------------------- inwards

    async def _on_own_status(self, inbound: Inbound) -> None:
        """Look whether another process speaks as this device; if it came later than this one, give way for a while."""
        if not inbound.payload:
            return
        with suppress(ProtocolError):
            if decode(unsealed(inbound.payload), Status).incarnation == self._incarnation:
                return
        with self._refusing(inbound):
            said = self._signed.overhear(inbound.topic, inbound.payload, self._identity.device_id)
            if said is None:
                return
            other, past = decode(said, Status), inbound.retained
            if other.presence is Presence.ONLINE and not past:
                self._give_way(other.incarnation)
            elif self._signed.behind or not past:  # a past life's, or it has gone: it is for us to speak
                self._speak_again()

    def _give_way(self, incarnation: str) -> None:
        """Say nothing as this device for a while: another process does, which came later."""
        now = time.monotonic()
        lasts = self._twin is not None and now - self._twin.heard_at < 2 * YIELD_CAP_S
        before = self._twin if lasts else None
        since = time.time() if before is None or before.incarnation != incarnation else before.since
        self._twin = Twin(incarnation, since, now, 1 if before is None else before.times + 1)
        wait = yield_s(self._twin.times, random.SystemRandom().random())
        self._say(
            "twin",
            logging.ERROR,
            incarnation=incarnation,
            since=in_words(since),
            again_in_s=round(wait),
            check=CHECK_TWIN,
        )
        if self._silent is not None:
            self._silent.cancel()
        self._outgoing.clear()
        self._silent = asyncio.get_running_loop().call_later(wait, self._in_time, self._speak_again)

    def _speak_again(self) -> None:
        """Speak as this device, with numbers above those of whoever did so meanwhile."""
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None
        try:
            self._signed.live_on()
        except StoreError as error:  # the present life goes on
            self._say("life_not_stored", logging.WARNING, detail=str(error))
        self._send(self._status(Presence.ONLINE))
        self._send(self._measure())
        self._feed(session.Happened.CONNECTED)

    def _cannot_overhear(self, reason: str) -> None:
        self._say("cannot_overhear", logging.WARNING, detail=reason)

    async def _on_connect(self) -> None:
        where = f"{self._broker.host}:{self._broker.port}"
        ready()
        self._say("online", logging.DEBUG, broker=where, protocol=self._transport.protocol)
        self._speak_again()

    async def _on_order(self, inbound: Inbound) -> None:
        if self._silent is not None:  # it is for the other process
            return
        with self._refusing(inbound):
            self._feed(decode(self._opened(inbound), Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            self._feed(decode(self._opened(inbound, Role.INTAKE), Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            want = decode(self._opened(inbound, Role.INTAKE), Want)
            me = self._identity.device_id
            if want.device_id != me:
                raise ProtocolError("foreign-id", f"want for {want.device_id}")
            self._sender.want(want.digest, want.ranges, chunks=self._topics.update_chunk(me, want.digest))

    def _opened(self, inbound: Inbound, *others: Role) -> bytes:
        """A message from the coordinator, or another permitted sender, to this incarnation of the agent."""
        return self._signed.open(inbound.topic, inbound.payload, Role.COORDINATOR, *others, to=self._incarnation)

    @contextmanager
    def _refusing(self, inbound: Inbound) -> Iterator[None]:
        """Drop messages that violate the contract: one log line, one count, no change."""
        try:
            yield
        except ProtocolError as error:
            self.refused[error.name] += 1
            self._say("refused", logging.WARNING, name=error.name, topic=inbound.topic, detail=str(error))

    # ------------------------------------------------------------------------------------------------- deciding

    def _feed(self, event: session.Event) -> None:
        """Let the session decide, and carry out its actions in order."""
        try:
            for action in self._session.handle(event, uptime_s()):
                self._perform(action)
        finally:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakeup = self._session.next_wakeup()
        if wakeup is not None:
            # At least a moment ahead: the loop's clock and ours differ slightly. At most LAST_RESEND_S: the loop's
            # clock stands still while the machine is suspended.
            delay_s = min(max(wakeup - uptime_s(), 0.01), session.LAST_RESEND_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._in_time, self._tick)

    def _in_time(self, work: Callable[[], None]) -> None:
        """Do what a timer was set for: nobody else would hear of a disk that is full or broken."""
        try:
            work()
        except StoreError as error:
            self._fail(error)

    def _tick(self) -> None:
        self._feed(session.Happened.TICK)

    def _perform(self, action: session.Action) -> None:
        match action:
            case session.Persist(order):
                self._outbox.persist(order)
                self._note_run(order)
                self._say("order_received", logging.DEBUG, **_about(order), left_s=round(order.left_s, 1))
            case session.Run(order):
                self._stop_work.clear()
                self._work = self._background.spawn(self._carry_out(order))
            case session.Stop(order_id):
                self._say("order_stopping", logging.DEBUG, order=order_id)
                self._stop_work.set()
                if self._fetching is not None:
                    self._fetching.cancel()
            case session.Keep(report):
                self._outbox.keep(report)
                self._say(
                    "order_done", order=report.order_id, result=str(report.outcome), seconds=round(report.seconds, 3)
                )
                self._send(self._measure())
            case session.Publish(report):
                again = self._sent[report.order_id]
                if again == UNANSWERED and self._transport.connected:
                    self._say("unanswered", logging.WARNING, order=report.order_id, check=CHECK_UNANSWERED)
                self._send(replace(report, again=again))
                if highest_release(self._home) != self._release:  # after the report, or the order would come again
                    self._send(self._status(Presence.ONLINE))
            case session.Acknowledge(ack):
                self._forget(ack.order_id)
                self._outbox.acknowledge(ack, remember=session.MAX_ACKED)
                level = logging.DEBUG if ack.accepted else logging.WARNING
                self._say("report_acked", level, order=ack.order_id, accepted=ack.accepted, reason=ack.reason)
            case session.Discard(order_id, reason):
                self._forget(order_id)
                self._outbox.discard(order_id)
                self._say("order_discarded", logging.WARNING, order=order_id, reason=reason)

    def _note_run(self, order: Order) -> None:
        """Tell the owner when another run gives the orders: bundles come from it from now on."""
        if self._run not in {order.run, ""}:
            self._say("other_run", logging.WARNING, run=order.run, before=self._run, check=CHECK_RUN)
        self._run = order.run

    def _forget(self, order_id: str) -> None:
        """Send no more of a report."""
        self._outgoing.pop(order_id, None)
        self._sent.pop(order_id, None)

    # ------------------------------------------------------------------------------------------------- working

    async def _carry_out(self, order: Order) -> None:
        """Do one order from its models to its report; a stopped one gives none."""
        with bound(**_about(order)):
            self._say("order_started", logging.DEBUG, **_about(order))
            began = time.monotonic()
            report: Report | None = None
            try:
                action = read_action(order, self._identity.steps)
                if isinstance(action, Unsupported):
                    report = self._report(order, action, began)
                elif (refused := self._refuse_work(order, action)) is not None:
                    report = self._report(order, refused, began)
                elif await self._fetch(order, action):
                    work = partial(self._execute, order, action, began)
                    report = await asyncio.get_running_loop().run_in_executor(self._pool, work)
            except (ProtocolError, TransportError) as error:  # the latter: the broker does not let us fetch a model
                report = self._report(order, failed(error), began)
            self._forget_models()
            self._feed(report or session.Happened.STOPPED)

    def _refuse_work(self, order: Order, action: Action) -> Refusal | None:
        """Answer what needs neither a model nor a worker."""
        if not self._rules.permitted(action):
            text = f"its result would tell of {', '.join(kind for kind in self._rules.withheld)}"
            return Declined(why=Why.NOT_ALLOWED, reason=f"{action.STEP}: {text}")
        mine = self._identity.task.fingerprint()
        if order.task_fingerprint != mine:
            text = f"the order is for task {order.task_fingerprint}, this device has {mine}"
            return Failed(why=Why.OTHER_TASK, reason=text)
        needed = sum(ref.size_bytes for ref in blobs_of(action) if ref.digest not in self._models)
        disk = shutil.disk_usage(self._home)
        spare = min(SPARE_DISK_BYTES, disk.total // 20)
        if needed + spare > disk.free:
            needs, stays, there = (f"{size / 1e6:.0f} MB" for size in (needed, spare, disk.free))
            text = f"the models need {needs} and {stays} must stay free, {there} are free"
            return Declined(why=Why.DISK, reason=text)
        return self._limits.excuse(self._measure())

    async def _fetch(self, order: Order, action: Action) -> bool:
        """Fetch all models that an action names into the folder; False if stopped meanwhile."""
        if self._stop_work.is_set():
            return False
        self._fetching = asyncio.create_task(self._fetch_models(order, action))
        try:
            await self._fetching
        except asyncio.CancelledError:
            if not self._stop_work.is_set():
                raise
            return False
        finally:
            self._fetching = None
        return True

    async def _fetch_models(self, order: Order, action: Action) -> None:
        named = list(blobs_of(action))
        bases = shared_bases(named, order.differences)
        for ref in (*bases, *named):
            if ref.digest not in self._models and self._identity.trains:
                await self._follow(ref, order)
            if ref in bases and ref not in named:
                continue
            path = await self._fetch_blob(ref)
            with suppress(OSError):  # if not ours or read-only, it may be deleted early, nothing worse
                os.utime(path)

    async def _follow(self, ref: BlobRef, order: Order) -> None:
        """Build a model from one at hand, if the order says how; if that fails, it is fetched whole."""
        if (way := way_to(ref, order.differences, set(self._models))) is None:
            return
        base, steps = way
        try:
            for step in steps:
                await self._fetch_blob(step)
            await asyncio.to_thread(self._move, ref, base, steps)
        except ProtocolError as error:
            self._say("not_followed", logging.WARNING, name=error.name, model=ref.digest, detail=str(error))
        finally:
            for step in steps:
                self._models.remove(step.digest)

    def _move(self, ref: BlobRef, base: str, steps: Iterable[BlobRef]) -> None:
        """Store a model made of another one plus differences."""
        from fedge.tensors.codecs import apply_differences  # needs zstandard, which an inference-only device may lack

        differences = [self._models.get(step.digest) for step in steps]
        try:
            with self._models.path(base).open("rb") as file, volatile():  # it can be fetched again
                self._models.put_as_made(ref.digest, apply_differences(file, differences))
        except OSError as error:
            raise StoreError(f"model {base} cannot be read: {error}") from error

    async def _fetch_blob(self, ref: BlobRef) -> Path:
        me = self._identity.device_id
        return await self._receiver.fetch(
            ref,
            chunks=self._topics.model_chunk(ref.digest),
            wants=self._topics.agent(me, "wants"),
            device_id=me,
            patience_s=FETCH_PATIENCE_S,
        )

    def _execute(self, order: Order, action: Action, began: float) -> Report | None:
        """In the worker thread: do the work and store its tensors durably. None: it was stopped."""
        try:
            if self._worker is None:
                self._worker = self._make_worker()
            if isinstance(action, MaskShares) and (refused := self._strangers(order, action)) is not None:
                return self._report(order, refused, None)
            finished = self._worker.execute(order, self._model, stop=self._stop_work.is_set, action=action)
            result = finished.result
            if isinstance(result, KeysMade) and isinstance(action, MaskKeys):
                from fedge.privacy.masked_sums import proven

                result = proven(result, order, action.session, self._signed)
            if not isinstance(result, Refusal):
                result = self._rules.stripped(result, action.reveals())
            report = self._report(order, result, began + finished.untimed_s if action.TIMED else None)
            read_result(decode(encode(report), Report), action)  # refuse here what the coordinator would refuse
        except StoreError:
            raise
        except Exception as error:  # no order and no user's network may bring the agent down
            if self._stop_work.is_set():
                return None
            log.exception("event=order_failed order=%s", order.id)
            return self._report(order, failed(error), began if action.TIMED else None)
        named = {ref.digest for ref in report.blobs}
        for digest, data in finished.blobs.items():
            if digest in named:
                self._outbox.put_blob(digest, data)
        return report

    def _strangers(self, order: Order, action: MaskShares) -> Declined | None:
        """Why secrets are not shared with a cohort; None: all are members, as far as messages are signed."""
        from fedge.privacy.masked_sums import read_roster, require_genuine  # with `cryptography`

        try:
            require_genuine(read_roster(self._model(action.roster)).members, order, action.session, self._signed)
        except ProtocolError as error:
            return Declined(why=Why.STRANGERS, reason=str(error))
        return None

    def _report(self, order: Order, result: Result, began: float | None) -> Report:
        """The report of an order. The reason for a failure is logged here; the coordinator gets only its code.

        `began`: start of the work, by the monotonic clock; None: the duration is not reported.
        """
        if isinstance(result, Refusal):
            self._lines.warning(
                log, "event=order_refused order=%s why=%s reason=%r", order.id, result.why, result.reason
            )
        seconds = 0.0 if began is None else max(time.monotonic() - began, 0.0)
        return self._rules.stripped(report_of(order, result, seconds))

    def _model(self, ref: BlobRef) -> bytes:
        return self._models.get(ref.digest)

    def _forget_models(self) -> None:
        """Delete models that no open order names, except the most recently used."""
        needed = {ref.digest for order in self._session.orders for ref in self._named(order)}
        others = sorted(set(self._models) - needed, key=lambda digest: self._models.path(digest).stat().st_mtime_ns)
        for digest in others[:-CACHED_MODELS]:
            self._models.remove(digest)

    def _may_still_leave(self, report: Report, order: Order) -> bool:
        """Whether a report kept by an earlier agent fits the owner's rules; if not, the work is repeated.

        What the result of a step that is known no longer lets out, nobody can tell.
        """
        try:
            action = read_action(order, self._identity.steps)
            parts = [self._rules.stripped(report) == report]
            if isinstance(action, Unsupported):
                parts.append(report.outcome is not Outcome.DONE)
            elif not isinstance(result := read_result(report, action), Refusal):
                parts.append(self._rules.stripped(result, action.reveals()) == result)
        except (ProtocolError, WithheldError):
            return False
        return all(parts)

    def _action_of(self, order_id: str) -> Action | None:
        """The action of an open order, if this device knows its step."""
        for order in self._session.orders:
            if order.id == order_id:
                action = read_action(order, self._identity.steps)
                return None if isinstance(action, Unsupported) else action
        return None

    def _named(self, order: Order) -> Iterator[BlobRef]:
        """The models that an order names; none if the device does not understand it."""
        with suppress(ProtocolError):
            yield from blobs_of(read_action(order, self._identity.steps))

    # ------------------------------------------------------------------------------------------------- outwards

    def _status(self, presence: Presence) -> Status:
        self._release = highest_release(self._home)
        status = Status(
            device_id=self._identity.device_id,
            incarnation=self._incarnation,
            presence=presence,
            task_fingerprint=self._identity.task.fingerprint(),
            n_samples=self._identity.n_shared,
            release=self._release,
            capabilities=capabilities(trains=self._identity.trains, steps=self._identity.steps),
            withholds=self._rules.withheld,
            site=None if self._identity.site is None else self._identity.site(),
        )
        return self._rules.stripped(status)

    def _measure(self) -> Context:
        own = self._identity
        return context.measure(own.device_id, own.n_shared, self._home, self._receiver.mbit_s)

    def _send(self, message: Status | Context | Report) -> None:
        """Queue a message; it replaces one with the same key, so the queue is bounded."""
        if self._silent is not None:
            return
        leaf = {Status: "status", Context: "context", Report: "reports"}[type(message)]
        key = message.order_id if isinstance(message, Report) else leaf
        topic = self._topics.agent(self._identity.device_id, leaf)
        self._outgoing[key] = (topic, encode(self._rules.stripped(message)), isinstance(message, Status))
        self._something_waits.set()

    async def _publish_what_waits(self) -> None:
        while True:
            await self._something_waits.wait()
            self._something_waits.clear()
            while self._outgoing:
                key = next(iter(self._outgoing))
                topic, payload, retain = self._outgoing.pop(key)
                try:
                    await self._transport.publish(topic, self._signed.seal(topic, payload), retain=retain)
                    if self._session.phase(key) is session.Phase.REPORTED:
                        self._sent[key] += 1
                except TransportError as error:
                    # The broker's rules forbid this one; important messages are repeated, and the operator sees the
                    # reason.
                    self._say("publish_refused", logging.ERROR, topic=topic, detail=str(error))

    async def _tell_context(self) -> None:
        while True:
            await asyncio.sleep(self._context_interval_s)
            if self._transport.connected:
                self._send(self._measure())

    def _say(self, event: str, level: int = logging.INFO, /, **fields: object) -> None:
        """Log an event and pass it to the observer; of many warnings of a kind, which others can cause, few."""
        if level >= logging.WARNING:
            untold = self._lines.untold(f"{event} {fields.get('name', '')}", time.monotonic())
            if untold is None:
                return
            fields |= {"untold": untold} if untold else {}
        note(log, event, {"device": self._identity.device_id, **fields}, level)
        self._observe(event, fields)


def capabilities(*, trains: bool, steps: Steps) -> Capabilities:
    """The capabilities of this machine."""
    return Capabilities(
        trains=trains,
        steps={name: kind.VERSION for name, kind in steps.items() if trains or not kind.TRAINS},
        fedge_version=fedge.__version__,
        python_version=platform.python_version(),
        machine=platform.machine(),
        cpu_count=os.cpu_count() or 1,
    )


def _last_run(order_ids: Sequence[str]) -> str:
    """The run of the last of these orders; empty: there is none."""
    return order_ids[-1].partition(".")[0].partition("-")[0] if order_ids else ""


def _about(order: Order) -> dict[str, object]:
    return {"order": order.id, "round": order.round, "step": order.step}
