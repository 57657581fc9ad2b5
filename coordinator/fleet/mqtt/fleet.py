"""The devices of a federation over MQTT, as the fleet of a method's rounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.fleet import AcceptedUpdate, Answer, Fleet, make_order, prepare_actions, require_sendable
from coordinator.fleet.mqtt.following import Following, explain_failure
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.mqtt.pace import Paces, compute_work
from coordinator.fleet.problems import Problem
from coordinator.fleet.quarantine import LONG_UPDATE, READMITTED, Quarantine, find_quarantined
from coordinator.fleet.update_norms import AnswerScreen, ScreenedAnswers, screen_answers
from coordinator.fleet.versions import Descent
from coordinator.store.lease import RENEW_S, Lease, make_lease, release_lease, renew_lease, take_lease
from coordinator.store.records import Device, Entry, Offence, OrderStatus
from coordinator.store.store import RECALLED_ROUNDS, Store
from fedge.errors import ConfigError, ProtocolError
from fedge.membership.signed_messages import Signed
from fedge.steps.contract import Action, Refusal, Unsupported, decode_action
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, Model, unflatten
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import MAX_LEFT_S, BlobRef, Outcome

log = logging.getLogger("fedge.coordinator")

SETTLE_S: Final = 15.0
"""How long a started coordinator waits for the devices of the last round. If the broker was restarted, too, it has
forgotten the devices; they reconnect within the transport's back-off of 10 s."""
GOODBYE_S: Final = 5.0
"""Time limit for sending the last verdicts. A device without a verdict would go on repeating its report."""


class MqttFleet(Following, Fleet):
    """The `Fleet` of real devices. As an async context manager, it is connected.

    `find_quarantined`: devices left out of this round. `retired`: devices without further orders. `waiting`: number of
    devices that the round waits for; 0 if it is not waiting.
    """

    descents: dict[str, Descent] | None = None
    sites = None
    campaign = 0
    """The campaign whose introduction lets bundles into service; 0 if they enter it at once. Devices behind relays do
    not hear of introductions."""
    _goes_on = False
    """Whether the round began before this process, so that orders may be older than the process."""

    def __init__(
        self, broker: BrokerSettings, store: Store, about: Assignment, observe: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(broker, store, about, observe)
        self.quarantined: dict[str, Quarantine] = {}
        self.retired: frozenset[str] = frozenset()
        self.waiting = 0
        self._about = about
        self._paces = Paces()
        self._devices: tuple[Device, ...] = ()
        self._n_samples: dict[str, int] = {}
        self._settled_at = 0.0
        self._endless: list[asyncio.Task[None]] = []
        self._connected = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        lease = make_lease(self._store.home)
        await asyncio.to_thread(take_lease, self._store, lease)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(release_lease, self._store, lease)
            watching = self._background.spawn(self._watch_broker())  # it may be away from the beginning
            stack.callback(watching.cancel)
            self._endless.append(watching)
            looking = self._background.spawn(self._watch_certificate())
            stack.callback(looking.cancel)
            self._endless.append(looking)
            renewing = self._background.spawn(self._renew_lease(lease))
            stack.callback(renewing.cancel)
            self._endless.append(renewing)
            self._transport.adopt_protocol(await self._sole.require_sole(self._transport.settings))
            await self._sole.attach(self._transport)
            await self._subscribe()
            stack.callback(self._uploads.close)
            if isinstance(self._signed, Signed):
                self._transport.on_connect(self._publish_revocations)
            self._transport.on_connect(self._publish_time)  # last, since it runs as long as the connection
            await stack.enter_async_context(self._transport)
            await stack.enter_async_context(self._sender)
            stack.push_async_exit(self._finish)
            self._endless.append(self._background.spawn(self._store_devices_often()))
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
                while kind is None and tasks:  # a task may start another, as a commit starts its verdict
                    await asyncio.wait(tasks)
        self._background.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._sole.remove_claim()
        if kind is None or issubclass(kind, asyncio.CancelledError):
            await self._store_devices()

    async def _renew_lease(self, lease: Lease) -> None:
        """Renew the lease of the store until cancelled; another coordinator that takes it ends this one."""
        while True:
            await asyncio.sleep(RENEW_S)
            lease = await asyncio.to_thread(renew_lease, self._store, lease)

    # ----------------------------------------------------------------------------------------------------------- rounds

    async def start_round(self, number: int, at_least: int) -> None:
        """Start a round with a snapshot of devices, taken once `at_least` can be asked, or with the stored snapshot."""

        async def wait_for_enough() -> None:
            await self._wait_for_last(number)
            if len(self.registry.list_online()) < at_least:
                self.waiting = at_least
                self._observe("waiting", {"round": number, "devices": at_least})
            await self._wait_or_fail(self.registry.wait_for_devices(at_least))
            self.waiting = 0

        await self._enter(number, wait_for_enough)
        self._observe("round_begun", {"round": number, "devices": len(self._devices)})

    async def start_late_round(self, number: int, tried: Mapping[str, str], equipped: Container[str]) -> None:
        """Start a round once a device needs a bundle (`Registry.wait_for_late_joiner`), or with the stored snapshot."""
        await self._enter(number, lambda: self._wait_or_fail(self.registry.wait_for_late_joiner(tried, equipped)))

    async def _enter(self, number: int, ready: Callable[[], Awaitable[None]]) -> None:
        """Set the round's devices to those present once `ready` returns or, after a restart, the stored ones."""
        self._exclude_offenders(
            number, await asyncio.to_thread(self._store.get_offences)
        )  # quarantined ones, from now on
        devices = await asyncio.to_thread(self._store.get_round_devices, number)
        self._goes_on = devices is not None
        if devices is None:
            await ready()
            devices = self._find_present()
            await asyncio.to_thread(self._store.start_round, number, devices, time.time())
        await self._set_devices(number, devices)

    def retire(self, ids: Iterable[str]) -> None:
        """Give these devices no more orders, from now on, and all others orders again."""
        if self.retired != (retired := frozenset(ids)):
            self.retired = retired
            self.registry.exclude({*self.quarantined, *retired})

    def _find_present(self) -> tuple[Device, ...]:
        """Return the devices of a round that begins now."""
        return *self.registry.list_online(), *self.registry.list_inference_only()

    def _exclude_offenders(self, number: int, offences: Iterable[Offence]) -> None:
        """Exclude quarantined devices from this round, and log each quarantine once, with the evidence."""
        found = find_quarantined(offences, number)
        for i, quarantine in found.items():
            if i not in self.quarantined:
                names = ", ".join(f"{o.name} in round {o.round}" for o in quarantine.evidence)
                reason = f"in quarantine until round {quarantine.until}: {names}"
                log.warning("event=quarantined device=%s until=%d evidence=%r", i, quarantine.until, names)
                self._record_problem(i, reason)
        for i in self.quarantined.keys() - found.keys():
            log.warning("event=readmitted device=%s round=%d", i, number)
        self.quarantined = found
        self.registry.exclude({*found, *self.retired})
        for i in sorted({*found, *self.retired}):
            self._observe(
                "left_out",
                {"device": i, "round": number, "reason": "retired" if i in self.retired else "in quarantine"},
            )

    def readmit(self, ids: Iterable[str]) -> None:
        """Readmit devices with a clean slate, from the next round on.

        Raises:
            ConfigError: there is no evidence against a device, because the name is wrong or it was never left out.
        """
        known = {offence.device_id: offence for offence in self._store.get_offences()}
        for i in ids:
            if i not in known:
                raise ConfigError(f"{i} cannot be readmitted: there is no evidence against a device of that name")
            last = known[i].round
            self._store.record_offence(
                Offence(device_id=i, round=last, name=READMITTED, detail="by the command line")
            ).result()

    async def _set_devices(self, number: int, devices: tuple[Device, ...]) -> None:
        """Set the round's devices. After a start, recall their speed, problems and open orders."""
        earlier: list[Entry] = []
        if self._round == 0:
            for past in range(max(number - RECALLED_ROUNDS, 1), number + 1):
                then, entries = await asyncio.to_thread(
                    lambda n: (self._store.get_round_devices(n), self._store.get_entries(n)), past
                )
                self._recall(past, then or (), entries)
            earlier = [e for e in await asyncio.to_thread(self._store.get_streamed, number) if e.order.round < number]
        if isinstance(self._signed, Signed):  # so that the next process refuses replays, too
            heard = msgspec.json.encode(self._signed.heard).decode()
            await asyncio.to_thread(self._store.put_value, "heard", heard)
        self._round, self._devices = number, devices
        self._n_samples = {device.id: device.n_samples for device in devices}
        await self._resume(earlier)

    def _recall(self, number: int, devices: Iterable[Device], entries: Iterable[Entry]) -> None:
        """Learn from an earlier round how fast devices are, and which problems they had."""
        self._n_samples = {device.id: device.n_samples for device in devices}
        for entry in entries:
            order, report = entry.order, entry.report
            action = decode_action(order, self._steps)
            if report is not None and report.outcome is Outcome.DONE and not isinstance(action, Unsupported):
                seconds = min(report.seconds, order.left_s)
                self._paces.record(order.device_id, self._compute_work(order.device_id, action), seconds)
            if reason := entry.reason or explain_failure(report):
                self._store_problem(order.device_id, Problem(round=number, reason=reason))

    async def _resume(self, entries: Sequence[Entry]) -> None:
        """Continue streamed orders of earlier rounds whose answers this round has not yielded yet.

        Raises:
            ConfigError: the step of an order no longer exists.
        """
        for entry in entries:
            action = decode_action(entry.order, self._steps)
            if isinstance(action, Unsupported):
                raise ConfigError(f"order {entry.order.id} cannot be continued: {action.reason}")
            self._actions[entry.order.id] = action
        self._retain_orders(entries)
        if self._streamed:
            await self._follow(entries, dict.fromkeys((entry.order.device_id for entry in entries), MAX_LEFT_S))

    async def _wait_for_last(self, number: int) -> None:
        """Wait, after a restart between rounds, for all devices of the last round, not only the first to reconnect."""
        then = await asyncio.to_thread(self._store.get_round_devices, number - 1)
        before = {device.via or device.id for device in then or ()}
        await self.wait_for_status(before, self._settled_at - asyncio.get_running_loop().time())

    def get_devices(self) -> tuple[Device, ...]:
        """Return the devices of the snapshot that train."""
        return tuple(device for device in self._devices if device.trains)

    def get_inference_devices(self) -> tuple[Device, ...]:
        """Return the devices of the snapshot that do not train."""
        return tuple(device for device in self._devices if not device.trains)

    # ----------------------------------------------------------------------------------------------------------- orders

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Write the orders, send open ones, wait for their reports or the deadlines."""
        self._uploads.norms.clear()
        began = time.monotonic()
        actions, refused = self._prepare_actions(actions)
        entries = await self._write_orders(label, actions)
        self._answered = dict(entries)
        self._open = {entry.order.id for entry in entries.values() if entry.status is OrderStatus.OPEN}
        self._send_due()
        while self._open:
            await self._wait()
        found = {i: self._answer(self._answered[i]) for i in sorted(entries)}
        for i, answer in found.items():
            self._update_pace(i, actions[i], answer, began)
            del self._actions[entries[i].order.id]
        believed = await asyncio.to_thread(screen_answers, found, actions, self._layout, self.get_norms)
        await self._record_evidence(self._round, believed)
        return dict(sorted((believed.answers | refused).items()))

    async def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Write the orders, send open ones, yield answers in the order of the store."""
        began = time.monotonic()
        actions, refused = self._prepare_actions(actions)
        entries = await self._write_orders(label, actions, streamed=True)
        self._retain_orders(entries.values())
        self._arrived.clear()
        self._process_closed(await asyncio.to_thread(self._store.get_streamed, self._round))
        guard = AnswerScreen(self._layout, self.get_norms, seen)
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
            self._update_pace(order.device_id, action, answer, began)
            believed = await asyncio.to_thread(guard.screen, answer, action)
            await self._record_evidence(order.round, believed)
            await asyncio.wrap_future(self._store.hand_out(order.id, self._round))
            self._release_uploads(order.id)
            yield believed.answers[order.device_id]

    def _prepare_actions(self, actions: Mapping[str, Action]) -> tuple[dict[str, Action], dict[str, Answer]]:
        """Return the actions to send, and immediate answers of devices that cannot or may not do them."""
        require_sendable(actions.values())
        relays = {device.via: Device(device.via, 0) for device in self._devices if device.via}
        own, refused = prepare_actions(
            relays | {device.id: device for device in self._devices}, actions, self.task, self.campaign
        )
        for i, refusal in refused.items():
            log.warning("event=not_asked device=%s step=%s reason=%r", i, actions[i].STEP, refusal.reason)
            self._record_problem(i, refusal.reason)
        return own, {i: Answer(i, refusal, round=self._round) for i, refusal in refused.items()}

    async def _write_orders(
        self, label: str, actions: Mapping[str, Action], *, streamed: bool = False
    ) -> dict[str, Entry]:
        """Write orders and open a book of the unanswered ones."""
        allowed_s = dict.fromkeys(actions, MAX_LEFT_S) if streamed else self._compute_allowed_s(actions)
        own, fingerprint = self._about, self.task.compute_fingerprint()
        entries = await asyncio.to_thread(
            self._store.write_orders,
            [
                make_order(
                    *(own.run, own.seed, self._round, label, device, fingerprint, actions[device]),
                    left_s=allowed_s[device],
                    descents=self.descents,
                    issue=own.issue,
                )
                for device in sorted(allowed_s)
            ],
            streamed=streamed,
        )
        if self._goes_on:
            self._warn_of_changes(label, entries, actions)
        self._observe("asked", {"label": label, "devices": len(entries)})
        self._actions |= {entry.order.id: actions[device] for device, entry in entries.items()}
        await self._follow(entries.values(), allowed_s)
        return entries

    def _warn_of_changes(self, label: str, entries: Mapping[str, Entry], actions: Mapping[str, Action]) -> None:
        """Warn of orders from before a restart that differ, because of other settings or another method.

        Their devices answer the earlier orders.
        """
        others = [i for i, entry in entries.items() if decode_action(entry.order, self._steps) != actions[i]]
        if others:
            text = "the round began with other settings, or the method does not repeat its orders (fedge check)"
            log.warning("event=asked_otherwise label=%s devices=%s reason=%r", label, ",".join(sorted(others)), text)

    def _compute_allowed_s(self, actions: Mapping[str, Action]) -> dict[str, float]:
        works = {i: self._compute_work(i, action) for i, action in actions.items()}
        exporting = [i for i, action in actions.items() if action.exports]
        return self._paces.compute_allowed_s(works, least_s=self._about.deadline_s, exporting=exporting)

    def _update_pace(self, device_id: str, action: Action, answer: Answer, began: float) -> None:
        """Update a device's pace; the device cannot have worked for longer than since the step began."""
        if answer.result is not None and not isinstance(answer.result, Refusal):
            longest_s = MAX_LEFT_S if self._goes_on else time.monotonic() - began
            self._paces.record(device_id, self._compute_work(device_id, action), min(answer.seconds, longest_s))

    def _compute_work(self, device_id: str, action: Action) -> float:
        return compute_work(action, self._n_samples.get(device_id, 0))

    async def _record_evidence(self, number: int, believed: ScreenedAnswers) -> None:
        """Store the evidence against devices of a round: their refused and their suspicious updates."""
        for i, error in believed.refused.items():
            self._refuse(error, i, self._topics.make_agent_topic(i, "reports"))
        found = [(i, error.name, str(error)) for i, error in believed.refused.items()]
        found += [(i, LONG_UPDATE, detail) for i, detail in believed.suspects.items()]
        new = await asyncio.gather(*(self._store_offence(i, number, name, detail) for i, name, detail in found))
        for (i, name, detail), first in zip(found, new, strict=True):
            if first and name == LONG_UPDATE:
                log.warning("event=suspect name=%s device=%s detail=%r", name, i, detail)
                self._record_problem(i, f"{name}: {detail}")

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Log and store evidence against a device; the evidence counts from the next round on."""
        self._refuse(error, device_id, self._topics.make_agent_topic(device_id, "reports"))
        self._store.record_offence(Offence(device_id=device_id, round=self._round, name=error.name, detail=str(error)))

    # ------------------------------------------------------------------------------------------------- blobs and events

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Store tensors durably."""
        pieces = codecs.encode_pieces(tensors) if codec_ is Codec.FLOAT32 else [codecs.encode(tensors, codec_)]
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
        """Return the bytes of a blob."""
        return self._store.blobs.get(ref.digest)

    def get_norms(self, ref: BlobRef, layout: Layout) -> codecs.Norms:
        """Return an update's norms, as measured on arrival for updates of this step; others are read and measured."""
        return self._uploads.norms.get(ref) or codecs.check_blob(self._store.blobs.get(ref.digest), ref.codec, layout)

    def record_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Pass on an event for people."""
        self._observe(event, dict(fields))
