"""The states of an order on the coordinator: decided here, carried out by `coordinator.fleet.mqtt`.

Two rules: `TRANSITIONS` holds every change of an order's status, and nothing here does IO or reads a clock. The shell
feeds events with the time and performs the returned actions **in order**: what must survive a kill -9 (`Accept`,
`Reject`, `Expire`) is committed before it is published (`Tell`).

    OPEN ──sent──▶ SENT ──reported──▶ CHECKING ──good──▶ ACCEPTED
     │               │                  │  └─────bad───▶ REJECTED
     └────expired────┴─────expired──────┘──────────────▶ EXPIRED

An intake, which is another process, may close an order in any status, as the store then shows (`Closed`).

An order is repeated until its report arrives. A device repeats its report until it has the verdict. A report for a
closed order changes nothing here; the shell answers it from the store.

Orders carry the time left for them; the book counts it by a monotonic clock.

An event costs O(log n) for n orders: a heap holds when each is due, and stale entries are dropped when they come up.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final

import msgspec

from fedge.errors import ProtocolError
from fedge.messages import Ack, Order, Report

FIRST_RESEND_S: Final = 2.0
LAST_RESEND_S: Final = 30.0
"""An order is repeated after 2, 4, 8, ... 30 s: a broker may drop it silently, a device may just be starting."""


class OrderStatus(StrEnum):
    """Status of an order. SENT and CHECKING exist only in this process: the store has OPEN."""

    OPEN = "open"  # durable, not sent yet
    SENT = "sent"  # at least once
    CHECKING = "checking"  # the report arrived; its update is being fetched and checked
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"


class Cause(Enum):
    """What moves an order from one status to the next."""

    SENT = auto()
    REPORTED = auto()
    GOOD = auto()
    BAD = auto()
    EXPIRED = auto()


TRANSITIONS: Final[Mapping[tuple[OrderStatus, Cause], OrderStatus]] = {
    (OrderStatus.OPEN, Cause.SENT): OrderStatus.SENT,
    (OrderStatus.SENT, Cause.SENT): OrderStatus.SENT,
    (OrderStatus.SENT, Cause.REPORTED): OrderStatus.CHECKING,
    (OrderStatus.CHECKING, Cause.GOOD): OrderStatus.ACCEPTED,
    (OrderStatus.CHECKING, Cause.BAD): OrderStatus.REJECTED,
    (OrderStatus.OPEN, Cause.GOOD): OrderStatus.ACCEPTED,  # this and the next three: by an intake
    (OrderStatus.SENT, Cause.GOOD): OrderStatus.ACCEPTED,
    (OrderStatus.OPEN, Cause.BAD): OrderStatus.REJECTED,
    (OrderStatus.SENT, Cause.BAD): OrderStatus.REJECTED,
    (OrderStatus.OPEN, Cause.EXPIRED): OrderStatus.EXPIRED,
    (OrderStatus.SENT, Cause.EXPIRED): OrderStatus.EXPIRED,
    (OrderStatus.CHECKING, Cause.EXPIRED): OrderStatus.EXPIRED,
}

WAITING: Final = frozenset({OrderStatus.OPEN, OrderStatus.SENT})
CLOSED: Final = frozenset({OrderStatus.ACCEPTED, OrderStatus.REJECTED, OrderStatus.EXPIRED})


# ------------------------------------------------------------------------------------------------------- events in


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """A report arrived, for the first time or again."""

    report: Report


@dataclass(frozen=True, slots=True)
class Checked:
    """The contents of a report have arrived and are checked; `error` says what is wrong."""

    order_id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The store shows the order as closed: an intake has accepted or rejected its report."""

    order_id: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class DeviceAppeared:
    """A device is present (again); it may have missed what was sent before."""

    device_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; the shell sends one no later than `OrderBook.next_wakeup`."""


Event = ReportReceived | Checked | Closed | DeviceAppeared | Tick


# ------------------------------------------------------------------------------------------------------ actions out


@dataclass(frozen=True, slots=True)
class Send:
    """Publish the order; its `left_s` counts from now."""

    order: Order


@dataclass(frozen=True, slots=True)
class Check:
    """Fetch and check the blobs of the report; answer with `Checked`."""

    order: Order
    report: Report


@dataclass(frozen=True, slots=True)
class Accept:
    """Commit the report."""

    report: Report


@dataclass(frozen=True, slots=True)
class Reject:
    """Commit the rejection of the report."""

    order: Order
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Commit that no report came in time."""

    order: Order


@dataclass(frozen=True, slots=True)
class Tell:
    """Publish the verdict on a report."""

    ack: Ack


Action = Send | Check | Accept | Reject | Expire | Tell


# ------------------------------------------------------------------------------------------------------ the machine


@dataclass(slots=True)
class _Held:
    order: Order
    place: int  # in the book
    deadline: float
    status: OrderStatus = OrderStatus.OPEN
    report: Report | None = None
    resend_at: float = 0.0
    resend_after_s: float = FIRST_RESEND_S
    entered_at: float = math.nan  # time of its valid entry in the heap

    @property
    def due_at(self) -> float:
        """When the next thing is due without an event; NaN: nothing."""
        if self.status in CLOSED:
            return math.nan
        return min(self.resend_at, self.deadline) if self.status in WAITING else self.deadline


class OrderBook:
    """The open orders of one step, whose `left_s` counts from `now`. Only `handle` changes them."""

    def __init__(self, orders: Iterable[Order], now: float = 0.0) -> None:
        self._held = {order.id: _Held(order, place, now + order.left_s) for place, order in enumerate(orders)}
        self._in_place = list(self._held.values())
        self._of_device: defaultdict[str, list[_Held]] = defaultdict(list)
        self._n_open = len(self._held)
        self._due: list[tuple[float, int]] = []  # heap of (due at, place)
        for held in self._in_place:
            self._of_device[held.order.device_id].append(held)
            self._enter(held)

    def status(self, order_id: str) -> OrderStatus | None:
        """An order's status; None: it is not of this step."""
        held = self._held.get(order_id)
        return held.status if held else None

    @property
    def done(self) -> bool:
        """Whether all orders are closed."""
        return self._n_open == 0

    def next_wakeup(self) -> float | None:
        """When the next `Tick` is due, by the clock of `handle`; None: nothing is open."""
        while self._due and self._in_place[self._due[0][1]].entered_at != self._due[0][0]:
            heapq.heappop(self._due)  # stale
        return self._due[0][0] if self._due else None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event; returns the actions, in order.

        Args:
            event: what happened.
            now: seconds by a monotonic clock.

        Raises:
            ProtocolError: `unknown-order` or `foreign-id`; nothing changed.
        """
        match event:
            case ReportReceived(report):
                actions = self._reported(report, now)
            case Checked(order_id, error):
                actions = self._checked(order_id, error)
            case Closed(order_id, accepted):
                self._move(self._held[order_id], Cause.GOOD if accepted else Cause.BAD)
                actions = []
            case DeviceAppeared(device_id):
                actions = self._appeared(device_id, now)
            case Tick():
                actions = []
        return actions + self._due_by(now)

    def _appeared(self, device_id: str, now: float) -> list[Action]:
        """Send the device all its open orders at once, and restart their repeat intervals."""
        actions: list[Action] = []
        for held in self._of_device.get(device_id, ()):
            if held.status in WAITING and now < held.deadline:
                held.resend_after_s = FIRST_RESEND_S
                actions.append(self._send(held, now))
        return actions

    def _move(self, held: _Held, cause: Cause) -> None:
        held.status = TRANSITIONS[held.status, cause]
        self._n_open -= held.status in CLOSED
        self._enter(held)

    def _enter(self, held: _Held) -> None:
        """Enter the order's due time into the heap; an earlier entry goes stale."""
        if held.due_at != held.entered_at:
            held.entered_at = held.due_at
            if not math.isnan(held.due_at):
                heapq.heappush(self._due, (held.due_at, held.place))

    def _send(self, held: _Held, now: float) -> Action:
        held.resend_at = now + held.resend_after_s
        held.resend_after_s = min(2 * held.resend_after_s, LAST_RESEND_S)
        self._move(held, Cause.SENT)
        return Send(msgspec.structs.replace(held.order, left_s=held.deadline - now))

    def _due_by(self, now: float) -> list[Action]:
        """Close what is past its deadline, then repeat what has waited long enough; each in the book's order."""
        places: list[int] = []
        while (due_at := self.next_wakeup()) is not None and due_at <= now:
            _, place = heapq.heappop(self._due)
            self._in_place[place].entered_at = math.nan
            places.append(place)
        due = [self._in_place[place] for place in sorted(places)]
        expired = [held for held in due if held.deadline <= now]
        for held in expired:
            self._move(held, Cause.EXPIRED)
        return [
            *(Expire(held.order) for held in expired),
            *(self._send(held, now) for held in due if held.status in WAITING),
        ]

    def _reported(self, report: Report, now: float) -> list[Action]:
        held = self._held.get(report.order_id)
        if held is None:
            raise ProtocolError("unknown-order", f"{report.device_id} reports {report.order_id}")
        if held.order.device_id != report.device_id:
            raise ProtocolError("foreign-id", f"{report.device_id} reports an order of {held.order.device_id}")
        if held.status not in WAITING or held.deadline <= now:
            return []
        if held.status is OrderStatus.OPEN:  # sent before a restart
            self._move(held, Cause.SENT)
        self._move(held, Cause.REPORTED)
        held.report = report
        return [Check(held.order, report)]

    def _checked(self, order_id: str, error: str | None) -> list[Action]:
        held = self._held[order_id]
        if held.status is not OrderStatus.CHECKING:  # expired meanwhile
            return []
        assert held.report is not None
        if error is None:
            self._move(held, Cause.GOOD)
            return [Accept(held.report), Tell(verdict(held.order, accepted=True))]
        self._move(held, Cause.BAD)
        return [Reject(held.order, error), Tell(verdict(held.order, accepted=False, reason=error))]


def verdict(order: Order, *, accepted: bool, reason: str = "") -> Ack:
    """The message to a device about its report."""
    return Ack(order_id=order.id, device_id=order.device_id, accepted=accepted, reason=reason[:1000])
