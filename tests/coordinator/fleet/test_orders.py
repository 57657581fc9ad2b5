"""The life of an order, as whole lists of actions; all invariants are checked after every event."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.fleet.orders import (
    CLOSED,
    FIRST_RESEND_S,
    LAST_RESEND_S,
    TRANSITIONS,
    WAITING,
    Accept,
    Action,
    Cause,
    Check,
    Checked,
    Closed,
    DeviceAppeared,
    Event,
    Expire,
    OrderBook,
    OrderStatus,
    Reject,
    ReportReceived,
    Send,
    Tell,
    Tick,
)
from fedge.errors import ProtocolError
from fedge.messages import Ack, Order, Outcome, Report

DEADLINE = 60.0


def order(device: str = "a", left_s: float = DEADLINE) -> Order:
    return Order(
        id=f"r.1.s.{device}",
        device_id=device,
        run="r",
        round=1,
        label="s",
        seed=0,
        task_fingerprint="t",
        left_s=left_s,
        step="profile",
        body=b"",
    )


def report(device: str = "a", *, by: str | None = None) -> Report:
    return Report(order_id=f"r.1.s.{device}", device_id=by or device, seconds=1.0, outcome=Outcome.DONE)


def ack(device: str = "a", *, accepted: bool = True, reason: str = "") -> Ack:
    return Ack(order_id=f"r.1.s.{device}", device_id=device, accepted=accepted, reason=reason)


def book_at(status: OrderStatus) -> OrderBook:
    """A book whose only order stands there, at time 1."""
    events: dict[OrderStatus, list[Event]] = {
        OrderStatus.OPEN: [],
        OrderStatus.SENT: [Tick()],
        OrderStatus.CHECKING: [ReportReceived(report())],
        OrderStatus.ACCEPTED: [ReportReceived(report()), Checked("r.1.s.a")],
        OrderStatus.REJECTED: [ReportReceived(report()), Checked("r.1.s.a", "bad")],
        OrderStatus.EXPIRED: [],
    }
    book = OrderBook([order(left_s=1.0 if status is OrderStatus.EXPIRED else DEADLINE)])
    for event in events[status]:
        book.handle(event, 1.0)
    if status is OrderStatus.EXPIRED:
        book.handle(Tick(), 1.0)
    assert book.status("r.1.s.a") is status
    return book


def test_a_good_report_is_committed_before_the_device_is_told() -> None:
    book = OrderBook([order("a"), order("b")])
    assert book.handle(Tick(), 0.0) == [Send(order("a")), Send(order("b"))]
    assert book.handle(ReportReceived(report("b")), 1.0) == [Check(order("b"), report("b"))]
    assert book.handle(Checked("r.1.s.b"), 1.5) == [Accept(report("b")), Tell(ack("b"))]
    assert not book.done
    assert book.handle(ReportReceived(report("a")), 1.6) == [Check(order("a"), report("a"))]
    assert book.handle(Checked("r.1.s.a"), 1.7) == [Accept(report("a")), Tell(ack("a"))]
    assert book.done
    assert book.next_wakeup() is None


def test_a_bad_report_is_rejected_with_its_reason() -> None:
    book = book_at(OrderStatus.CHECKING)
    told = Tell(ack(accepted=False, reason="not-finite: NaN"))
    assert book.handle(Checked("r.1.s.a", "not-finite: NaN"), 2.0) == [Reject(order(), "not-finite: NaN"), told]


@pytest.mark.parametrize("status", sorted(CLOSED))
def test_a_report_for_an_order_that_is_closed_changes_nothing(status: OrderStatus) -> None:
    """The shell answers it from the store (test_mqtt.py)."""
    book = book_at(status)
    for now in (2.0, 1000.0):
        assert book.handle(ReportReceived(report()), now) == []
        assert book.status("r.1.s.a") is status


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("status", sorted(set(OrderStatus) - CLOSED))
def test_an_order_that_an_intake_closed_is_closed_and_nobody_is_told_again(status: OrderStatus, accepted: bool) -> None:
    book = book_at(status)
    assert book.handle(Closed("r.1.s.a", accepted), 2.0) == []
    assert book.status("r.1.s.a") is (OrderStatus.ACCEPTED if accepted else OrderStatus.REJECTED)
    assert book.done
    assert book.handle(Checked("r.1.s.a"), 3.0) == [], "our own check of it was under way"


def test_a_report_that_comes_again_while_it_is_checked_is_ignored() -> None:
    assert book_at(OrderStatus.CHECKING).handle(ReportReceived(report()), 2.0) == []


def test_an_order_is_repeated_ever_more_slowly_until_its_deadline() -> None:
    book = OrderBook([order(left_s=200.0)])
    sent, now = [], 0.0
    while not book.done:
        sent += [now for action in book.handle(Tick(), now) if isinstance(action, Send)]
        now = book.next_wakeup() or now
    assert sent == [0, 2, 6, 14, 30, 60, 90, 120, 150, 180]
    assert book.status("r.1.s.a") is OrderStatus.EXPIRED
    assert now == 200.0


def test_a_device_that_is_back_gets_its_order_at_once_and_only_its_own() -> None:
    book = OrderBook([order("a"), order("b")])
    for now in (0.0, 2.0, 6.0):
        book.handle(Tick(), now)
    assert book.handle(DeviceAppeared("a"), 7.0) == [Send(order("a", left_s=DEADLINE - 7.0))]
    again = 7.0 + FIRST_RESEND_S  # as patient as at first
    assert book.handle(Tick(), again) == [Send(order("a", left_s=DEADLINE - again))]
    assert book.handle(DeviceAppeared("stranger"), 10.0) == []


@pytest.mark.parametrize("status", sorted(CLOSED | {OrderStatus.CHECKING}, key=str))
def test_an_order_that_is_answered_is_not_sent_again(status: OrderStatus) -> None:
    assert book_at(status).handle(DeviceAppeared("a"), 2.0) == []


@pytest.mark.parametrize("status", [OrderStatus.OPEN, OrderStatus.SENT, OrderStatus.CHECKING])
def test_the_deadline_closes_an_open_order(status: OrderStatus) -> None:
    book = book_at(status)
    assert book.handle(Tick(), DEADLINE) == [Expire(order())]
    assert book.done
    assert book.handle(Tick(), DEADLINE + 1) == []


def test_a_report_at_the_deadline_is_too_late_and_one_before_it_is_not() -> None:
    assert book_at(OrderStatus.SENT).handle(ReportReceived(report()), DEADLINE) == [Expire(order())]
    assert Check(order(), report()) in book_at(OrderStatus.SENT).handle(ReportReceived(report()), DEADLINE - 0.001)


def test_a_check_that_ends_after_the_deadline_changes_nothing() -> None:
    book = book_at(OrderStatus.CHECKING)
    book.handle(Tick(), DEADLINE)
    assert book.handle(Checked("r.1.s.a"), DEADLINE + 1) == []
    assert book.status("r.1.s.a") is OrderStatus.EXPIRED


def test_a_report_of_an_order_from_before_a_restart_is_taken() -> None:
    assert book_at(OrderStatus.OPEN).handle(ReportReceived(report()), 2.0) == [Check(order(), report())]


@pytest.mark.parametrize(("wrong", "name"), [(report("x"), "unknown-order"), (report("a", by="b"), "foreign-id")])
def test_refused_reports_change_nothing(wrong: Report, name: str) -> None:
    book = OrderBook([order("a")])
    with pytest.raises(ProtocolError) as caught:
        book.handle(ReportReceived(wrong), 1.0)
    assert caught.value.name == name
    assert book.status("r.1.s.a") is OrderStatus.OPEN


def test_the_table_leads_from_every_open_phase_to_an_end_and_nowhere_from_an_end() -> None:
    assert {status for status, _ in TRANSITIONS} == set(OrderStatus) - CLOSED
    assert all((status, Cause.EXPIRED) in TRANSITIONS for status in set(OrderStatus) - CLOSED)


def lines_run(n: int) -> int:
    """Lines of Python that a step of n devices takes, from the first order to the last verdict."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    events: list[Event] = [Tick()]
    for i in range(n):
        events += [DeviceAppeared(f"d{i}"), ReportReceived(report(f"d{i}")), Checked(f"r.1.s.d{i}")]
    book = OrderBook([order(f"d{i}") for i in range(n)])
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for event in events:
            book.handle(event, 1.0)
            book.next_wakeup()
            assert book.done == (event is events[-1])
    finally:
        sys.settrace(before)
    return lines


def test_a_step_costs_in_proportion_to_its_devices() -> None:
    assert lines_run(400) < 6 * lines_run(100)  # were each event to look at all orders: 16


class Life(RuleBasedStateMachine):
    """Any events in any order and at any time: an order closes once, and what was said of it stays true."""

    @initialize()
    def open(self) -> None:
        self.now = 0.0
        self.book = OrderBook([order("a"), order("b", left_s=30.0)])
        self.closed: dict[str, Action] = {}
        self.checking: set[str] = set()

    def feed(self, event: Event) -> None:
        for action in self.book.handle(event, self.now):
            match action:
                case Accept(report=r):
                    self.close(r.order_id, action)
                case Reject(order=o) | Expire(order=o):
                    self.close(o.id, action)
                case Tell(ack=a):
                    assert a.accepted == isinstance(self.closed[a.order_id], Accept)
                case Check(order=o):
                    assert o.id not in self.checking
                    self.checking.add(o.id)
                case Send(order=o):
                    assert o.id not in self.closed
                    assert self.now + o.left_s == pytest.approx(DEADLINE if o.device_id == "a" else 30.0)
                    assert o.left_s > 0

    def close(self, order_id: str, action: Action) -> None:
        assert order_id not in self.closed
        self.closed[order_id] = action

    @rule(device=st.sampled_from("ab"))
    def reported(self, device: str) -> None:
        self.feed(ReportReceived(report(device)))

    @rule(device=st.sampled_from("ab"), error=st.sampled_from([None, "bad"]))
    def checked(self, device: str, error: str | None) -> None:
        if f"r.1.s.{device}" in self.checking:
            self.feed(Checked(f"r.1.s.{device}", error))

    @rule(device=st.sampled_from("abc"))
    def appeared(self, device: str) -> None:
        self.feed(DeviceAppeared(device))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "book"):
            return
        for device in "ab":
            status = self.book.status(f"r.1.s.{device}")
            assert (status in CLOSED) == (f"r.1.s.{device}" in self.closed)
        assert self.book.done == (len(self.closed) == 2)
        wakeup = self.book.next_wakeup()
        assert (wakeup is None) == self.book.done
        assert wakeup is None or wakeup <= self.now + max(LAST_RESEND_S, DEADLINE)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_waiting_and_closed_phases_are_apart() -> None:
    assert not WAITING & CLOSED
