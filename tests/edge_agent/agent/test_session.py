"""The life of an order on the device: whole lists of actions, then a rule-based machine with crashes and replays."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_agent.agent.session import (
    FIRST_RESEND_S,
    LAST_RESEND_S,
    LATER_S,
    MAX_ACKED,
    MAX_ORDERS,
    Acknowledge,
    Action,
    LocalEvent,
    Phase,
    Publish,
    RemoveOrder,
    Run,
    SaveOrder,
    SaveReport,
    Session,
    Stop,
)
from fedge.errors import ProtocolError
from fedge.wire.messages import Ack, Order, Outcome, Report

DEVICE = "pi-1"


def check_invariants(session: Session) -> None:
    """Assert what holds between events."""
    held = session._held
    phases = [h.phase for h in held.values()]
    at_work = phases.count(Phase.RUNNING) + phases.count(Phase.STOPPING)
    assert at_work <= 1, "two orders at work"
    assert len(held) <= MAX_ORDERS, "more orders than places"
    assert len(session._acked) <= MAX_ACKED, "more acknowledged ids than are remembered"
    assert not held.keys() & session._acked.keys(), "an acknowledged order is still held"
    assert at_work or session._closing or Phase.QUEUED not in phases, "an order waits though nothing runs"
    for order_id, entry in held.items():
        assert entry.order.id == order_id, "an order under another id"
        assert entry.phase not in {Phase.UNKNOWN, Phase.ACKED}, "a held order in a phase that holds nothing"
        assert (entry.report is not None) == (entry.phase is Phase.REPORTED), "a report without its phase"
        assert entry.report is None or entry.report.order_id == order_id, "another order's report"


def order(order_id: str = "a", *, left_s: float = 100.0, device: str = DEVICE, seed: int = 0) -> Order:
    return Order(
        id=order_id,
        device_id=device,
        run="r",
        round=1,
        label="profile",
        seed=seed,
        task_fingerprint="f",
        left_s=left_s,
        step="profile",
        body=b"what is to be done",
    )


def report(order_id: str = "a") -> Report:
    return Report(order_id=order_id, device_id=DEVICE, seconds=1.0, outcome=Outcome.DONE, body=b"what came of it")


def ack(order_id: str = "a", *, accepted: bool = True, device: str = DEVICE) -> Ack:
    return Ack(order_id=order_id, device_id=device, accepted=accepted)


@pytest.fixture
def session() -> Iterator[Session]:
    it = Session(DEVICE)
    yield it
    check_invariants(it)


def refused(session: Session, event: object, now: float) -> str:
    before = (session.orders, session.find_next_wakeup())
    with pytest.raises(ProtocolError) as caught:
        session.handle(event, now)  # type: ignore[arg-type]
    assert (session.orders, session.find_next_wakeup()) == before
    return caught.value.name


# ----------------------------------------------------------------------------------------------------- one order


def test_an_order_is_durable_before_it_runs_and_its_report_before_it_is_published(session: Session) -> None:
    assert session.handle(order(), 0) == [SaveOrder(order()), Run(order())]
    assert session.get_phase("a") is Phase.RUNNING
    assert session.handle(report(), 1) == [SaveReport(report()), Publish(report())]
    assert session.get_phase("a") is Phase.REPORTED
    assert session.handle(ack(), 2) == [Acknowledge(ack())]
    assert session.get_phase("a") is Phase.ACKED
    assert session.orders == ()
    assert session.find_next_wakeup() is None


@pytest.mark.parametrize("accepted", [True, False])
def test_a_verdict_is_final_and_silences_later_copies(session: Session, accepted: bool) -> None:
    session.handle(order(), 0)
    session.handle(report(), 1)
    session.handle(ack(accepted=accepted), 2)
    assert session.handle(order(), 3) == []
    assert session.handle(order(left_s=500), 4) == []
    assert session.handle(ack(), 5) == []


def test_copies_of_a_running_order_do_nothing_and_of_a_reported_one_repeat_the_report(session: Session) -> None:
    session.handle(order(), 0)
    assert session.handle(order(), 1) == []
    session.handle(report(), 2)
    assert session.handle(order(left_s=97), 3) == [Publish(report())]
    assert session.handle(order(), 1000) == [SaveOrder(order()), Publish(report())], "also after its end"


def test_a_report_is_repeated_more_and_more_slowly(session: Session) -> None:
    session.handle(order(left_s=1e6), 0)
    session.handle(report(), 0)
    gaps, now = [], 0.0
    for _ in range(7):
        due = session.find_next_wakeup()
        assert due is not None
        assert session.handle(LocalEvent.TICK, due - 0.01) == []
        assert session.handle(LocalEvent.TICK, due) == [Publish(report())]
        gaps.append(due - now)
        now = due
    assert gaps == [2, 4, 8, 16, 30, 30, 30]
    assert (FIRST_RESEND_S, LAST_RESEND_S) == (2, 30)
    assert session.handle(LocalEvent.CONNECTED, now + 1) == [Publish(report())]
    assert session.find_next_wakeup() == now + 1 + FIRST_RESEND_S


# ----------------------------------------------------------------------------------------------------- several


def test_one_runs_and_the_others_wait_in_the_order_of_arrival(session: Session) -> None:
    assert session.handle(order("b"), 0) == [SaveOrder(order("b")), Run(order("b"))]
    assert session.handle(order("c"), 0) == [SaveOrder(order("c"))]
    assert session.handle(order("a"), 0) == [SaveOrder(order("a"))]
    assert session.handle(report("b"), 1) == [
        SaveReport(report("b")),
        Publish(report("b")),
        Run(order("c")),
    ]


def test_a_full_house_refuses_until_a_stale_report_can_go(session: Session) -> None:
    for n in range(MAX_ORDERS):
        session.handle(order(f"o{n}", left_s=100 + n), 0)
    assert refused(session, order("new", left_s=900), 1) == "queue-full"
    session.handle(report("o0"), 2)
    assert refused(session, order("new", left_s=900), 3) == "queue-full"
    actions = session.handle(order("new", left_s=900), 100)
    assert actions == [RemoveOrder("o0", "evicted"), SaveOrder(order("new", left_s=900))]


def test_only_the_last_acknowledged_ids_are_remembered(session: Session) -> None:
    for n in range(MAX_ACKED + 1):
        session.handle(order(f"o{n}"), 0)
        session.handle(report(f"o{n}"), 0)
        session.handle(ack(f"o{n}"), 0)
    assert session.get_phase("o0") is Phase.UNKNOWN
    assert session.get_phase("o1") is Phase.ACKED
    check_invariants(session)


# ----------------------------------------------------------------------------------------------------- deadlines


def test_a_waiting_order_expires_and_a_running_one_is_stopped(session: Session) -> None:
    session.handle(order("a", left_s=10), 0)
    session.handle(order("b", left_s=10), 0)
    assert session.find_next_wakeup() == 10
    assert session.handle(LocalEvent.TICK, 10) == [Stop("a"), RemoveOrder("b", "expired")]
    assert session.get_phase("a") is Phase.STOPPING
    assert session.handle(LocalEvent.TICK, 11) == []
    assert session.handle(LocalEvent.STOPPED, 12) == [RemoveOrder("a", "expired")]
    assert session.get_phase("a") is Phase.UNKNOWN


def test_work_that_finished_while_it_was_asked_to_stop_is_reported_all_the_same(session: Session) -> None:
    session.handle(order(left_s=10), 0)
    session.handle(LocalEvent.TICK, 10)
    assert session.handle(report(), 10.1) == [SaveReport(report()), Publish(report())]


def test_a_later_deadline_is_durable_and_saves_an_order_that_was_being_stopped(session: Session) -> None:
    session.handle(order(left_s=10), 0)
    session.handle(LocalEvent.TICK, 10)
    extended = order(left_s=60)
    assert session.handle(extended, 11) == [SaveOrder(extended)]
    assert session.handle(LocalEvent.STOPPED, 12) == [Run(extended)]


def test_an_earlier_deadline_changes_nothing(session: Session) -> None:
    session.handle(order(left_s=60), 0)
    assert session.handle(order(left_s=50), 0) == []
    assert session.orders == (order(left_s=60),)


@pytest.mark.parametrize(("now", "late"), [(149.999, False), (150.0, True), (151.0, True)])
def test_the_time_that_is_left_counts_from_receipt(session: Session, now: float, late: bool) -> None:
    session.handle(order("busy", left_s=1000), 0)
    session.handle(order(left_s=100), 50)
    assert session.handle(LocalEvent.TICK, now) == ([RemoveOrder("a", "expired")] if late else [])


def test_copies_that_take_another_time_on_their_way_are_not_written(session: Session) -> None:
    session.handle(order(left_s=60), 0)
    assert session.handle(order(left_s=58), 2 + LATER_S) == []
    assert session.handle(order(left_s=58), 3.5) == [SaveOrder(order(left_s=58))]


# ----------------------------------------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(session: Session) -> None:
    assert refused(session, order(device="pi-2"), 0) == "foreign-id"
    assert refused(session, ack("never-seen"), 0) == "unknown-order"
    session.handle(order(), 0)
    assert refused(session, ack(), 0) == "unknown-order", "it is running: nothing to acknowledge"
    assert refused(session, ack(device="pi-2"), 0) == "foreign-id"
    assert refused(session, order(seed=1), 0) == "order-changed"


# ----------------------------------------------------------------------------------------------------- shutting down


def test_closing_stops_the_work_and_keeps_the_order_for_the_next_start(session: Session) -> None:
    session.handle(order("a"), 0)
    session.handle(order("b"), 0)
    assert session.handle(LocalEvent.CLOSING, 1) == [Stop("a")]
    assert session.handle(LocalEvent.STOPPED, 2) == []
    assert session.get_phase("a") is Phase.QUEUED
    restarted = Session(DEVICE, orders=session.orders)
    assert restarted.handle(LocalEvent.TICK, 3) == [Run(order("a"))]


def test_a_restart_publishes_reports_again_and_runs_what_was_open() -> None:
    restarted = Session(
        DEVICE, orders=[order("a"), order("b"), order("late", left_s=5)], reports=[report("a")], acked=["z"]
    )
    assert restarted.handle(LocalEvent.CONNECTED, 10) == [
        Publish(report("a")),
        RemoveOrder("late", "expired"),
        Run(order("b")),
    ]
    assert restarted.handle(order("z"), 11) == []
    check_invariants(restarted)


# ----------------------------------------------------------------------------------------------------- any history


class Disk:
    """What the durable actions leave behind; a kill -9 keeps exactly this."""

    def __init__(self) -> None:
        self.orders: dict[str, tuple[Order, float]] = {}  # with its end
        self.reports: dict[str, Report] = {}
        self.acked: list[str] = []

    def apply(self, action: Action, now: float) -> None:
        match action:
            case SaveOrder(order):
                self.orders[order.id] = order, now + order.left_s
            case SaveReport(report):
                self.reports[report.order_id] = report
            case Acknowledge(ack):
                self.acked = [*self.acked, ack.order_id][-MAX_ACKED:]
                self.orders.pop(ack.order_id)
                self.reports.pop(ack.order_id)
            case RemoveOrder(order_id, _):
                self.orders.pop(order_id)
                self.reports.pop(order_id, None)

    def restart(self, now: float) -> Session:
        orders = [msgspec.structs.replace(order, left_s=max(due - now, 0.0)) for order, due in self.orders.values()]
        return Session(DEVICE, orders=orders, reports=self.reports.values(), acked=self.acked, now=now)


class AnyHistory(RuleBasedStateMachine):
    """A coordinator that repeats and replays, a worker, and a device that is killed between any two actions."""

    ids = st.sampled_from([f"o{n}" for n in range(20)])

    @initialize()
    def start(self) -> None:
        self.disk = Disk()
        self.session = Session(DEVICE)
        self.now = 0.0
        self.running: Order | None = None
        self.stopping = False
        self.published: dict[str, Report] = {}
        self.verdicts: set[str] = set()
        self.runs = 0

    def perform(self, actions: list[Action], survive: int | None = None) -> None:
        """Carry out the actions, or only the first `survive` of them and die."""
        for action in actions[:survive]:
            self.disk.apply(action, self.now)
            match action:
                case Run(order):
                    assert self.running is None, "one at a time"
                    assert order.id in self.disk.orders, "run before it was durable"
                    assert order.id not in self.disk.reports, "run again though its report was kept"
                    assert order.id not in self.verdicts, "run again though it was acknowledged"
                    self.running, self.stopping = order, False
                case Stop(order_id):
                    assert self.running is not None
                    assert self.running.id == order_id
                    self.stopping = True
                case Publish(report):
                    assert self.disk.reports[report.order_id] == report, "published before it was kept"
                    assert report.order_id not in self.verdicts, "published again though it was acknowledged"
                    assert self.published.setdefault(report.order_id, report) == report, "two reports of one order"
                case RemoveOrder(order_id, "evicted"):
                    self.published.pop(order_id, None)
        if survive is not None:
            self.session, self.running, self.stopping = self.disk.restart(self.now), None, False

    def feed(self, event: object, survive: int | None = None) -> None:
        try:
            actions = self.session.handle(event, self.now)  # type: ignore[arg-type]
        except ProtocolError:
            actions = []
        self.perform(actions, survive)

    survival = st.none() | st.integers(0, 3)

    @rule(order_id=ids, left_s=st.sampled_from([0.5, 5.0, 50.0]), survive=survival)
    def order_arrives(self, order_id: str, left_s: float, survive: int | None) -> None:
        self.feed(order(order_id, left_s=left_s), survive)

    @precondition(lambda self: self.running is not None)
    @rule(survive=survival)
    def work_finishes(self, survive: int | None) -> None:
        assert self.running is not None
        self.runs += 1
        done = msgspec.structs.replace(report(self.running.id), seconds=float(self.runs))
        self.running = None
        self.feed(done, survive)

    @precondition(lambda self: self.running is not None and self.stopping)
    @rule(survive=survival)
    def work_stops(self, survive: int | None) -> None:
        assert self.running is not None
        self.running = None
        self.feed(LocalEvent.STOPPED, survive)

    @rule(order_id=ids, accepted=st.booleans(), survive=survival)
    def ack_arrives(self, order_id: str, accepted: bool, survive: int | None) -> None:
        if order_id in self.published:
            self.feed(ack(order_id, accepted=accepted), survive)
            if order_id in self.disk.acked:
                self.verdicts.add(order_id)

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]), survive=survival)
    def time_passes(self, seconds: float, survive: int | None) -> None:
        self.now += seconds
        self.feed(LocalEvent.TICK, survive)

    @rule(survive=survival)
    def reconnects(self, survive: int | None) -> None:
        self.feed(LocalEvent.CONNECTED, survive)

    @rule()
    def is_killed(self) -> None:
        self.perform([], survive=0)
        self.feed(LocalEvent.TICK)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "session"):
            assert {o.id for o in self.session.orders} == self.disk.orders.keys()
            phases = {self.session.get_phase(o.id) for o in self.session.orders}
            assert (self.running is None) == phases.isdisjoint({Phase.RUNNING, Phase.STOPPING})

    def teardown(self) -> None:
        """Left alone with a patient coordinator, everything that is still wanted gets its verdict."""
        if not hasattr(self, "session"):
            return
        self.feed(LocalEvent.TICK)
        for _ in range(3 * MAX_ORDERS):
            check_invariants(self.session)
            if self.running is not None:
                self.work_finishes(None)
            for order_id in list(self.disk.reports):
                self.feed(LocalEvent.CONNECTED)
                self.ack_arrives(order_id, accepted=True, survive=None)
        assert self.session.orders == ()
        assert self.session.find_next_wakeup() is None


AnyHistory.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
