"""The devices of a federation over MQTT: one asyncio loop around `coordinator.fleet.mqtt.orders` and the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.fleet import Answer, Fleet, Seen, asked, order_for, require_sendable
from coordinator.fleet.mqtt.intake import CHECK_LOST, MAX_UNDER_WAY, Intake, require_own
from coordinator.fleet.mqtt.orders import OrderBook
from coordinator.fleet.mqtt.pace import Paces, work_of
from coordinator.fleet.mqtt.process import SAYS_NOTHING
from coordinator.fleet.mqtt.sole import Sole, told
from coordinator.fleet.problems import Problem
from coordinator.fleet.quarantine import LONG_UPDATE, READMITTED, Quarantine, quarantined
from coordinator.fleet.update_norms import Believed, OneByOne, within_limits
from coordinator.fleet.versions import Descent
from coordinator.store.records import Device, Offence, OrderStatus
from coordinator.store.registry import Kept, Registry
from coordinator.store.store import DEVICES, EXPIRED, OFFERED, RECALLED_ROUNDS, Entry, Store
from fedge import __version__
from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED, ConfigError, ProtocolError
from fedge.identity.authority import MAX_REVOCATIONS_BYTES
from fedge.identity.names import Role
from fedge.membership.signed_messages import Signed
from fedge.models.weights import needed_on_devices
from fedge.steps.contract import Action, Refusal, Unsupported, read_action, read_result
from fedge.system.text import in_words
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, Model, unflatten
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import (
    BEACON_S,
    MAX_LEFT_S,
    Beacon,
    BlobRef,
    Claim,
    Context,
    Health,
    Order,
    Outcome,
    Report,
    Status,
    Why,
    blobs_of,
    decode,
    encode,
    is_outdated,
)
from fedge.wire.topics import MODELS
from fedge.wire.transfer.sender import Sender

log = logging.getLogger("fedge.coordinator")

SETTLE_S: Final = 15.0
"""How long a started coordinator waits for the devices of the last round. A broker that was restarted, too, has
forgotten them; they reconnect within the transport's back-off of 10 s."""
GOODBYE_S: Final = 5.0
"""Time limit for sending the last verdicts: a device without one would go on repeating its report."""
TOO_LONG: Final = (
    f"the list of revoked certificates is longer than one message ({MAX_REVOCATIONS_BYTES} bytes), so agents do not "
    "receive it: copy crl.pem to each device, beside its ca_file, and start its agent again"
)
MAX_STRANGERS: Final = 100
"""Most problems kept for unknown device names, so that invented names cannot fill the summary."""
KEEP_S: Final = 60.0
"""Pause between two writes of the devices' statuses, which change far more often than a restart needs them."""
LOOK_AT_STORE_S: Final = 0.5
"""Pause between two reads of the orders that intakes have closed."""
NEEDED: Final = "0.2 or later"
"""Versions of fedge that an agent may have."""
TWICE: Final = (
    "two processes speak as this device and take turns: a second one of its --id, a copy of its card or container, or "
    "a stolen identity; end one of them"
)


class MqttFleet(Intake, Fleet):
    """The `Fleet` of real devices. Async context manager: inside it, the fleet is connected.

    `problems`: the latest refusal, failure or missed deadline by device id. `quarantined`: devices left out of this
    round. `retired`: devices without further orders from the next round on. `waiting`: number of devices that the round
    waits for; 0: it is not waiting. `second`: the last other coordinator of the federation that came to the broker.

    Args:
        broker: how to reach the broker.
        store: durable state, including accepted reports and snapshots.
        federation: name of the federation.
        run: part of the orders' ids, since devices remember the orders of an earlier coordinator of this name.
        issue: another part, new after a restore from a backup, so that devices repeat what they did since.
        task: what is learned.
        layout: of the model.
        seed: of the federation; all devices' random numbers come from it.
        deadline_s: minimum time for one step; extended for devices whose earlier reports show that they need more
            (`coordinator.fleet.mqtt.pace`).
        steps: of the method, in addition to the installed ones.
        no_relays: why relays are not possible; empty: they are.
        observe: called with events for people.
    """

    descents: dict[str, Descent] | None = None
    sites = None
    _goes_on = False
    """Whether the round began before this process did, so that its orders may be older."""

    def __init__(
        self,
        broker: BrokerSettings,
        store: Store,
        *,
        federation: str,
        run: str,
        task: TaskSpec,
        layout: Layout,
        seed: int,
        deadline_s: float,
        steps: Iterable[type[Action]] = (),
        no_relays: str = "",
        issue: str = "",
        observe: Callable[[str, dict[str, Any]], None],
    ) -> None:
        super().__init__(
            broker,
            store,
            store.home,
            federation=federation,
            task=task,
            layout=layout,
            steps=steps,
            role=Role.COORDINATOR,
        )
        self.registry = Registry(task.fingerprint(), store.last_contexts(), no_relays, _kept_in(store))
        self.problems: dict[str, Problem] = {}
        self.last_refused: dict[str, str] = {}  # name of an error -> device and detail of the last one
        self.quarantined: dict[str, Quarantine] = {}
        self.retired: frozenset[str] = frozenset()
        self.waiting = 0
        self._strangers: set[str] = set()  # among them
        self._paces = Paces()
        self._counted: Counter[str] = Counter()
        self._run = run
        self._issue = issue
        self._fingerprint = task.fingerprint()
        self._actions: dict[str, Action] = {}  # of the present step and of open streams, by order
        self._seed = seed
        self._deadline_s = deadline_s
        self._observe = observe
        if isinstance(self._signed, Signed) and (kept := store.recall("heard")):
            self._signed.heard = msgspec.json.decode(kept, type=dict[str, int])
        self._sender = Sender(self._transport, self._model_file)
        self._offered: set[str] = set()
        self._traffic = (0, 0)
        self._round = 0
        self._devices: tuple[Device, ...] = ()
        self._n_samples: dict[str, int] = {}
        self._book = OrderBook()  # of the present step, and of streams
        self._answered: dict[str, Entry] = {}  # orders of the present step, by device
        self._open: set[str] = set()  # those among them that are
        self._streamed: dict[str, Order] = {}  # unyielded orders by id
        self._arrived: dict[str, Entry] = {}  # closed ones among them, by the store's numbers
        self._held: dict[str, frozenset[BlobRef]] = {}  # their uploads
        self._arrival = store.last_arrival()  # of the last closed order known to us
        self.second: dict[str, object] | None = None
        self._sole = Sole(self._topics, self._signed, store.home, end=self._fail, notice=self._second_came)
        self._something_happened = asyncio.Event()
        self._under_way: set[tuple[str, str]] = set()  # device, order
        self._settled_at = self._look_at = 0.0
        self._endless: list[asyncio.Task[None]] = []
        self._connected = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        topics = self._topics
        self._transport.speak_as(await self._sole.require(self._transport.settings))
        await self._sole.attach(self._transport)
        await self._transport.subscribe(topics.agent("+", "status"), self._guard(self._on_status))
        await self._transport.subscribe(topics.agent("+", "context"), self._guard(self._on_context))
        await self._transport.subscribe(topics.agent("+", "health"), self._guard(self._on_health))
        await self._listen()
        wants = topics.shared(MODELS, self._secret, topics.agent("+", "wants"))
        await self._transport.subscribe(wants, self._guard(self._on_want))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._uploads.close)
            if isinstance(self._signed, Signed):
                self._transport.on_connect(self._tell_revocations)
            self._transport.on_connect(self._tell_time)  # the last one: it goes on while the connection does
            await stack.enter_async_context(self._transport)
            await stack.enter_async_context(self._sender)
            stack.push_async_exit(self._finish)
            self._endless.append(self._background.spawn(self._keep_devices_often()))
            self._endless.append(self._background.spawn(self._watch_members()))
            self._connected = stack.pop_all()
        self._settled_at = asyncio.get_running_loop().time() + SETTLE_S
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connected.__aexit__(kind, error, trace)

    async def _finish(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End our own tasks while the transport can still send the last verdicts."""
        for task in self._endless:
            task.cancel()
        tasks = self._background.tasks
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                while kind is None and tasks:  # one may start another: a commit, then its verdict
                    await asyncio.wait(tasks)
        self._background.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._sole.withdraw()
        if kind is None or issubclass(kind, asyncio.CancelledError):
            await self._keep_devices()

    async def _keep_devices_often(self) -> None:
        """Store the devices' statuses for the next start; after kill -9 they are up to a minute old."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self._keep_devices()

    async def _keep_devices(self) -> None:
        kept = self.registry.kept()
        await asyncio.to_thread(lambda: self._store.keep(DEVICES, msgspec.json.encode(kept).decode()))

    # -------------------------------------------------------------------------------------- what a method may ask for

    async def begin(self, number: int, at_least: int) -> None:
        """Begin a round: take the snapshot once `at_least` devices can be asked; or reuse the stored one."""

        async def enough() -> None:
            await self._settle(number)
            if len(self.registry.online()) < at_least:
                self.waiting = at_least
                self._observe("waiting", {"round": number, "devices": at_least})
            await self._or_failure(self.registry.wait_for(at_least))
            self.waiting = 0

        await self._enter(number, enough)
        self._observe("round_begun", {"round": number, "devices": len(self._devices)})

    async def admit(self, number: int, tried: Mapping[str, str], equipped: Container[str]) -> None:
        """Begin a round once a device needs a bundle (`Registry.wait_for_late_joiner`); or reuse the stored one."""
        await self._enter(number, lambda: self._or_failure(self.registry.wait_for_late_joiner(tried, equipped)))

    async def _enter(self, number: int, ready: Callable[[], Awaitable[None]]) -> None:
        """Set the round's devices: those present once `ready` returns or, after a restart, the stored ones."""
        self._leave_out(number, await asyncio.to_thread(self._store.offences))  # quarantined ones, from now on
        devices = await asyncio.to_thread(self._store.snapshot, number)
        self._goes_on = devices is not None
        if devices is None:
            await ready()
            devices = self._present()
            await asyncio.to_thread(self._store.begin_round, number, devices, time.time())
        await self._take(number, devices)

    def _present(self) -> tuple[Device, ...]:
        """The devices of a round that begins now."""
        return *self.registry.online(), *self.registry.inference_only()

    def _leave_out(self, number: int, offences: Iterable[Offence]) -> None:
        """Exclude quarantined devices from this round; announced once, with the evidence."""
        found = quarantined(offences, number)
        for i, quarantine in found.items():
            if i not in self.quarantined:
                names = ", ".join(f"{o.name} in round {o.round}" for o in quarantine.evidence)
                reason = f"in quarantine until round {quarantine.until}: {names}"
                log.warning("event=quarantined device=%s until=%d evidence=%r", i, quarantine.until, names)
                self._note_problem(i, reason)
        for i in self.quarantined.keys() - found.keys():
            log.warning("event=readmitted device=%s round=%d", i, number)
        self.quarantined = found
        self.registry.leave_out({*found, *self.retired})
        for i in sorted({*found, *self.retired}):
            self._observe(
                "left_out",
                {"device": i, "round": number, "reason": "retired" if i in self.retired else "in quarantine"},
            )

    def readmit(self, ids: Iterable[str]) -> None:
        """Readmit devices with a clean slate, from the next round on.

        Raises:
            ConfigError: there is no evidence against one: the name is wrong, or it was never left out.
        """
        known = {offence.device_id: offence for offence in self._store.offences()}
        for i in ids:
            if i not in known:
                raise ConfigError(f"{i} cannot be readmitted: there is no evidence against a device of that name")
            last = known[i].round
            self._store.accuse(Offence(device_id=i, round=last, name=READMITTED, detail="by the command line")).result()

    async def _take(self, number: int, devices: tuple[Device, ...]) -> None:
        """Set the round's devices. After a start, recall their speed, problems and open orders."""
        earlier: list[Entry] = []
        if self._round == 0:
            for past in range(max(number - RECALLED_ROUNDS, 1), number + 1):
                then, entries = await asyncio.to_thread(
                    lambda n: (self._store.snapshot(n), self._store.entries(n)), past
                )
                self._recall(past, then or (), entries)
            earlier = [e for e in await asyncio.to_thread(self._store.streamed, number) if e.order.round < number]
        if isinstance(self._signed, Signed):  # so that the next process refuses replays, too
            heard = msgspec.json.encode(self._signed.heard).decode()
            await asyncio.to_thread(self._store.keep, "heard", heard)
        self._round, self._devices = number, devices
        self._n_samples = {device.id: device.n_samples for device in devices}
        await self._resume(earlier)

    def _recall(self, number: int, devices: Iterable[Device], entries: Iterable[Entry]) -> None:
        """Learn from an earlier round how fast devices are, and their problems."""
        self._n_samples = {device.id: device.n_samples for device in devices}
        for entry in entries:
            order, report = entry.order, entry.report
            action = read_action(order, self._steps)
            if report is not None and report.outcome is Outcome.DONE and not isinstance(action, Unsupported):
                seconds = min(report.seconds, order.left_s)
                self._paces.note(order.device_id, self._work(order.device_id, action), seconds)
            if reason := entry.reason or _trouble(report):
                self._keep_problem(order.device_id, Problem(round=number, reason=reason))

    async def _resume(self, entries: Sequence[Entry]) -> None:
        """Continue streamed orders of earlier rounds whose answers this round has not yielded yet.

        Raises:
            ConfigError: one of their steps no longer exists.
        """
        for entry in entries:
            action = read_action(entry.order, self._steps)
            if isinstance(action, Unsupported):
                raise ConfigError(f"order {entry.order.id} cannot be continued: {action.reason}")
            self._actions[entry.order.id] = action
        self._hold(entries)
        if self._streamed:
            await self._follow(entries, dict.fromkeys((entry.order.device_id for entry in entries), MAX_LEFT_S))

    def _learn(self, device_id: str, action: Action, answer: Answer, began: float) -> None:
        """Update a device's speed; it cannot have worked for longer than since the step began."""
        if answer.result is not None and not isinstance(answer.result, Refusal):
            longest_s = MAX_LEFT_S if self._goes_on else time.monotonic() - began
            self._paces.note(device_id, self._work(device_id, action), min(answer.seconds, longest_s))

    def _work(self, device_id: str, action: Action) -> float:
        return work_of(action, self._n_samples.get(device_id, 0))

    async def _settle(self, number: int) -> None:
        """After a restart between two rounds, wait for the last one's devices, not only for the first to reconnect."""
        then = await asyncio.to_thread(self._store.snapshot, number - 1)
        before = {device.via or device.id for device in then or ()}
        await self.hear_of(before, self._settled_at - asyncio.get_running_loop().time())

    async def hear_of(self, ids: Collection[str], within_s: float) -> None:
        """Wait until each of these devices has shown a status, at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._or_failure(self.registry.heard_of(ids))

    def devices(self) -> tuple[Device, ...]:
        """Devices of the snapshot that train."""
        return tuple(device for device in self._devices if device.trains)

    def inference_only(self) -> tuple[Device, ...]:
        """Devices of the snapshot that do not train."""
        return tuple(device for device in self._devices if not device.trains)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Write the orders, send open ones, wait for their reports or the deadlines."""
        self._uploads.norms.clear()
        began = time.monotonic()
        actions, refused = self._asked(actions)
        entries = await self._write(label, actions)
        self._answered = dict(entries)
        self._open = {entry.order.id for entry in entries.values() if entry.status is OrderStatus.OPEN}
        self._send_due()
        while self._open:
            await self._wait()
        found = {i: self._answer(self._answered[i]) for i in sorted(entries)}
        for i, answer in found.items():
            self._learn(i, actions[i], answer, began)
            del self._actions[entries[i].order.id]
        believed = await asyncio.to_thread(within_limits, found, actions, self._layout, self.norms)
        await self._doubt(self._round, believed)
        return dict(sorted((believed.answers | refused).items()))

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[Seen] = ()
    ) -> AsyncIterator[Answer]:
        """Write the orders, send open ones, yield answers in the order of the store."""
        began = time.monotonic()
        actions, refused = self._asked(actions)
        entries = await self._write(label, actions, streamed=True)
        self._hold(entries.values())
        self._arrived.clear()
        self._note_arrived(await asyncio.to_thread(self._store.streamed, self._round))
        guard = OneByOne(self._layout, self.norms, seen)
        for _, answer in sorted(refused.items()):
            yield answer
        self._send_due()
        while self._streamed:
            if not self._arrived:
                await self._wait()
                continue
            entry = next(iter(self._arrived.values()))
            order = entry.order
            action, answer = self._actions[order.id], self._answer(entry)
            self._learn(order.device_id, action, answer, began)
            believed = await asyncio.to_thread(guard.believed, answer, action)
            await self._doubt(order.round, believed)
            await asyncio.wrap_future(self._store.hand_out(order.id, self._round))
            self._let_go(order.id)
            yield believed.answers[order.device_id]

    async def _doubt(self, number: int, believed: Believed) -> None:
        """Store the evidence against devices of a round: updates that are refused, and suspicious ones."""
        for i, error in believed.refused.items():
            self._refuse(error, i, self._topics.agent(i, "reports"))
        found = [(i, error.name, str(error)) for i, error in believed.refused.items()]
        found += [(i, LONG_UPDATE, detail) for i, detail in believed.suspects.items()]
        new = await asyncio.gather(*(self._accuse(i, number, name, detail) for i, name, detail in found))
        for (i, name, detail), first in zip(found, new, strict=True):
            if first and name == LONG_UPDATE:
                log.warning("event=suspect name=%s device=%s detail=%r", name, i, detail)
                self._note_problem(i, f"{name}: {detail}")

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Log and store it; it counts from the next round on."""
        self._refuse(error, device_id, self._topics.agent(device_id, "reports"))
        self._store.accuse(Offence(device_id=device_id, round=self._round, name=error.name, detail=str(error)))

    def _hold(self, entries: Iterable[Entry]) -> None:
        """Keep streamed orders, with their uploads, until their answers are yielded."""
        for entry in entries:
            self._streamed[entry.order.id] = entry.order
            self._hold_uploads(entry)

    def _hold_uploads(self, entry: Entry) -> None:
        if entry.report is not None:
            action = self._actions[entry.order.id]
            result = read_result(entry.report, action)
            uploads = () if isinstance(result, Refusal) else action.uploads(result, self._layout)
            self._held[entry.order.id] = frozenset(uploads)

    def _let_go(self, order_id: str) -> None:
        del self._arrived[order_id], self._streamed[order_id], self._actions[order_id]
        for ref in self._held.pop(order_id, ()):
            self._uploads.norms.pop(ref, None)

    def busy(self) -> frozenset[str]:
        """Devices with a streamed order whose answer has not been yielded."""
        return frozenset(order.device_id for order in self._streamed.values())

    def end_streams(self) -> None:
        """Let open streamed orders expire, since nobody will take their answers."""
        for order in self._streamed.values():
            self._give_up(order)
        self._store.end_streams(time.time())
        self._book = OrderBook()
        for known in (self._streamed, self._arrived, self._actions, self._held):
            known.clear()

    def needed(self) -> set[str]:
        """Digests of the tensors that streamed orders name, and of their uploads."""
        named = {ref.digest for i, order in self._streamed.items() for ref in blobs_of([order, self._actions[i]])}
        named |= {ref.digest for ref in blobs_of(needed_on_devices(self.task))}
        return named | {ref.digest for refs in (*self._held.values(), *self._brought.values()) for ref in refs}

    def accepted(self, number: int) -> set[str]:
        """Digests of the uploads for a round in progress, and of the tensors that open streams name."""
        found: set[str] = set()
        for entry in (*self._store.entries(number), *self._store.streamed(number)):
            action = read_action(entry.order, self._steps)
            if isinstance(action, Unsupported):
                continue
            if entry.report is not None and not isinstance(result := read_result(entry.report, action), Refusal):
                found |= {ref.digest for ref in action.uploads(result, self._layout)}
            elif entry.status is OrderStatus.OPEN and entry.order.round < number:
                found |= {ref.digest for ref in blobs_of([entry.order, action])}
        return found

    def _asked(self, actions: Mapping[str, Action]) -> tuple[dict[str, Action], dict[str, Answer]]:
        """The actions to send, and immediate answers of devices that cannot or may not do them, by their status."""
        require_sendable(actions.values())
        relays = {device.via: Device(device.via, 0) for device in self._devices if device.via}
        own, refused = asked(relays | {device.id: device for device in self._devices}, actions, self.task)
        for i, refusal in refused.items():
            log.warning("event=not_asked device=%s step=%s reason=%r", i, actions[i].STEP, refusal.reason)
            self._note_problem(i, refusal.reason)
        return own, {i: Answer(i, refusal, round=self._round) for i, refusal in refused.items()}

    async def _write(self, label: str, actions: Mapping[str, Action], *, streamed: bool = False) -> dict[str, Entry]:
        """Write orders and open a book of the unanswered ones."""
        allowed_s = dict.fromkeys(actions, MAX_LEFT_S) if streamed else self._allowed_s(actions)
        entries = await asyncio.to_thread(
            self._store.write_orders,
            [
                order_for(
                    self._run,
                    self._seed,
                    self._round,
                    label,
                    device,
                    self._fingerprint,
                    actions[device],
                    left_s=allowed_s[device],
                    descents=self.descents,
                    issue=self._issue,
                )
                for device in sorted(allowed_s)
            ],
            streamed=streamed,
        )
        if self._goes_on:
            self._compare(label, entries, actions)
        self._observe("asked", {"label": label, "devices": len(entries)})
        self._actions |= {entry.order.id: actions[device] for device, entry in entries.items()}
        await self._follow(entries.values(), allowed_s)
        return entries

    def _compare(self, label: str, entries: Mapping[str, Entry], actions: Mapping[str, Action]) -> None:
        """Warn of orders from before a restart that ask for something else: with other settings, or by another method.

        Their devices answer what they were asked first.
        """
        others = [i for i, entry in entries.items() if read_action(entry.order, self._steps) != actions[i]]
        if others:
            text = "the round began with other settings, or the method does not repeat its orders (fedge check)"
            log.warning("event=asked_otherwise label=%s devices=%s reason=%r", label, ",".join(sorted(others)), text)

    def _allowed_s(self, actions: Mapping[str, Action]) -> dict[str, float]:
        works = {i: self._work(i, action) for i, action in actions.items()}
        exporting = [i for i, action in actions.items() if action.exports]
        return self._paces.allowed_s(works, least_s=self._deadline_s, exporting=exporting)

    async def _follow(self, entries: Collection[Entry], allowed_s: Mapping[str, float]) -> None:
        """Start following the open orders; from now on devices may fetch what open orders name."""
        named = (*self._actions.values(), *self._streamed.values(), *(entry.order for entry in entries))
        self._offered = {ref.digest for each in named for ref in blobs_of(each)}
        await asyncio.to_thread(self._store.keep, OFFERED, json.dumps(sorted(self._offered)))
        open_ = [entry.order for entry in entries if entry.status is OrderStatus.OPEN]
        timed = (msgspec.structs.replace(order, left_s=allowed_s[order.device_id]) for order in open_)
        self._book.add(timed, time.monotonic())
        for order in open_:
            if (order.device_id, order.id) in self._taking:  # its report came before
                self._book.hold(order.id)

    def _send_due(self) -> None:
        """Send the orders that are due, and let those expire whose time is over."""
        due = self._book.due(time.monotonic())
        for order in due.expired:
            self._give_up(order)
            self._background.spawn(self._close(Entry(order=order, status=OrderStatus.EXPIRED, reason=EXPIRED)))
        for order in due.sent:
            self._send(order)

    async def _wait(self) -> None:
        """Wait until something happens or an order is due."""
        delay = max(min(self._book.next_wakeup(), self._look_at) - time.monotonic(), 0.01)
        self._something_happened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._or_failure(self._something_happened.wait())
        if time.monotonic() >= self._look_at:
            await self.look()
        self._send_due()

    async def look(self) -> None:
        """Learn which orders are closed, here and by intakes, and hold what they have brought."""
        self._look_at = time.monotonic() + LOOK_AT_STORE_S
        entries = await asyncio.to_thread(self._store.closed_since, self._arrival)
        self._arrival = max([self._arrival, *(entry.arrival for entry in entries)])
        self._note_arrived(entries)

    def _note_arrived(self, entries: Iterable[Entry]) -> None:
        """Process the orders that were closed, here or by intakes, in the order of the store."""
        for entry in entries:
            if entry.status is not OrderStatus.OPEN:
                self._give_up(entry.order)
                self._closed(entry)
                if entry.order.id in self._streamed:
                    self._arrived[entry.order.id] = entry

    def _closed(self, entry: Entry) -> None:
        order = entry.order
        if not self._book.close(order.id):
            return
        if order.id in self._streamed:  # the store says when: an intake may have closed another one before it
            self._hold_uploads(entry)
            self._look_at = 0.0
        elif order.id in self._open:
            self._open.remove(order.id)
            self._answered[order.device_id] = entry
        self._something_happened.set()
        told = {"device": order.device_id, "label": order.label}
        if entry.report is None:
            late = entry.status is OrderStatus.EXPIRED
            event, reason = "order_expired" if late else "report_rejected", entry.reason
            self._observe("closed", {**told, "reason": reason, "late": late})
        else:
            event, reason = f"order_{entry.report.outcome}", _trouble(entry.report)
            self._observe("answer", told | self._told(entry.report, self._actions[order.id]))
        if reason:
            log.warning("event=%s device=%s order=%s reason=%r", event, order.device_id, order.id, reason)
            self._note_problem(order.device_id, reason)

    def _answer(self, entry: Entry) -> Answer:
        order, report = entry.order, entry.report
        if report is None:
            return Answer(order.device_id, None, round=order.round)
        return Answer(order.device_id, read_result(report, self._actions[order.id]), report.seconds, order.round)

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors durably."""
        pieces = codecs.pieces(tensors) if codec_ is Codec.FLOAT32 else [codecs.encode(tensors, codec_)]
        size_bytes = sum(len(piece) for piece in pieces)
        return BlobRef(digest=self._store.blobs.put(*pieces), size_bytes=size_bytes, codec=codec_)

    def put_model(self, model: Model, layout: Layout) -> BlobRef:
        """Store a model durably."""
        return self.put(unflatten(model, layout))

    def put_bytes(self, data: bytes) -> BlobRef:
        """Store a file."""
        return BlobRef(digest=self._store.blobs.put(data), size_bytes=len(data))

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """Decode a model or an accepted update."""
        return codecs.decode(self._store.blobs.get(ref.digest), ref.codec, layout, again=True)

    def get_bytes(self, ref: BlobRef) -> bytes:
        """A blob."""
        return self._store.blobs.get(ref.digest)

    def take_counts(self) -> dict[str, int]:
        """Since the last call: payload bytes up and down, and refusals by name."""
        up, down = self._transport.bytes_received, self._transport.bytes_sent
        before_up, before_down = self._traffic
        self._traffic = (up, down)
        counted, self._counted = self._counted, Counter()
        return {"bytes_up": up - before_up, "bytes_down": down - before_down, **counted}

    # ------------------------------------------------------------------------------------------------------- inwards

    def _heard(self, device: str, inbound: Inbound) -> None:
        if not (inbound.retained and self.registry.is_away(device)):
            self.registry.heard(device, time.time())

    def _explained(self, error: ProtocolError, device: str, inbound: Inbound) -> ProtocolError:
        if error.name == "replayed" and inbound.topic.endswith("/status"):
            self.registry.doubt(device)
        if error.name == "version" and is_outdated(inbound.payload):
            return ProtocolError("version", outdated(device))
        return error

    def _refuse(self, error: ProtocolError, device: str, topic: str) -> None:
        super()._refuse(error, device, topic)
        self._counted[f"refused.{error.name}"] += 1  # stored with the round: a flood must not become a flood of writes
        self.last_refused[error.name] = f"{device}: {error}"
        if error.name not in SAYS_NOTHING:
            self._note_problem(device, str(error))

    def _note_problem(self, device: str, reason: str) -> None:
        """Report a problem: at once as an event, after the round in the status."""
        problem = Problem(round=self._round, reason=reason)
        if self.problems.get(device) != problem and self._keep_problem(device, problem):
            self._observe("problem", {"device": device, "round": self._round, "reason": reason})

    def _keep_problem(self, device: str, problem: Problem) -> bool:
        """Keep a problem of a known device, or of one of the first unknown ones; False: it is not kept."""
        if device not in self.problems and not self.registry.knows(device):
            if len(self._strangers) >= MAX_STRANGERS:
                return False
            self._strangers.add(device)
        self.problems[device] = problem
        return True

    def _on_status(self, device: str, inbound: Inbound) -> None:
        status = decode(inbound.payload, Status)
        if device in self.problems and outdated(device) in self.problems[device].reason:
            del self.problems[device]  # it was updated
        if status.site is not None and self._members and not self._members.admits(device, Role.RELAY):
            raise ProtocolError("certificate", f"{device} says that it is a relay, and its certificate is a device's")
        before = self.registry.presence_of(device)
        appeared = self.registry.on_status(device, status, time.time())
        if self.registry.is_twice(device):
            since = [f"{i} since {in_words(at)}" for i, at in self.registry.twins(device).items()]
            self._note_problem(device, f"{TWICE}. Incarnations: {', before it '.join(since)}")
        if before != status.presence:
            self._observe("device", {"device": device, "presence": status.presence})
        for order in self._book.appeared(device, time.monotonic()) if appeared else ():
            self._send(order)

    # ------------------------------------------------------------------------------------------------------- members

    async def _members_changed(self) -> None:
        """Drop devices that no longer belong."""
        for device in self.registry.presence():
            if not self._admits(device):
                log.warning("event=revoked device=%s", device)
                self._note_problem(device, "revoked: it does not belong to the federation any more")
                self.registry.forget(device)
        await self._tell_revocations()

    async def _tell_revocations(self) -> None:
        """Publish the revocations: devices must learn of a revoked coordinator."""
        assert isinstance(self._signed, Signed)
        if revocations := self._signed.authority.revocations:
            if len(revocations) > MAX_REVOCATIONS_BYTES:
                text = "event=revocations_not_told bytes=%d reason=%r"
                log.error(text, len(revocations), TOO_LONG)
                return
            await self._publish(self._topics.revocations, revocations, retain=True)

    def _second_came(self, claim: Claim) -> None:
        """Say that another coordinator of this federation is at the broker, which has to end."""
        log.error("event=second_coordinator detail=%r", f"{told(claim)}: it is told to end")
        self.second = {"where": claim.where, "incarnation": claim.incarnation, "since": claim.since, "at": time.time()}
        self._observe("second_coordinator", self.second)

    async def _tell_time(self) -> None:
        """Publish our time and version while connected: devices compare theirs (`fedge doctor`)."""
        topic = self._topics.beacon
        while True:
            beacon = Beacon(at=time.time(), fedge_version=__version__)
            await self._publish(topic, self._signed.seal(topic, encode(beacon)), retain=True)
            await asyncio.sleep(BEACON_S)

    # -------------------------------------------------------------------------------------------------- from devices

    def _on_context(self, device: str, inbound: Inbound) -> None:
        self.registry.on_context(device, decode(inbound.payload, Context), time.time())

    def _on_health(self, device: str, inbound: Inbound) -> None:
        self.registry.on_health(device, decode(inbound.payload, Health))

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._sender.want_of(device, inbound.payload, self._topics)

    def _order(self, report: Report) -> Order | None:
        if (order := self._book.order(report.order_id)) is not None:
            require_own(order, report)
            self._book.hold(order.id)
        return order

    def _lost(self, report: Report) -> None:
        super()._lost(report)
        self._note_problem(report.device_id, f"the broker lost {report.again} copies of its report: {CHECK_LOST}")

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Pass on an event for people."""
        self._observe(event, dict(fields))

    def _told(self, report: Report, action: Action) -> dict[str, Any]:
        """The public part of a report; `accuracy`: of the start model, if reported."""
        told: dict[str, Any] = {"result": str(report.outcome), "seconds": report.seconds}
        if report.outcome is Outcome.DONE:
            accuracy = getattr(read_result(report, action), "val_accuracy", None)
            return told if accuracy is None else {**told, "accuracy": accuracy}
        return told

    def _send(self, order: Order) -> None:
        unknown = self.registry.incarnation(order.device_id) is None
        if not self._admits(order.device_id) or (unknown and isinstance(self._signed, Signed)):
            return  # sent when it reappears, if it may have it
        if self.registry.is_away(order.device_id):
            return  # likewise: the broker need not hold what is repeated for hours
        log.debug("event=order_sent order=%s device=%s", order.id, order.device_id)
        key = order.device_id, order.id
        if key not in self._under_way and len(self._under_way) < MAX_UNDER_WAY:
            self._under_way.add(key)
            self._background.spawn(self._deliver(key, order))

    async def _deliver(self, key: tuple[str, str], order: Order) -> None:
        topic = self._topics.agent(order.device_id, "orders")
        payload = self._seal(topic, encode(order), order.device_id)
        try:
            await self._publish(topic, payload, expires_in_s=max(int(order.left_s), 1))
        finally:
            self._under_way.discard(key)

    def _incarnation(self, device: str) -> str:
        return self.registry.incarnation(device) or ""

    def norms(self, ref: BlobRef, layout: Layout) -> codecs.Norms:
        """As measured on arrival for updates of this step; others are read."""
        return self._uploads.norms.get(ref) or codecs.check(self._store.blobs.get(ref.digest), ref.codec, layout)

    def _model_file(self, digest: str) -> Path | None:
        """Devices get only what orders name, since the updates of others are in the same folder."""
        return self._store.blobs.bring(digest) if digest in self._offered else None

    # --------------------------------------------------------------------------------------------------------- tasks

    async def rest(self, seconds: float) -> None:
        """Wait for this time, or until a background task fails, which is raised."""
        await self._or_failure(asyncio.sleep(seconds))

    async def _or_failure(self, work: Awaitable[Any]) -> Any:
        """Wait for something, or until a background task fails, which is raised."""
        waiting = asyncio.ensure_future(work)
        try:
            await asyncio.wait({waiting, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return waiting.result()
        finally:
            waiting.cancel()


def _kept_in(store: Store) -> dict[str, Kept]:
    """The devices' statuses as last stored; empty if another version of fedge wrote them."""
    with contextlib.suppress(*MALFORMED):
        return msgspec.json.decode(store.recall(DEVICES) or "{}", type=dict[str, Kept])
    return {}


def outdated(device: str) -> str:
    """Advice about a device whose agent is of fedge 0.1."""
    return (
        f"its agent is of fedge 0.1, which this coordinator does not understand: update fedge on {device} to {NEEDED}"
    )


def _trouble(report: Report | None) -> str:
    """Why a device did not do its order; empty: it did, or gave no reason."""
    if report is None or report.outcome is Outcome.DONE:
        return ""
    return f"{report.outcome}: {(report.why or Why.OTHER).words}; its log says more"
