"""When orders are sent and expire; all invariants are checked after every event. test_mqtt.py has their verdicts."""

from __future__ import annotations

import math
import sys
from types import FrameType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.fleet.mqtt.orders import FIRST_RESEND_S, LAST_RESEND_S, DueOrders, OrderBook
from fedge.wire.messages import Order

DEADLINE = 60.0
A = "r.1.s.a"


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


def book_of(*orders: Order) -> OrderBook:
    book = OrderBook()
    book.add(orders, 0.0)
    return book


def test_orders_are_due_at_once_and_an_order_that_is_closed_no_more() -> None:
    book = book_of(order("a"), order("b"))
    assert book.take_due(0.0) == DueOrders([order("a"), order("b")], [])
    assert book.close(A)
    assert not book.close(A)
    assert book.find_order(A) is None
    assert book.take_due(FIRST_RESEND_S) == DueOrders([order("b", left_s=DEADLINE - FIRST_RESEND_S)], [])
    assert book.close("r.1.s.b")
    assert book.get_next_wakeup() == math.inf


def test_an_order_is_repeated_ever_more_slowly_until_its_deadline() -> None:
    book = book_of(order(left_s=200.0))
    sent, now, expired = [], 0.0, []
    while not expired:
        due = book.take_due(now)
        sent += [now for _ in due.sent]
        now, expired = min(book.get_next_wakeup(), 200.0), due.expired
    assert sent == [0, 2, 6, 14, 30, 60, 90, 120, 150, 180]
    assert (expired, now) == ([order(left_s=200.0)], 200.0)


def test_a_device_that_is_back_gets_its_order_at_once_and_only_its_own() -> None:
    book = book_of(order("a"), order("b"))
    for now in (0.0, 2.0, 6.0):
        book.take_due(now)
    assert book.resend("a", 7.0) == [order("a", left_s=DEADLINE - 7.0)]
    again = 7.0 + FIRST_RESEND_S  # as patient as at first
    assert book.take_due(again) == DueOrders([order("a", left_s=DEADLINE - again)], [])
    assert book.resend("stranger", 10.0) == []


@pytest.mark.parametrize("sent", [True, False])
def test_an_order_that_is_answered_is_not_sent_again_and_expires_if_its_report_is_never_checked(sent: bool) -> None:
    """Where it was not sent yet, its report is from before a restart."""
    book = book_of(order())
    if sent:
        book.take_due(0.0)
    book.stop_repeating(A)
    assert book.find_order(A) == order()
    assert book.resend("a", 1.0) == []
    assert book.get_next_wakeup() == DEADLINE
    assert book.take_due(DEADLINE) == DueOrders([], [order()])


def test_closed_orders_take_no_memory_until_their_deadlines() -> None:
    """A stream's orders may be open for a day."""
    book = book_of(order("long", left_s=90_000))
    for k in range(500):
        book.add([order(f"d{k}", left_s=86_400)], float(k))
        book.take_due(float(k))
        book.stop_repeating(f"r.1.s.d{k}")
        assert book.close(f"r.1.s.d{k}")
    assert len(book._heap) < 100
    assert book.get_next_wakeup() <= 499 + LAST_RESEND_S


def test_an_order_whose_time_is_over_is_told_once_and_open_until_the_store_has_closed_it() -> None:
    book = book_of(order())
    assert book.take_due(DEADLINE) == DueOrders([], [order()])
    assert book.take_due(DEADLINE + 1) == DueOrders([], [])
    assert book.resend("a", DEADLINE + 2) == []
    assert book.get_next_wakeup() == math.inf
    assert book.find_order(A) == order()
    assert book.close(A)


def test_a_device_that_is_back_at_the_deadline_gets_nothing() -> None:
    assert book_of(order()).resend("a", DEADLINE) == []


def lines_run(n: int) -> int:
    """Lines of Python that a step of n devices takes, from the first order to the last verdict."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    book = book_of(*(order(f"d{i}") for i in range(n)))
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for i in range(n):
            book.take_due(1.0)
            book.resend(f"d{i}", 1.0)
            book.stop_repeating(f"r.1.s.d{i}")
            book.close(f"r.1.s.d{i}")
            book.get_next_wakeup()
    finally:
        sys.settrace(before)
    assert book.get_next_wakeup() == math.inf
    return lines


def test_a_step_costs_in_proportion_to_its_devices() -> None:
    assert lines_run(400) < 6 * lines_run(100)  # were each event to look at all orders: 16


class Life(RuleBasedStateMachine):
    """Any events in any order and at any time: what is answered or over is never sent, and expires once."""

    @initialize()
    def open(self) -> None:
        self.now = 0.0
        self.book = book_of(order("a"), order("b", left_s=30.0))
        self.not_to_be_sent: set[str] = set()  # what must not be sent
        self.expired: set[str] = set()
        self.closed: set[str] = set()

    def sent(self, orders: list[Order]) -> None:
        for o in orders:
            assert o.device_id not in self.not_to_be_sent
            assert self.now + o.left_s == pytest.approx(DEADLINE if o.device_id == "a" else 30.0)
            assert o.left_s > 0

    @rule(device=st.sampled_from("ab"))
    def reported(self, device: str) -> None:
        if device not in self.closed:
            self.book.stop_repeating(f"r.1.s.{device}")
            self.not_to_be_sent.add(device)

    @rule(device=st.sampled_from("ab"))
    def is_closed(self, device: str) -> None:
        assert self.book.close(f"r.1.s.{device}") == (device not in self.closed)
        self.closed.add(device)
        self.not_to_be_sent.add(device)

    @rule(device=st.sampled_from("abc"))
    def appeared(self, device: str) -> None:
        self.sent(self.book.resend(device, self.now))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.book.take_due(self.now)
        self.sent(due.sent)
        for o in due.expired:
            assert o.device_id not in self.closed | self.expired
            self.expired.add(o.device_id)
            self.not_to_be_sent.add(o.device_id)

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "book"):
            return
        for device in "ab":
            assert (self.book.find_order(f"r.1.s.{device}") is None) == (device in self.closed)
        wakeup = self.book.get_next_wakeup()
        assert (wakeup == math.inf) == (self.closed | self.expired == {"a", "b"})
        assert wakeup == math.inf or wakeup <= self.now + max(LAST_RESEND_S, DEADLINE)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
