"""Follows open orders: sends and repeats orders, learns how they end, and keeps the answers of streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.fleet.fleet import Answer
from coordinator.fleet.mqtt.intake import MAX_UNDER_WAY, Assignment, require_own
from coordinator.fleet.mqtt.orders import OrderBook
from coordinator.fleet.mqtt.presence import Presence
from coordinator.fleet.problems import prolong_streak
from coordinator.store.records import Entry, OrderStatus
from coordinator.store.store import EXPIRED, OFFERED, Store
from fedge.membership.signed_messages import Signed
from fedge.models.weights import find_device_weights
from fedge.steps.contract import Action, Refusal, Unsupported, decode_action, decode_result
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import BlobRef, Order, Outcome, Report, Why, encode_message, iterate_blobs
from fedge.wire.topics import MODELS
from fedge.wire.transfer.sender import Sender

log = logging.getLogger("fedge.coordinator")

LOOK_AT_STORE_S: Final = 0.5
"""Seconds between two looks in the store for orders that intakes have closed."""


class Following(Presence):
    """A presence that also follows the stored orders of the present step and of streams, until they end."""

    def __init__(
        self, broker: BrokerSettings, store: Store, about: Assignment, observe: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(broker, store, about, observe)
        self._actions: dict[str, Action] = {}  # actions of the present step and of open streams, by order
        self._book = OrderBook()  # open orders of the present step, and of streams
        self._answered: dict[str, Entry] = {}  # closed orders of the present step, by device
        self._open: set[str] = set()  # orders of the present step that are open
        self._streamed: dict[str, Order] = {}  # orders of streams whose answers are not yielded yet, by id
        self._arrived: dict[str, Entry] = {}  # the closed ones of these, in the store's order
        self._held: dict[str, frozenset[BlobRef]] = {}  # the uploads of streamed orders
        self._arrival = store.get_last_arrival()  # number of the last closed order known to us
        self._something_happened = asyncio.Event()
        self._under_way: set[tuple[str, str]] = set()  # device and order of messages that are being published
        self._look_at = 0.0
        self._offered: set[str] = set()
        self._sender = Sender(self._transport, self._find_model)

    async def _subscribe(self) -> None:
        await super()._subscribe()
        wants = self._topics.make_shared_filter(MODELS, self._secret, self._topics.make_agent_topic("+", "wants"))
        await self._transport.subscribe(wants, self._make_handler(self._on_want))

    async def _follow(self, entries: Collection[Entry], allowed_s: Mapping[str, float]) -> None:
        """Start to follow the open orders; from now on devices may fetch the models that these orders name."""
        named = (*self._actions.values(), *self._streamed.values(), *(entry.order for entry in entries))
        self._offered = {ref.digest for each in named for ref in iterate_blobs(each)}
        await asyncio.to_thread(self._store.put_value, OFFERED, json.dumps(sorted(self._offered)))
        open_ = [entry.order for entry in entries if entry.status is OrderStatus.OPEN]
        timed = (msgspec.structs.replace(order, left_s=allowed_s[order.device_id]) for order in open_)
        self._book.add(timed, time.monotonic())
        for order in open_:
            if (order.device_id, order.id) in self._taking:  # its report is already being taken
                self._book.stop_repeating(order.id)

    def _send_due(self) -> None:
        """Send the orders that are due; let orders whose time is over expire."""
        due = self._book.take_due(time.monotonic())
        for order in due.expired:
            self._cancel_fetch(order)
            self._background.spawn(self._close(Entry(order=order, status=OrderStatus.EXPIRED, reason=EXPIRED)))
        for order in due.sent:
            self._send(order)

    async def _wait(self) -> None:
        """Wait until something happens or an order is due."""
        delay = max(min(self._book.get_next_wakeup(), self._look_at) - time.monotonic(), 0.01)
        self._something_happened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wait_or_fail(self._something_happened.wait())
        if time.monotonic() >= self._look_at:
            await self.collect_closed()
        self._send_due()

    async def collect_closed(self) -> None:
        """Find in the store the orders that this process or intakes have closed, and keep their answers."""
        self._look_at = time.monotonic() + LOOK_AT_STORE_S
        entries = await asyncio.to_thread(self._store.get_closed_since, self._arrival)
        self._arrival = max([self._arrival, *(entry.arrival for entry in entries)])
        self._process_closed(entries)

    def _process_closed(self, entries: Iterable[Entry]) -> None:
        """Process orders that have been closed, in the order of the store."""
        for entry in entries:
            if entry.status is not OrderStatus.OPEN:
                self._cancel_fetch(entry.order)
                self._handle_closed(entry)
                if entry.order.id in self._streamed:
                    self._arrived[entry.order.id] = entry

    def _handle_closed(self, entry: Entry) -> None:
        order = entry.order
        if not self._book.close(order.id):
            return
        if order.id in self._streamed:  # yielded in the store's order; an intake may have closed another before
            self._retain_uploads(entry)
            self._look_at = 0.0
        elif order.id in self._open:
            self._open.remove(order.id)
            self._answered[order.device_id] = entry
        self._something_happened.set()
        fields = {"device": order.device_id, "label": order.label}
        if entry.report is None:
            late = entry.status is OrderStatus.EXPIRED
            event, reason = "order_expired" if late else "report_rejected", entry.reason
            self._observe("closed", {**fields, "reason": reason, "late": late})
        else:
            event, reason = f"order_{entry.report.outcome}", explain_failure(entry.report)
            self._observe("answer", fields | self._summarise_report(entry.report, self._actions[order.id]))
        if not reason:
            self.failing.pop(order.device_id, None)
        elif not self.registry.is_away(order.device_id):
            before = self.failing.get(order.device_id)
            self.failing[order.device_id] = prolong_streak(before, reason, time.time())
        if reason:
            log.warning("event=%s device=%s order=%s reason=%r", event, order.device_id, order.id, reason)
            self._record_problem(order.device_id, reason)

    # ------------------------------------------------------------------------------------------------------- streams

    def _retain_orders(self, entries: Iterable[Entry]) -> None:
        """Keep streamed orders, with their uploads, until their answers are yielded."""
        for entry in entries:
            self._streamed[entry.order.id] = entry.order
            self._retain_uploads(entry)

    def _retain_uploads(self, entry: Entry) -> None:
        if entry.report is not None:
            action = self._actions[entry.order.id]
            result = decode_result(entry.report, action)
            uploads = () if isinstance(result, Refusal) else action.uploads(result, self._layout)
            self._held[entry.order.id] = frozenset(uploads)

    def _release_uploads(self, order_id: str) -> None:
        del self._arrived[order_id], self._streamed[order_id], self._actions[order_id]
        for ref in self._held.pop(order_id, ()):
            self._uploads.norms.pop(ref, None)

    def get_busy_devices(self) -> frozenset[str]:
        """Return the devices with a streamed order whose answer has not been yielded."""
        return frozenset(order.device_id for order in self._streamed.values())

    def expire_streams(self) -> None:
        """Let open streamed orders expire, since nobody will take their answers."""
        for order in self._streamed.values():
            self._cancel_fetch(order)
        self._store.expire_streams(time.time())
        self._book = OrderBook()
        for known in (self._streamed, self._arrived, self._actions, self._held):
            known.clear()

    def find_needed_blobs(self) -> set[str]:
        """Return the digests of the tensors that streamed orders name, of all uploads in use, and of frozen weights."""
        named = {ref.digest for i, order in self._streamed.items() for ref in iterate_blobs([order, self._actions[i]])}
        named |= {ref.digest for ref in iterate_blobs(find_device_weights(self.task))}
        return named | {ref.digest for refs in (*self._held.values(), *self._brought.values()) for ref in refs}

    def find_accepted_blobs(self, number: int) -> set[str]:
        """Return the digests of the uploads accepted for round `number`, and of tensors that open older orders name."""
        found: set[str] = set()
        for entry in (*self._store.get_entries(number), *self._store.get_streamed(number)):
            action = decode_action(entry.order, self._steps)
            if isinstance(action, Unsupported):
                continue
            if entry.report is not None and not isinstance(result := decode_result(entry.report, action), Refusal):
                found |= {ref.digest for ref in action.uploads(result, self._layout)}
            elif entry.status is OrderStatus.OPEN and entry.order.round < number:
                found |= {ref.digest for ref in iterate_blobs([entry.order, action])}
        return found

    # ----------------------------------------------------------------------------------------------------- to devices

    def _on_appearance(self, device: str) -> None:
        for order in self._book.resend(device, time.monotonic()):
            self._send(order)

    def _send(self, order: Order) -> None:
        unknown = self.registry.get_incarnation(order.device_id) is None
        if not self._admits(order.device_id) or (unknown and isinstance(self._signed, Signed)):
            return  # sent when the device reappears, if the device may have it
        if self.registry.is_away(order.device_id):
            return  # sent when it reappears; until then the broker would pile up repeated orders
        log.debug("event=order_sent order=%s device=%s", order.id, order.device_id)
        key = order.device_id, order.id
        if key not in self._under_way and len(self._under_way) < MAX_UNDER_WAY:
            self._under_way.add(key)
            self._background.spawn(self._deliver(key, order))

    async def _deliver(self, key: tuple[str, str], order: Order) -> None:
        topic = self._topics.make_agent_topic(order.device_id, "orders")
        payload = self._seal(topic, encode_message(order), order.device_id)
        try:
            await self._publish(topic, payload, expires_in_s=max(int(order.left_s), 1))
        finally:
            self._under_way.discard(key)

    def _on_want(self, device: str, inbound: Inbound) -> None:
        self._sender.handle_want(device, inbound.payload, self._topics)

    def _find_model(self, digest: str) -> Path | None:
        """Find a model that orders name. No other blob is found, since the same folder has the devices' updates."""
        return self._store.blobs.fetch(digest) if digest in self._offered else None

    # -------------------------------------------------------------------------------------------------- from devices

    def _find_order(self, report: Report) -> Order | None:
        if (order := self._book.find_order(report.order_id)) is not None:
            require_own(order, report)
            self._book.stop_repeating(order.id)
        return order

    def _answer(self, entry: Entry) -> Answer:
        order, report = entry.order, entry.report
        if report is None:
            return Answer(order.device_id, None, round=order.round)
        return Answer(order.device_id, decode_result(report, self._actions[order.id]), report.seconds, order.round)

    def _summarise_report(self, report: Report, action: Action) -> dict[str, Any]:
        """Return the public part of a report. `accuracy` is that of the start model, if reported."""
        fields: dict[str, Any] = {"result": str(report.outcome), "seconds": report.seconds}
        if report.outcome is Outcome.DONE:
            accuracy = getattr(decode_result(report, action), "val_score", None)
            return fields if accuracy is None else {**fields, "accuracy": accuracy}
        return fields


def explain_failure(report: Report | None) -> str:
    """Return why a device did not carry out its order; an empty string if it did, or if there is no report."""
    if report is None or report.outcome is Outcome.DONE:
        return ""
    return f"{report.outcome}: {(report.why or Why.OTHER).words}; its log says more"
