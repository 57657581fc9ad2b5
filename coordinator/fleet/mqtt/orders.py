"""Open orders: when each is sent, repeated and expires. Decided here, carried out by `coordinator.fleet.mqtt`.

Nothing here does IO or reads a clock. The store holds the truth about an order: what closes the order first, a report's
verdict or the deadline, here or in an intake, is final.

An order is repeated until its report arrives. A device repeats its report until it has the verdict.

Orders carry the time left for them; the book counts it by a monotonic clock.

An event costs O(log n) for n orders, because a heap holds when each is due. Stale entries are dropped when due.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from fedge.wire.messages import Order

FIRST_RESEND_S: Final = 2.0
LAST_RESEND_S: Final = 30.0
"""Longest pause before an order is repeated: 2, 4, 8, ... 30 s. The broker may drop it silently, or the device may be
starting."""


class DueOrders(NamedTuple):
    """The orders to send, whose `left_s` counts from now, and the orders whose time is over."""

    sent: list[Order]
    expired: list[Order]


@dataclass(slots=True)
class _OpenOrder:
    order: Order
    deadline: float
    resend_at: float
    resend_after_s: float = FIRST_RESEND_S

    @property
    def due_at(self) -> float:
        """The time at which the order is next due, in seconds; infinite if never."""
        return min(self.resend_at, self.deadline)


class OrderBook:
    """The open orders. Times are seconds by a monotonic clock."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenOrder] = {}
        self._of_device: defaultdict[str, dict[str, _OpenOrder]] = defaultdict(dict)
        self._heap: list[tuple[float, str]] = []  # (due at, order id)

    def add(self, orders: Iterable[Order], now: float) -> None:
        """Add orders, whose `left_s` counts from `now`; they are due at once."""
        for order in orders:
            self._open[order.id] = held = _OpenOrder(order, now + order.left_s, now)
            self._of_device[order.device_id][order.id] = held
            self._schedule(held)

    def find_order(self, order_id: str) -> Order | None:
        """Return an open order; None if the order is not open, or not ours."""
        held = self._open.get(order_id)
        return held.order if held else None

    def stop_repeating(self, order_id: str) -> None:
        """Stop repeating an order, since its report is here."""
        self._open[order_id].resend_at = math.inf
        self._schedule(self._open[order_id])

    def close(self, order_id: str) -> bool:
        """Drop an order that the store shows as closed; False if it was not open here."""
        if (held := self._open.pop(order_id, None)) is None:
            return False
        del self._of_device[held.order.device_id][order_id]
        if len(self._heap) > 2 * len(self._open) + 64:  # most are stale, and may be so for a day
            self._heap = [(held.due_at, i) for i, held in self._open.items() if held.due_at < math.inf]
            heapq.heapify(self._heap)
        return True

    def get_next_wakeup(self) -> float:
        """Return when an order is next due; infinite if never."""
        while self._heap:
            at, order_id = self._heap[0]
            if order_id in self._open and self._open[order_id].due_at == at:
                return at
            heapq.heappop(self._heap)  # stale
        return math.inf

    def take_due(self, now: float) -> DueOrders:
        """Return what is due by `now`. Expired orders stay open until the store shows them as closed."""
        found = DueOrders([], [])
        while self.get_next_wakeup() <= now:
            held = self._open[heapq.heappop(self._heap)[1]]
            if held.deadline <= now:
                held.resend_at = held.deadline = math.inf
                found.expired.append(held.order)
            else:
                found.sent.append(self._mark_sent(held, now))
        return found

    def resend(self, device_id: str, now: float) -> list[Order]:
        """Return the orders to send to a device that is present (again), since it may have missed earlier messages."""
        waiting = [held for held in self._of_device.get(device_id, {}).values() if held.resend_at < math.inf]
        for held in waiting:
            held.resend_after_s = FIRST_RESEND_S
        return [self._mark_sent(held, now) for held in waiting if now < held.deadline]

    def _mark_sent(self, held: _OpenOrder, now: float) -> Order:
        held.resend_at = now + held.resend_after_s
        held.resend_after_s = min(2 * held.resend_after_s, LAST_RESEND_S)
        self._schedule(held)
        return msgspec.structs.replace(held.order, left_s=held.deadline - now)

    def _schedule(self, held: _OpenOrder) -> None:
        """Enter the order's due time into the heap; an earlier entry goes stale."""
        if held.due_at < math.inf:
            heapq.heappush(self._heap, (held.due_at, held.order.id))
