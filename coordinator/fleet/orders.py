"""The life of an order on the coordinator: decided here, carried out by `coordinator.fleet.mqtt`.

Two rules: everything that changes an order's phase is in `TRANSITIONS`, and nothing here does IO or reads a clock. The
shell feeds events with the time and performs the returned actions **in order**: what must survive a kill -9 (`Accept`,
`Reject`, `Expire`) is committed before anybody is told (`Tell`).

    WRITTEN ──sent──▶ SENT ──reported──▶ CHECKING ──good──▶ ACCEPTED
       │                │                  │  └─────bad───▶ REJECTED
       └────expired─────┴─────expired──────┘──────────────▶ EXPIRED

An order is repeated until there is a report; a report may come many times, since the device repeats it until it is
told. A report for an order that is closed gets the same answer again and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from fedge.errors import ProtocolError
from fedge.messages import Ack, Order, Report

FIRST_RESEND_S: Final = 2.0
LAST_RESEND_S: Final = 30.0
"""An order is repeated after 2, 4, 8, ... 30 s: a broker may drop it silently, a device may just be starting."""


class Phase(Enum):
    """Where an order stands."""

    WRITTEN = auto()  # durable, not sent yet
    SENT = auto()  # sent at least once
    CHECKING = auto()  # a report is here, its update is being fetched and checked
    ACCEPTED = auto()
    REJECTED = auto()
    EXPIRED = auto()


class Cause(Enum):
    """What moves an order from one phase to the next."""

    SENT = auto()
    REPORTED = auto()
    GOOD = auto()
    BAD = auto()
    EXPIRED = auto()


TRANSITIONS: Final[Mapping[tuple[Phase, Cause], Phase]] = {
    (Phase.WRITTEN, Cause.SENT): Phase.SENT,
    (Phase.SENT, Cause.SENT): Phase.SENT,
    (Phase.SENT, Cause.REPORTED): Phase.CHECKING,
    (Phase.CHECKING, Cause.GOOD): Phase.ACCEPTED,
    (Phase.CHECKING, Cause.BAD): Phase.REJECTED,
    (Phase.WRITTEN, Cause.EXPIRED): Phase.EXPIRED,
    (Phase.SENT, Cause.EXPIRED): Phase.EXPIRED,
    (Phase.CHECKING, Cause.EXPIRED): Phase.EXPIRED,
}

WAITING: Final = frozenset({Phase.WRITTEN, Phase.SENT})
CLOSED: Final = frozenset({Phase.ACCEPTED, Phase.REJECTED, Phase.EXPIRED})


# ------------------------------------------------------------------------------------------------------- events in


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """A report arrived, for the first time or again."""

    report: Report


@dataclass(frozen=True, slots=True)
class Checked:
    """What a report names is here and is what it should be; `error` says why not."""

    order_id: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceAppeared:
    """A device is there (again): it may not have what was sent before."""

    device_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; the shell sends one at `Desk.next_wakeup` at the latest."""


Event = ReportReceived | Checked | DeviceAppeared | Tick


# ------------------------------------------------------------------------------------------------------ actions out


@dataclass(frozen=True, slots=True)
class Send:
    """Publish the order."""

    order: Order


@dataclass(frozen=True, slots=True)
class Check:
    """Fetch what the report names and check it; answer with `Checked`."""

    order: Order
    report: Report


@dataclass(frozen=True, slots=True)
class Accept:
    """Commit the report."""

    report: Report


@dataclass(frozen=True, slots=True)
class Reject:
    """Commit that the report is not acceptable."""

    order_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Commit that nobody answered in time."""

    order_id: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Publish the verdict on a report."""

    ack: Ack


Action = Send | Check | Accept | Reject | Expire | Tell


# ------------------------------------------------------------------------------------------------------ the machine


@dataclass(slots=True)
class _Held:
    order: Order
    phase: Phase = Phase.WRITTEN
    report: Report | None = None
    reason: str = ""
    resend_at: float = 0.0
    resend_after_s: float = FIRST_RESEND_S


class Desk:
    """The open orders of one step. `handle` is the only way to change them."""

    def __init__(self, orders: Iterable[Order]) -> None:
        self._held = {order.id: _Held(order) for order in orders}

    def phase(self, order_id: str) -> Phase | None:
        """Where an order stands; None: it is not of this step."""
        held = self._held.get(order_id)
        return held.phase if held else None

    @property
    def done(self) -> bool:
        """Whether all orders are closed."""
        return all(held.phase in CLOSED for held in self._held.values())

    def next_wakeup(self) -> float | None:
        """When the next `Tick` is due, in seconds since the epoch; None: nothing is open."""
        times = [held.order.deadline for held in self._held.values() if held.phase not in CLOSED]
        times += [held.resend_at for held in self._held.values() if held.phase in WAITING]
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and say what to do, in this order.

        Args:
            event: what happened.
            now: seconds since the epoch.

        Raises:
            ProtocolError: `unknown-order` or `foreign-id`; nothing changed.
        """
        match event:
            case ReportReceived(report):
                actions = self._reported(report, now)
            case Checked(order_id, error):
                actions = self._checked(order_id, error)
            case DeviceAppeared(device_id):
                actions = self._appeared(device_id, now)
            case Tick():
                actions = []
        return actions + self._expire(now) + self._due(now)

    def _appeared(self, device_id: str, now: float) -> list[Action]:
        """Send it all its open orders at once, and go on as patiently as at first."""
        actions: list[Action] = []
        for held in self._held.values():
            if held.order.device_id == device_id and held.phase in WAITING and now < held.order.deadline:
                held.resend_after_s = FIRST_RESEND_S
                actions.append(self._send(held, now))
        return actions

    def _move(self, held: _Held, cause: Cause) -> None:
        held.phase = TRANSITIONS[held.phase, cause]

    def _send(self, held: _Held, now: float) -> Action:
        self._move(held, Cause.SENT)
        held.resend_at = now + held.resend_after_s
        held.resend_after_s = min(2 * held.resend_after_s, LAST_RESEND_S)
        return Send(held.order)

    def _due(self, now: float) -> list[Action]:
        for held in self._held.values():  # a clock that was set back must not silence an order for long
            held.resend_at = min(held.resend_at, now + held.resend_after_s)
        return [self._send(h, now) for h in self._held.values() if h.phase in WAITING and h.resend_at <= now]

    def _reported(self, report: Report, now: float) -> list[Action]:
        held = self._held.get(report.order_id)
        if held is None:
            raise ProtocolError("unknown-order", f"{report.device_id} reports {report.order_id}")
        if held.order.device_id != report.device_id:
            raise ProtocolError("foreign-id", f"{report.device_id} reports an order of {held.order.device_id}")
        if held.phase in CLOSED:
            return [Tell(verdict(held.order, accepted=held.phase is Phase.ACCEPTED, reason=held.reason))]
        if held.phase is Phase.CHECKING or held.order.deadline <= now:
            return []
        if held.phase is Phase.WRITTEN:  # sent before a restart
            self._move(held, Cause.SENT)
        self._move(held, Cause.REPORTED)
        held.report = report
        return [Check(held.order, report)]

    def _checked(self, order_id: str, error: str | None) -> list[Action]:
        held = self._held[order_id]
        if held.phase is not Phase.CHECKING:  # expired meanwhile
            return []
        assert held.report is not None
        if error is None:
            self._move(held, Cause.GOOD)
            return [Accept(held.report), Tell(verdict(held.order, accepted=True))]
        self._move(held, Cause.BAD)
        held.reason = error
        return [Reject(order_id, error), Tell(verdict(held.order, accepted=False, reason=error))]

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for held in self._held.values():
            if held.phase not in CLOSED and held.order.deadline <= now:
                self._move(held, Cause.EXPIRED)
                held.reason = "expired"
                actions.append(Expire(held.order.id))
        return actions


def verdict(order: Order, *, accepted: bool, reason: str = "") -> Ack:
    """What a device is told about its report."""
    return Ack(order_id=order.id, device_id=order.device_id, accepted=accepted, reason=reason[:1000])
