"""The life of an order on the device. Decisions are made here and carried out by `edge_agent.agent`.

Nothing here does IO or reads a clock. The shell feeds events with the time, and performs the returned actions **in
order**: whatever must survive a kill -9 is written (`SaveOrder`, `SaveReport`, `Acknowledge`) before anything that
relies on it (`Run`, `Publish`). An event that does not fit the phase raises `ProtocolError` and changes nothing.

    UNKNOWN ──ordered──▶ QUEUED ──started──▶ RUNNING ──finished──▶ REPORTED ──acked──▶ ACKED
       ▲                  │   ▲                 │ expired, closed      ▲   │ evicted     │ forgotten
       │◀─────expired─────┘   │                 ▼                      │   ▼             ▼
       │                      └────stopped── STOPPING ─────finished────┘ UNKNOWN       UNKNOWN

One order runs at a time; the others wait in order of arrival. The same order arrives many times, since the coordinator
repeats it until it has the report. The order's id is its identity; only its remaining time changes (a restarted
coordinator gives more). That time is counted from receipt by a monotonic clock, so the clocks of coordinator and device
need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fedge.errors import ProtocolError
from fedge.wire.messages import Ack, Order, Report

MAX_ORDERS: Final = 16
"""Most orders held at once (waiting, running, reported). A federation has one open order per device; the rest is slack.
"""

MAX_ACKED: Final = 256
"""Most acknowledged ids remembered, so that an order that was delayed on the way is not carried out a second time."""

FIRST_RESEND_S: Final = 2.0
LAST_RESEND_S: Final = 30.0
"""Longest pause before a report is repeated: 2, 4, 8, ... 30 s. The broker may drop it silently, or the coordinator may
be restarting."""

LATER_S: Final = 1.0
"""Least delay by which a repeated order changes the order's end, since travel times vary and each change is a write."""


class Phase(Enum):
    """The phase of an order on this device."""

    UNKNOWN = auto()  # never seen, or forgotten
    QUEUED = auto()  # durable, waiting for its turn
    RUNNING = auto()  # fetching models, or in the worker
    STOPPING = auto()  # the worker was asked to stop
    REPORTED = auto()  # the report is durable, and repeated until acknowledged
    ACKED = auto()  # the coordinator's final word came; only the id is kept


class LocalEvent(Enum):
    """Events without a message."""

    STOPPED = auto()  # the running order stopped on request, without a report
    CONNECTED = auto()  # the broker is connected (again), so unacknowledged reports are repeated
    TICK = auto()  # time has passed; the shell says so no later than `Session.find_next_wakeup`
    CLOSING = auto()  # the agent shuts down, so nothing new is started


Event = Order | Ack | Report | LocalEvent
"""An order or an acknowledgement that arrived, for the first time or again; the report of the running order, whose
blobs are already durable; or an event on the device itself."""


# ------------------------------------------------------------------------------------------------------ actions out


class SaveOrder(Struct, frozen=True):
    """Write the order durably (again, if the order's end was moved); `left_s` counts from now."""

    order: Order


class Run(Struct, frozen=True):
    """Fetch what the order needs and give it to the worker; answer with its report (or `STOPPED`)."""

    order: Order


class Stop(Struct, frozen=True):
    """Make the running worker stop soon; answer with `STOPPED` (or its report)."""

    order_id: str


class SaveReport(Struct, frozen=True):
    """Write the report durably."""

    report: Report


class Publish(Struct, frozen=True):
    """Send the report."""

    report: Report


class Acknowledge(Struct, frozen=True):
    """Remember durably that this order is over; then delete it, its report and its blobs."""

    ack: Ack


class RemoveOrder(Struct, frozen=True):
    """Delete the order, and its report and blobs if there are any. `reason` is for the log."""

    order_id: str
    reason: str


Action = SaveOrder | Run | Stop | SaveReport | Publish | Acknowledge | RemoveOrder


# ------------------------------------------------------------------------------------------------------ the machine


@dataclass(slots=True)
class _OrderState:
    order: Order
    phase: Phase
    due_at: float
    report: Report | None = None
    resend_at: float = 0.0
    resend_after_s: float = FIRST_RESEND_S


class Session:
    """All orders of one device; only `handle` changes them."""

    def __init__(
        self,
        device_id: str,
        *,
        orders: Iterable[Order] = (),
        reports: Iterable[Report] = (),
        acked: Iterable[str] = (),
        now: float = 0.0,
    ) -> None:
        """Start with what survived the last run: orders (oldest first), their reports, acknowledged ids (oldest first).

        `left_s` of the orders counts from `now`. Nothing is running; the first event starts what can be started.
        """
        self._device_id = device_id
        self._closing = False
        self._held = {order.id: _OrderState(order, Phase.QUEUED, now + order.left_s) for order in orders}
        for report in reports:
            held = self._held[report.order_id]
            held.phase, held.report = Phase.REPORTED, report
        self._acked = dict.fromkeys(acked)

    # ------------------------------------------------------------------------------------------------------ looking

    def get_phase(self, order_id: str) -> Phase:
        """Return the phase of an order."""
        if order_id in self._acked:
            return Phase.ACKED
        held = self._held.get(order_id)
        return held.phase if held else Phase.UNKNOWN

    @property
    def orders(self) -> tuple[Order, ...]:
        """The orders held (waiting, running, reported), oldest first."""
        return tuple(held.order for held in self._held.values())

    def find_next_wakeup(self) -> float | None:
        """Return when an action is due next, by the clock of `handle`; None if only events matter."""
        times = [held.resend_at for held in self._held.values() if held.phase is Phase.REPORTED]
        times += [held.due_at for held in self._held.values() if held.phase in {Phase.QUEUED, Phase.RUNNING}]
        return min(times, default=None)

    # ----------------------------------------------------------------------------------------------------- deciding

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event, and return the actions in order.

        `now`: seconds by a monotonic clock.

        Raises:
            ProtocolError: `foreign-id`, `order-changed`, `queue-full` or `unknown-order`; nothing changed.
        """
        match event:
            case Order():
                actions = self._handle_order(event, now)
            case Ack():
                actions = self._handle_ack(event)
            case Report():
                actions = self._handle_report(event, now)
            case LocalEvent.STOPPED:
                actions = self._handle_stopped()
            case LocalEvent.CONNECTED:
                actions = self._publish_all(now)
            case LocalEvent.TICK:
                actions = self._publish_due(now)
            case LocalEvent.CLOSING:
                actions = self._close()
        return actions + self._expire(now) + self._start()

    def _handle_order(self, order: Order, now: float) -> list[Action]:
        if order.device_id != self._device_id:
            raise ProtocolError("foreign-id", f"order {order.id} is for {order.device_id}")
        if order.id in self._acked:
            return []
        if order.id in self._held:
            return self._handle_repeat(self._held[order.id], order, now)
        actions = self._make_room(order, now)
        self._held[order.id] = _OrderState(order, Phase.QUEUED, now + order.left_s)
        return [*actions, SaveOrder(order)]

    def _handle_repeat(self, held: _OrderState, order: Order, now: float) -> list[Action]:
        if replace(order, left_s=held.order.left_s) != held.order:
            raise ProtocolError("order-changed", f"order {order.id} came again with other contents")
        actions: list[Action] = []
        if now + order.left_s > held.due_at + LATER_S:
            held.order, held.due_at = order, now + order.left_s
            actions.append(SaveOrder(order))
        return actions if held.report is None else actions + self._publish(held, now)

    def _make_room(self, order: Order, now: float) -> list[Action]:
        """Give up the oldest report that was not requested in time, if the session is full."""
        if len(self._held) < MAX_ORDERS:
            return []
        for held in self._held.values():
            if held.phase is Phase.REPORTED and held.due_at <= now:
                return self._remove(held, "evicted")
        raise ProtocolError("queue-full", f"order {order.id}: {MAX_ORDERS} orders are held already")

    def _handle_ack(self, ack: Ack) -> list[Action]:
        if ack.device_id != self._device_id:
            raise ProtocolError("foreign-id", f"ack of {ack.order_id} is for {ack.device_id}")
        phase = self.get_phase(ack.order_id)
        if phase is Phase.ACKED:
            return []
        if phase is not Phase.REPORTED:
            raise ProtocolError("unknown-order", f"ack of {ack.order_id}, which is {phase.name.lower()}")
        del self._held[ack.order_id]
        self._acked[ack.order_id] = None
        if len(self._acked) > MAX_ACKED:
            del self._acked[next(iter(self._acked))]
        return [Acknowledge(ack)]

    def _handle_report(self, report: Report, now: float) -> list[Action]:
        held = self._held[report.order_id]
        held.phase, held.report = Phase.REPORTED, report
        return [SaveReport(report), *self._publish(held, now)]

    def _handle_stopped(self) -> list[Action]:
        """Queue the order again; in the queue it expires, unless its end was moved meanwhile."""
        running = self._find_running()
        assert running is not None
        running.phase = Phase.QUEUED
        return []

    def _stop(self, held: _OrderState) -> list[Action]:
        held.phase = Phase.STOPPING
        return [Stop(held.order.id)]

    def _remove(self, held: _OrderState, reason: str) -> list[Action]:
        del self._held[held.order.id]
        return [RemoveOrder(held.order.id, reason)]

    def _publish_all(self, now: float) -> list[Action]:
        return [a for held in self._held.values() if held.report is not None for a in self._publish(held, now)]

    def _publish_due(self, now: float) -> list[Action]:
        due = [held for held in self._held.values() if held.report is not None and held.resend_at <= now]
        return [action for held in due for action in self._publish(held, now, slower=True)]

    def _publish(self, held: _OrderState, now: float, *, slower: bool = False) -> list[Action]:
        assert held.report is not None
        held.resend_after_s = min(2 * held.resend_after_s, LAST_RESEND_S) if slower else FIRST_RESEND_S
        held.resend_at = now + held.resend_after_s
        return [Publish(held.report)]

    def _close(self) -> list[Action]:
        self._closing = True
        running = self._find_running()
        return self._stop(running) if running and running.phase is Phase.RUNNING else []

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for held in [held for held in self._held.values() if held.due_at <= now]:
            if held.phase is Phase.RUNNING:
                actions += self._stop(held)
            elif held.phase is Phase.QUEUED:
                actions += self._remove(held, "expired")
        return actions

    def _start(self) -> list[Action]:
        if self._closing or self._find_running():
            return []
        for held in self._held.values():
            if held.phase is Phase.QUEUED:
                held.phase = Phase.RUNNING
                return [Run(held.order)]
        return []

    def _find_running(self) -> _OrderState | None:
        return next((h for h in self._held.values() if h.phase in {Phase.RUNNING, Phase.STOPPING}), None)
