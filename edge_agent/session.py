"""The life of an order on the device: decided here, carried out by `edge_agent.agent`.

Two rules: `TRANSITIONS` holds every change of an order's phase, and nothing here does IO or reads a clock. The shell
feeds events with the time, and performs the returned actions **in order**: whatever must survive a kill -9 is written
(`Persist`, `Keep`, `Acknowledge`) before anything that relies on it (`Run`, `Publish`). An event that does not fit the
phase raises `ProtocolError` and changes nothing.

    UNKNOWN ──ordered──▶ QUEUED ──started──▶ RUNNING ──finished──▶ REPORTED ──acked──▶ ACKED
       ▲                  │   ▲                 │ expired, closed      ▲   │ evicted     │ forgotten
       │◀─────expired─────┘   │                 ▼                      │   ▼             ▼
       │                      └────stopped── STOPPING ─────finished────┘ UNKNOWN       UNKNOWN

One order runs at a time; the others wait in order of arrival. The same order arrives many times, since the coordinator
repeats it until it has the report: its id is its identity, and only its remaining time changes (a restarted coordinator
gives more). That time is counted from receipt by a monotonic clock, so the clocks of coordinator and device need not
agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fedge.errors import ProtocolError
from fedge.messages import Ack, Order, Report

MAX_ORDERS: Final = 16
"""Orders held at once (waiting, running, reported). A federation has one open order per device; the rest is slack."""

MAX_ACKED: Final = 256
"""Acknowledged ids remembered, so that an order that was delayed on the way is not carried out a second time."""

FIRST_RESEND_S: Final = 2.0
LAST_RESEND_S: Final = 30.0
"""A report is repeated after 2, 4, 8, ... 30 s: the broker may drop it silently, the coordinator may be restarting."""

LATER_S: Final = 1.0
"""A repeated order changes the end only if it is later by this much: travel times vary, and each change is a write."""


class Phase(Enum):
    """Where an order stands on this device."""

    UNKNOWN = auto()  # never seen, or forgotten
    QUEUED = auto()  # durable, waiting for its turn
    RUNNING = auto()  # fetching models, or in the worker
    STOPPING = auto()  # the worker was asked to stop
    REPORTED = auto()  # the report is durable, and repeated until acknowledged
    ACKED = auto()  # the coordinator's final word came; only the id is kept


class Cause(Enum):
    """What moves an order from one phase to the next."""

    ORDERED = auto()
    STARTED = auto()
    FINISHED = auto()
    STOPPED = auto()
    EXPIRED = auto()
    CLOSED = auto()
    ACKED = auto()
    EVICTED = auto()
    FORGOTTEN = auto()


TRANSITIONS: Final[Mapping[tuple[Phase, Cause], Phase]] = {
    (Phase.UNKNOWN, Cause.ORDERED): Phase.QUEUED,
    (Phase.QUEUED, Cause.STARTED): Phase.RUNNING,
    (Phase.QUEUED, Cause.EXPIRED): Phase.UNKNOWN,
    (Phase.RUNNING, Cause.FINISHED): Phase.REPORTED,
    (Phase.RUNNING, Cause.EXPIRED): Phase.STOPPING,
    (Phase.RUNNING, Cause.CLOSED): Phase.STOPPING,
    (Phase.STOPPING, Cause.FINISHED): Phase.REPORTED,  # finished before it noticed the stop
    (Phase.STOPPING, Cause.STOPPED): Phase.QUEUED,  # expires there, unless its end was moved meanwhile
    (Phase.REPORTED, Cause.ACKED): Phase.ACKED,
    (Phase.REPORTED, Cause.EVICTED): Phase.UNKNOWN,
    (Phase.ACKED, Cause.FORGOTTEN): Phase.UNKNOWN,
}


# ------------------------------------------------------------------------------------------------------- events in


class OrderReceived(Struct, frozen=True):
    """An order arrived, for the first time or again."""

    order: Order


class AckReceived(Struct, frozen=True):
    """The coordinator's final word on a report arrived, for the first time or again."""

    ack: Ack


class WorkFinished(Struct, frozen=True):
    """The running order has a report. The blobs that it names are already durable."""

    report: Report


class WorkStopped(Struct, frozen=True):
    """The order stopped on request, without a report."""

    order_id: str


class Connected(Struct, frozen=True):
    """The broker is there (again): unacknowledged reports are repeated."""


class Tick(Struct, frozen=True):
    """Time has passed; the shell sends one no later than `Session.next_wakeup`."""


class Closing(Struct, frozen=True):
    """The agent shuts down: nothing new is started."""


Event = OrderReceived | AckReceived | WorkFinished | WorkStopped | Connected | Tick | Closing


# ------------------------------------------------------------------------------------------------------ actions out


class Persist(Struct, frozen=True):
    """Write the order durably (again, if its end was moved); its `left_s` counts from now."""

    order: Order


class Run(Struct, frozen=True):
    """Fetch what the order needs and give it to the worker; answer with `WorkFinished` (or `WorkStopped`)."""

    order: Order


class Stop(Struct, frozen=True):
    """Make the running worker stop soon; answer with `WorkStopped` (or `WorkFinished`)."""

    order_id: str


class Keep(Struct, frozen=True):
    """Write the report durably."""

    report: Report


class Publish(Struct, frozen=True):
    """Send the report."""

    report: Report


class Acknowledge(Struct, frozen=True):
    """Remember durably that this order is over; then delete it, its report and its blobs."""

    ack: Ack


class Discard(Struct, frozen=True):
    """Delete the order, and its report and blobs if there are any. `reason` is for the log."""

    order_id: str
    reason: str


Action = Persist | Run | Stop | Keep | Publish | Acknowledge | Discard


# ------------------------------------------------------------------------------------------------------ the machine


@dataclass(slots=True)
class _Held:
    order: Order
    phase: Phase
    due_at: float
    report: Report | None = None
    resend_at: float = 0.0
    resend_after_s: float = FIRST_RESEND_S


class Session:
    """All orders of one device. Only `handle` changes it."""

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
        self._held = {order.id: _Held(order, Phase.QUEUED, now + order.left_s) for order in orders}
        for report in reports:
            held = self._held[report.order_id]
            held.phase, held.report = Phase.REPORTED, report
        self._acked = dict.fromkeys(acked)

    # ------------------------------------------------------------------------------------------------------ looking

    def phase(self, order_id: str) -> Phase:
        """Where an order stands."""
        if order_id in self._acked:
            return Phase.ACKED
        held = self._held.get(order_id)
        return held.phase if held else Phase.UNKNOWN

    @property
    def orders(self) -> tuple[Order, ...]:
        """The orders held (waiting, running, reported), oldest first."""
        return tuple(held.order for held in self._held.values())

    @property
    def idle(self) -> bool:
        """Nothing is running."""
        return self._running() is None

    def next_wakeup(self) -> float | None:
        """When the next `Tick` is due, by the clock of `handle`; None: only another event can change anything."""
        times = [held.resend_at for held in self._held.values() if held.phase is Phase.REPORTED]
        times += [held.due_at for held in self._held.values() if held.phase in {Phase.QUEUED, Phase.RUNNING}]
        return min(times, default=None)

    # ----------------------------------------------------------------------------------------------------- deciding

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event; returns the actions, in order.

        `now`: seconds by a monotonic clock.

        Raises:
            ProtocolError: `foreign-id`, `order-changed`, `queue-full` or `unknown-order`; nothing changed.
        """
        match event:
            case OrderReceived(order):
                actions = self._ordered(order, now)
            case AckReceived(ack):
                actions = self._acknowledged(ack)
            case WorkFinished(report):
                actions = self._finished(report, now)
            case WorkStopped(order_id):
                actions = self._move(order_id, Cause.STOPPED)
            case Connected():
                actions = self._all_reports(now)
            case Tick():
                actions = self._due_reports(now)
            case Closing():
                actions = self._close()
        return actions + self._expire(now) + self._start()

    def _ordered(self, order: Order, now: float) -> list[Action]:
        if order.device_id != self._device_id:
            raise ProtocolError("foreign-id", f"order {order.id} is for {order.device_id}")
        phase = self.phase(order.id)
        if phase is Phase.ACKED:
            return []
        if phase is Phase.UNKNOWN:
            actions = self._make_room(order, now)
            self._held[order.id] = _Held(order, TRANSITIONS[phase, Cause.ORDERED], now + order.left_s)
            return [*actions, Persist(order)]
        return self._repeated(self._held[order.id], order, now)

    def _repeated(self, held: _Held, order: Order, now: float) -> list[Action]:
        if replace(order, left_s=held.order.left_s) != held.order:
            raise ProtocolError("order-changed", f"order {order.id} came again with other contents")
        actions: list[Action] = []
        if now + order.left_s > held.due_at + LATER_S:
            held.order, held.due_at = order, now + order.left_s
            actions.append(Persist(order))
        return actions if held.report is None else actions + self._publish(held, now)

    def _make_room(self, order: Order, now: float) -> list[Action]:
        """If full, give up the oldest report that was not requested while its order had time."""
        if len(self._held) < MAX_ORDERS:
            return []
        for held in self._held.values():
            if held.phase is Phase.REPORTED and held.due_at <= now:
                return self._move(held.order.id, Cause.EVICTED)
        raise ProtocolError("queue-full", f"order {order.id}: {MAX_ORDERS} orders are held already")

    def _acknowledged(self, ack: Ack) -> list[Action]:
        if ack.device_id != self._device_id:
            raise ProtocolError("foreign-id", f"ack of {ack.order_id} is for {ack.device_id}")
        phase = self.phase(ack.order_id)
        if phase is Phase.ACKED:
            return []
        if (phase, Cause.ACKED) not in TRANSITIONS:
            raise ProtocolError("unknown-order", f"ack of {ack.order_id}, which is {phase.name.lower()}")
        del self._held[ack.order_id]
        self._acked[ack.order_id] = None
        if len(self._acked) > MAX_ACKED:
            del self._acked[next(iter(self._acked))]
        return [Acknowledge(ack)]

    def _finished(self, report: Report, now: float) -> list[Action]:
        held = self._held[report.order_id]
        held.phase = TRANSITIONS[held.phase, Cause.FINISHED]
        held.report = report
        return [Keep(report), *self._publish(held, now)]

    def _move(self, order_id: str, cause: Cause) -> list[Action]:
        """Apply the table to a change that needs only the order's id."""
        held = self._held[order_id]
        held.phase = TRANSITIONS[held.phase, cause]
        if held.phase is Phase.UNKNOWN:
            del self._held[order_id]
            return [Discard(order_id, cause.name.lower())]
        return [Stop(order_id)] if held.phase is Phase.STOPPING else []

    def _all_reports(self, now: float) -> list[Action]:
        return [a for held in self._held.values() if held.report is not None for a in self._publish(held, now)]

    def _due_reports(self, now: float) -> list[Action]:
        due = [held for held in self._held.values() if held.report is not None and held.resend_at <= now]
        return [action for held in due for action in self._publish(held, now, slower=True)]

    def _publish(self, held: _Held, now: float, *, slower: bool = False) -> list[Action]:
        assert held.report is not None
        held.resend_after_s = min(2 * held.resend_after_s, LAST_RESEND_S) if slower else FIRST_RESEND_S
        held.resend_at = now + held.resend_after_s
        return [Publish(held.report)]

    def _close(self) -> list[Action]:
        self._closing = True
        running = self._running()
        return self._move(running.order.id, Cause.CLOSED) if running and running.phase is Phase.RUNNING else []

    def _expire(self, now: float) -> list[Action]:
        late = [
            held.order.id
            for held in self._held.values()
            if held.due_at <= now and (held.phase, Cause.EXPIRED) in TRANSITIONS
        ]
        return [action for order_id in late for action in self._move(order_id, Cause.EXPIRED)]

    def _start(self) -> list[Action]:
        if self._closing or self._running():
            return []
        for held in self._held.values():
            if held.phase is Phase.QUEUED:
                self._move(held.order.id, Cause.STARTED)
                return [Run(held.order)]
        return []

    def _running(self) -> _Held | None:
        return next((h for h in self._held.values() if h.phase in {Phase.RUNNING, Phase.STOPPING}), None)
