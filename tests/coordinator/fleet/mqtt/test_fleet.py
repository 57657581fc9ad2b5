"""The fleet over real brokers: devices that behave, devices that do not, and coordinators that are restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from coordinator.fleet.fleet import Answer
from coordinator.fleet.mqtt import following, presence
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.methods.state import State
from coordinator.service.between import commit
from coordinator.store.lease import make_lease, take_lease
from coordinator.store.records import Entry, OrderStatus
from coordinator.store.store import DEVICES, EXPIRED, LEASE, RECALLED_ROUNDS, Store
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError, ProtocolError, StoreError
from fedge.steps.contract import Declined, Failed, Result, Unsupported, make_report
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.descriptions.trial import Tried
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import Start, Train, Trained
from fedge.steps.training.train_rod import TrainRod
from fedge.system.files import compute_digest
from fedge.tensors import codecs
from fedge.tensors.layout import BASE, HEAD, Codec, Layout, TensorInfo, to_bytes
from fedge.wire.messages import (
    MAX_LEFT_S,
    Announcement,
    Capabilities,
    Context,
    Health,
    Outcome,
    Phase,
    Presence,
    Report,
    Rollout,
    RolloutState,
    Status,
    Want,
    Why,
    encode_message,
)
from tests.chaos.network import Network
from tests.support.broker import settings
from tests.support.device import IN_0_1, LAYOUT, TASK, RawDevice, tensors, trained
from tests.support.peer import action_of
from tests.support.waiting import until

DEADLINE_S = 20.0
OTHER_TASK = msgspec.structs.replace(TASK, classes=("a", "b", "c"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "server")) as opened:
        yield opened


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


def make_fleet(
    broker: LocalBroker | Network, store: Store, deadline_s: float = DEADLINE_S, layout: Layout = LAYOUT
) -> MqttFleet:
    return MqttFleet(
        settings(broker),
        store,
        Assignment(federation="f", run="r", task=TASK, layout=layout, seed=3, deadline_s=deadline_s),
        lambda event, fields: None,
    )


async def federation(
    stack: AsyncExitStack,
    broker: LocalBroker,
    store: Store,
    *ids: str,
    deadline_s: float = DEADLINE_S,
    layout: Layout = LAYOUT,
) -> tuple[MqttFleet, list[RawDevice]]:
    """A fleet in round 1, and its devices."""
    home = store.blobs.get_path("").parent.parent
    fleet = await stack.enter_async_context(make_fleet(broker, store, deadline_s, layout))
    devices = [await stack.enter_async_context(RawDevice(broker, i, home)) for i in ids]
    async with asyncio.timeout(DEADLINE_S):
        await fleet.start_round(1, len(ids))
    return fleet, devices


def train(fleet: MqttFleet, codec_: Codec = Codec.INT8) -> Train:
    return Train(starts=(Start(model=fleet.put(tensors(1.0))),), sgd=Sgd(), codec=codec_)


async def test_a_step_from_order_to_verdict(broker: LocalBroker, store: Store, stack: AsyncExitStack) -> None:
    fleet, (a, b) = await federation(stack, broker, store, "a", "b")
    assert [d.id for d in fleet.get_devices()] == ["a", "b"]
    action = train(fleet)
    running = asyncio.create_task(fleet.run("train", {"b": action, "a": action}))
    for device, value in ((a, 0.5), (b, 0.25)):
        order = await device.order("train")
        assert order.id == f"r.1.train.{device.id}"
        assert await device.fetch(action_of(order).starts[0].model) == codecs.encode(tensors(1.0), Codec.FLOAT32)
        await device.report(order, device.trained(value))
        ack = await device.ack(order.id)
        assert ack.accepted
        entry = store.find_entry(order.id)
        assert entry is not None
        assert entry.status is OrderStatus.ACCEPTED  # committed before it was told
    answers = await running
    assert list(answers) == ["a", "b"]
    for answer, value in zip(answers.values(), (0.5, 0.25), strict=True):
        assert isinstance(answer.result, Trained)
        np.testing.assert_allclose(fleet.get(answer.result.update, LAYOUT).params, value, rtol=1e-6)
        assert answer.seconds == 0.5
    counts = fleet.take_counts()
    assert counts["bytes_up"] > 0 < counts["bytes_down"]
    assert fleet.take_counts() == {"bytes_up": 0, "bytes_down": 0}


@pytest.mark.smoke
async def test_answers_of_a_stream_come_as_the_store_numbers_them_also_those_that_an_intake_accepted(
    one_broker: LocalBroker, stack: AsyncExitStack, tmp_path: Path, store_url: str | None
) -> None:
    """The intake's report is the first that the store has; the dispatcher hears of its own at once."""
    home = tmp_path / "server"
    store = stack.enter_context(contextlib.closing(Store(home, store_url, federation="f")))
    intake = stack.enter_context(contextlib.closing(Store(home, store_url, federation="f", intake=True)))
    names = ("a", "b", "c", "d")
    fleet, devices = await federation(stack, one_broker, store, *names)
    stream = fleet.stream("s", dict.fromkeys(names, train(fleet)))
    first = asyncio.create_task(anext(stream))
    orders = {device.id: await device.order("s") for device in devices}
    accepted = []
    for device in devices:
        result = device.trained(0.5)
        if device.id in {"b", "d"}:
            store.blobs.put(device.blobs[result.update.digest])
            intake.accept(make_report(orders[device.id], result, 0.5), time.time()).result()
        else:
            await device.report(orders[device.id], result)
            await device.ack(orders[device.id].id)
        accepted.append(device.id)
    handed = [(await first).device_id] + [answer.device_id async for answer in stream]
    assert handed == accepted
    by_number = sorted((entry.arrival, entry.order.device_id) for entry in store.get_entries(1))
    assert [i for _, i in by_number] == accepted


async def test_an_answer_that_an_intake_accepted_first_may_be_handed_out_before_our_own_verdict_fails(
    one_broker: LocalBroker, stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "server"
    store = stack.enter_context(contextlib.closing(Store(home)))
    intake = stack.enter_context(contextlib.closing(Store(home, intake=True)))
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    stream = fleet.stream("s", {"a": train(fleet)})
    first = asyncio.create_task(anext(stream))
    order, result = await a.order("s"), a.trained(0.5)
    accept, entry = store.accept, store.find_entry
    report = make_report(order, result, 0.5)

    def later(report: Report, now: float) -> Any:
        """While our own check of the report comes to its end, the intake's has been stored."""
        intake.accept(report, time.time()).result()
        return accept(report, now)

    def slowly(order_id: str) -> Entry | None:
        time.sleep(0.3)
        return entry(order_id)

    monkeypatch.setattr(store, "accept", later)
    monkeypatch.setattr(store, "find_entry", slowly)
    fleet._look_at = 0.0
    await a.say("reports", report)
    assert (await first).device_id == "a"
    assert [answer async for answer in stream] == []
    assert (await a.ack(order.id)).accepted
    await fleet.sleep(0.6)  # raises what failed in the background


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How far the dispatcher's clock is ahead of ours."""
    clock = SimpleNamespace(ahead_s=0.0)
    ahead = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + clock.ahead_s)
    for module in ("fleet", "following"):
        monkeypatch.setattr(f"coordinator.fleet.mqtt.{module}.time", ahead)
    return clock


@pytest.fixture
def seldom_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher does not look into the store for what others have accepted, unless something makes it."""
    monkeypatch.setattr(following, "LOOK_AT_STORE_S", 60.0)


@pytest.mark.usefixtures("seldom_looks")
async def test_what_an_intake_accepted_while_the_method_worked_is_kept_when_the_round_is_committed(
    one_broker: LocalBroker, stack: AsyncExitStack, tmp_path: Path
) -> None:
    home = tmp_path / "server"
    store = stack.enter_context(contextlib.closing(Store(home)))
    intake = stack.enter_context(contextlib.closing(Store(home, intake=True)))
    fleet, (a, b) = await federation(stack, one_broker, store, "a", "b")
    stream = fleet.stream("s", dict.fromkeys(("a", "b"), train(fleet)))
    first = asyncio.create_task(anext(stream))
    await a.report(await a.order("s"), a.trained(0.5))
    assert (await first).device_id == "a"
    result = b.trained(0.25)
    store.blobs.put(b.blobs[result.update.digest])
    os.utime(store.blobs.get_path(result.update.digest), (0.0, 0.0))  # longer ago than what is spared for its age
    intake.accept(make_report(await b.order("s"), result, 0.5), time.time()).result()
    await commit(store, fleet, 1, State(round=1, layout=LAYOUT), 0.0, RECALLED_ROUNDS)
    assert result.update.digest in store.blobs
    assert (await anext(stream)).device_id == "b"


@pytest.mark.usefixtures("seldom_looks")
async def test_an_answer_that_came_while_the_method_worked_is_handed_out_at_once(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a, b) = await federation(stack, one_broker, store, "a", "b")
    stream = fleet.stream("s", dict.fromkeys(("a", "b"), train(fleet)))
    first = asyncio.create_task(anext(stream))
    for device in (a, b):
        order = await device.order("s")
        await device.report(order, device.trained(0.5))
        await device.ack(order.id)
        if device is a:
            assert (await first).device_id == "a"
    async with asyncio.timeout(20.0):
        assert (await anext(stream)).device_id == "b"


async def test_an_unresponsive_device_holds_up_nobody_beyond_the_deadline(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a, _) = await federation(stack, one_broker, store, "a", "silent", deadline_s=5)
    ticks = 0
    send_due = fleet._send_due

    def counting() -> None:
        nonlocal ticks
        ticks += 1
        send_due()

    fleet._send_due = counting  # type: ignore[method-assign]
    action = train(fleet)
    running = asyncio.create_task(fleet.run("train", {"a": action, "silent": action}))
    await a.report(await a.order("train"), Declined(why=Why.HOT))
    assert await running == {"a": Answer("a", Declined(why=Why.HOT), 0.5), "silent": Answer("silent", None)}
    assert ticks < 20  # it slept meanwhile
    silent = store.find_entry("r.1.train.silent")
    assert silent is not None
    assert silent.status is OrderStatus.EXPIRED


async def test_a_device_gets_no_more_time_for_saying_that_it_was_slow(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a, liar) = await federation(stack, one_broker, store, "a", "liar")
    action = train(fleet)
    running = asyncio.create_task(fleet.run("train", {"a": action, "liar": action}))
    for device, seconds in ((a, 0.0), (liar, 1e300)):
        await device.report(await device.order("train"), device.trained(0.5), seconds=seconds)
    assert len(await running) == 2
    running = asyncio.create_task(fleet.run("again", {"a": action, "liar": action}))
    assert (await liar.order("again")).left_s < MAX_LEFT_S / 2
    for device in (a, liar):
        await device.report(await device.order("again"), device.trained(0.5))
    assert len(await running) == 2


async def test_a_foreign_report_holds_back_neither_an_order_nor_its_own_device(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    """Whoever knows its own order's id can guess another one's."""
    fleet, (b, away) = await federation(stack, one_broker, store, "b", "away")
    action = train(fleet)
    running = asyncio.create_task(fleet.run("train", {"away": action, "b": action}))
    order, own = await away.order("train"), await b.order("train")
    for _ in range(20):
        await b.report(msgspec.structs.replace(order, device_id="b"), Declined(why=Why.NOT_ALLOWED))
    await until(lambda: fleet._counted["refused.foreign-id"] == 20)
    await away.appear()  # it has lost the order
    await away.order("train", 2)
    await b.report(msgspec.structs.replace(order, device_id="b"), Declined(why=Why.NOT_ALLOWED))
    await away.report(order, away.trained(0.5))
    assert (await away.ack(order.id)).accepted
    await b.report(own, b.trained(0.25))
    assert sorted(i for i, answer in (await running).items() if isinstance(answer.result, Trained)) == ["away", "b"]


async def test_a_report_that_comes_at_the_fourth_attempt_tells_that_the_broker_loses_them(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (a, b) = await federation(stack, one_broker, store, "a", "b")
    running = asyncio.create_task(fleet.run("train", dict.fromkeys("ab", train(fleet))))
    order, other = await a.order("train"), await b.order("train")
    again = msgspec.structs.replace(make_report(order, a.trained(0.5), 0.5), again=3)
    await a.say("reports", again)  # we may have been away when it was sent before
    assert (await a.ack(order.id)).accepted
    assert fleet.problems == {}
    monkeypatch.setattr("coordinator.fleet.mqtt.intake.QUIET_S", 0.0)
    await b.say("reports", msgspec.structs.replace(make_report(other, b.trained(0.5), 0.5), again=2))
    assert (await b.ack(other.id)).accepted
    await running
    assert fleet.problems == {}

    await fleet.start_round(2, 2)
    running = asyncio.create_task(fleet.run("train", {"a": train(fleet)}))
    order = await a.order("train", 2)
    await a.say("reports", msgspec.structs.replace(make_report(order, a.trained(0.5), 0.5), again=3))
    assert (await a.ack(order.id)).accepted
    await running
    assert fleet.problems["a"].reason.startswith("the broker lost 3 copies of its report")


async def test_copies_that_the_coordinator_itself_dropped_are_no_loss_of_the_brokers(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.fleet.mqtt.intake.QUIET_S", 0.0)
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    running = asyncio.create_task(fleet.run("train", {"a": train(fleet)}))
    order = await a.order("train")
    report = make_report(order, a.trained(0.5), 0.5)
    with monkeypatch.context() as full:
        full.setattr("coordinator.fleet.mqtt.intake.MAX_REPORTS", 0)
        await a.say("reports", report)
        await until(lambda: ("a", order.id) in fleet._copies)
    await a.say("reports", msgspec.structs.replace(report, again=3))
    assert (await a.ack(order.id)).accepted
    await running
    assert fleet.problems == {}


async def test_late_and_repeated_reports_get_the_same_verdict_and_change_nothing(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, clock: SimpleNamespace
) -> None:
    fleet, (a, late) = await federation(stack, one_broker, store, "a", "late")
    action = train(fleet)
    running = asyncio.create_task(fleet.run("train", {"a": action, "late": action}))
    order, missed = await a.order("train"), await late.order("train")
    await a.report(order, a.trained(0.5))
    assert (await a.ack(order.id)).accepted
    clock.ahead_s = DEADLINE_S
    fleet._something_happened.set()
    await running
    before = store.get_entries(1)
    await a.report(order, a.trained(9.0))  # other contents, too
    assert (await a.ack(order.id, 2)).accepted
    await late.report(missed, late.trained(0.5))
    verdict = await late.ack(missed.id)
    assert (verdict.accepted, verdict.reason) == (False, EXPIRED)
    await fleet.run("next", {})
    await a.report(order, a.trained(9.0))  # of an earlier step now: answered from the store
    assert (await a.ack(order.id, 3)).accepted
    assert store.get_entries(1) == before
    assert fleet.take_counts()["refused.replayed-report"] == 3


# --------------------------------------------------------------------------------------------------------- restarts


async def test_after_a_restart_accepted_and_expired_orders_stay_and_open_ones_are_sent_again(
    broker: LocalBroker, store: Store, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """What was accepted comes from the store; what was open is the same order with a fresh deadline."""
    async with AsyncExitStack() as first:
        home = store.blobs.get_path("").parent.parent
        fleet = await first.enter_async_context(make_fleet(broker, store))
        done, gone, slow = [
            await stack.enter_async_context(RawDevice(broker, i, home)) for i in ("done", "gone", "slow")
        ]
        await fleet.start_round(1, 3)
        action = train(fleet)
        actions = {"done": action, "gone": action, "slow": action}
        running = asyncio.create_task(fleet.run("train", actions))
        order = await done.order("train")
        await done.report(order, done.trained(0.5))
        await done.ack(order.id)
        store.expire("r.1.train.gone", 0.0).result()
        open_order = await slow.order("train")
        running.cancel()
        await asyncio.wait([running])
    sent = {d.id: len(d.orders) for d in (done, gone)}

    again = await stack.enter_async_context(make_fleet(broker, store))
    await again.start_round(1, 99)  # the snapshot is stored: it waits for nobody
    assert [d.id for d in again.get_devices()] == ["done", "gone", "slow"]
    running = asyncio.create_task(again.run("train", actions))
    fresh = await slow.order("train", count=len([o for o in slow.orders if o.label == "train"]) + 1)
    assert DEADLINE_S - 5 < fresh.left_s <= DEADLINE_S
    assert msgspec.structs.replace(fresh, left_s=open_order.left_s) == open_order
    await slow.report(fresh, slow.trained(0.25))
    answers = await running
    assert [type(a.result) for a in answers.values()] == [Trained, type(None), Trained]
    assert {d.id: len(d.orders) for d in (done, gone)} == sent
    await done.report(order, done.trained(0.5))
    assert (await done.ack(order.id, 2)).accepted
    assert "event=asked_otherwise" not in caplog.text
    other = msgspec.structs.replace(action, sgd=Sgd(steps=77))  # as with other settings
    assert await again.run("train", {"done": other}) == {"done": answers["done"]}
    assert "event=asked_otherwise label=train devices=done" in caplog.text


async def test_after_a_restart_between_rounds_the_devices_of_the_last_round_are_awaited(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """Otherwise the first to be seen would make up the next round alone."""
    async with AsyncExitStack() as first:
        await federation(first, one_broker, store, "a", "b")
    fleet = make_fleet(one_broker, store)
    # a and b have left; their retained statuses are of no use to a broker that was restarted: clear them.
    async with RawDevice(one_broker, "cleaner", tmp_path, federation="other") as cleaner:
        for device in ("a", "b"):
            await cleaner.transport.publish(fleet._topics.make_agent_topic(device, "status"), b"", retain=True)
    await stack.enter_async_context(fleet)
    beginning = asyncio.create_task(fleet.start_round(2, 1))
    for device in ("a", "b"):
        assert not beginning.done()
        await stack.enter_async_context(RawDevice(one_broker, device, tmp_path))
    await beginning
    assert [d.id for d in fleet.get_devices()] == ["a", "b"]


@pytest.mark.parametrize("killed", [False, True])
async def test_what_devices_said_is_known_to_the_next_process_and_how_old_it_is(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr(presence, "KEEP_S", 0.05 if killed else 3600.0)
    async with AsyncExitStack() as inner:
        fleet, (a,) = await federation(inner, one_broker, store, "a")
        await a.appear(presence=Presence.SLEEPING)
        await a.say("context", Context(device_id="a", load=0.5))
        await until(lambda: fleet.registry.describe_devices()["a"]["context"]["load"] == 0.5)
        before = fleet.registry.describe_devices()["a"]
        if killed:
            await until(lambda: '"load":0.5' in (store.find_value(DEVICES) or ""))
            monkeypatch.setattr(store, "put_value", lambda *_: None)  # nothing is kept at its end
    monkeypatch.undo()
    later = await stack.enter_async_context(make_fleet(one_broker, store))
    await until(lambda: "a" in later.registry.describe_devices())
    found = later.registry.describe_devices()["a"]
    assert (found["presence"], found["context"]["load"]) == ("sleeping", 0.5)
    assert before["seen_at"] <= found["seen_at"] < before["seen_at"] + DEADLINE_S


async def test_a_device_that_comes_back_gets_its_order_at_once(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    running = asyncio.create_task(fleet.run("train", {"a": train(fleet)}))
    await a.order("train")
    await a.appear("2")
    order = await a.order("train", count=2)
    await a.report(order, Declined(why=Why.HOT))
    assert (await running)["a"].result == Declined(why=Why.HOT)


async def test_a_reconnect_of_ours_makes_no_device_a_new_one(
    broker: LocalBroker, store: Store, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """The broker repeats every retained status; who counted that would ask and equip everybody anew."""
    network = await stack.enter_async_context(Network(broker.host, broker.port))
    fleet = await stack.enter_async_context(make_fleet(network, store))
    for name in ("a", "b"):
        await stack.enter_async_context(RawDevice(broker, name, tmp_path))
    await fleet.start_round(1, 2)
    before = {device.id: device.incarnation for device in fleet.get_devices()}
    late = asyncio.create_task(fleet.registry.wait_for_late_joiner(before, ()))
    repeated: list[str] = []
    heard = fleet.registry.handle_status

    def counted(device: str, status: Status, now: float) -> bool:
        repeated.append(device)
        return heard(device, status, now)

    fleet.registry.handle_status = counted  # type: ignore[method-assign]
    network.cut()
    await until(lambda: {"a", "b"} <= set(repeated))
    assert {device.id: device.incarnation for device in fleet.registry.list_online()} == before
    await fleet.start_round(2, 2)
    assert {device.id: device.incarnation for device in fleet.get_devices()} == before
    assert not late.done()
    late.cancel()


# -------------------------------------------------------------------------------------------------- bad devices


def nan() -> bytes:
    values = tensors(1.0)
    values["w"][0, 0] = np.nan
    return to_bytes(values)


BAD_UPDATES: dict[str, tuple[str, Codec, Callable[[], bytes]]] = {
    "NaN": ("not-finite", Codec.FLOAT32, nan),
    "infinite": ("not-finite", Codec.FLOAT32, lambda: to_bytes(tensors(np.inf))),
    "shape": ("layout", Codec.FLOAT32, lambda: to_bytes(tensors(1.0) | {"w": np.ones((4, 1), np.float32)})),
    "dtype": ("layout", Codec.FLOAT32, lambda: to_bytes(tensors(1.0) | {"w": np.ones((2, 2), np.float16)})),
    "missing tensor": ("layout", Codec.FLOAT32, lambda: to_bytes({"w": np.ones((2, 2), np.float32)})),
    "unknown tensor": ("layout", Codec.FLOAT32, lambda: to_bytes(tensors(1.0) | {"x": np.ones(2, np.float32)})),
    "no tensors": ("malformed", Codec.FLOAT32, lambda: b"no tensors at all"),
    "not packed": ("malformed", Codec.INT8, lambda: to_bytes(tensors(1.0))),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
async def test_a_bad_update_is_rejected_by_name(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, codec_, make = BAD_UPDATES[case]
    fleet, (bad, good) = await federation(stack, one_broker, store, "bad", "good")
    action = train(fleet, codec_)
    running = asyncio.create_task(fleet.run("train", {"bad": action, "good": action}))
    with caplog.at_level(logging.WARNING, "fedge"):
        await bad.report(await bad.order("train"), trained(bad.serves(make(), codec_)))
        ack = await bad.ack("r.1.train.bad")
    assert not ack.accepted
    assert ack.reason.startswith(name)
    await good.report(await good.order("train"), good.trained(0.5, codec_))
    answers = await running
    assert answers["bad"] == Answer("bad", None)
    assert isinstance(answers["good"].result, Trained)
    assert fleet.take_counts()[f"refused.{name}"] == 1
    assert f"event=refused name={name} device=bad" in caplog.text
    assert [e.status for e in store.get_entries(1)] == [OrderStatus.REJECTED, OrderStatus.ACCEPTED]


@pytest.mark.usefixtures("checked_in_processes")
async def test_updates_checked_in_processes_are_refused_and_accepted_alike_though_one_is_killed(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (bad, good) = await federation(stack, one_broker, store, "bad", "good")
    action = train(fleet, Codec.FLOAT32)
    for label in ("first", "second"):
        running = asyncio.create_task(fleet.run(label, {"bad": action, "good": action}))
        hostile = trained(bad.serves(to_bytes(tensors(np.inf)), Codec.FLOAT32))
        await bad.report(await bad.order(label), hostile)
        await good.report(await good.order(label), good.trained(0.5, Codec.FLOAT32))
        assert (await bad.ack(f"r.1.{label}.bad")).reason.startswith("not-finite")
        answers = await running
        assert (answers["bad"].result, isinstance(answers["good"].result, Trained)) == (None, True)
        checkers = [p for p in psutil.Process().children() if "fedge.system.child" in p.cmdline()]
        assert checkers
        for checker in checkers:
            checker.kill()


IN_TWO_PARTS = Layout(
    tensors=(
        TensorInfo(name="base", shape=(3,)),
        *(msgspec.structs.replace(info, layer="head") for info in LAYOUT.tensors),
    )
)
"""The head is `LAYOUT`."""


async def test_an_update_of_a_part_is_checked_as_that_part(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (part, whole, other) = await federation(
        stack, one_broker, store, "part", "whole", "other", layout=IN_TWO_PARTS
    )
    start, initial = fleet.put(tensors(1.0)), fleet.put(tensors(1.0) | {"base": np.ones(3, np.float32)})
    action = Train(starts=(Start(model=start),), sgd=Sgd(), personal=BASE, initial=initial)
    running = asyncio.create_task(fleet.run("train", dict.fromkeys(("part", "whole", "other"), action)))
    await part.report(await part.order("train"), part.trained(0.5))
    everything = codecs.encode(tensors(0.5) | {"base": np.ones(3, np.float32)}, Codec.INT8)
    await whole.report(await whole.order("train"), trained(whole.serves(everything)))
    base = codecs.encode({"base": np.ones(3, np.float32)}, Codec.INT8)
    await other.report(await other.order("train"), trained(other.serves(base)))
    assert (await part.ack("r.1.train.part")).accepted
    for device in (whole, other):
        assert (await device.ack(f"r.1.train.{device.id}")).reason.startswith("layout")
    answers = await running
    assert isinstance(answers["part"].result, Trained)
    found = fleet.get(answers["part"].result.update, IN_TWO_PARTS.select(HEAD))
    np.testing.assert_allclose(found.params, 0.5, rtol=1e-6)
    assert [answers[i].result for i in ("whole", "other")] == [None, None]


BAD_MODULES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "NaN": ("not-finite", nan),
    "shape": ("layout", lambda: to_bytes(tensors(1.0) | {"w": np.ones((4, 1), np.float32)})),
    "more than was kept": ("layout", lambda: to_bytes(tensors(1.0) | {"base": np.ones(3, np.float32)})),
    "packed": ("malformed", lambda: codecs.encode(tensors(1.0), Codec.FLOAT32_ZSTD)),
    "too large": ("oversized", lambda: to_bytes({"w": np.zeros(10**5, np.float32)})),
}


@pytest.mark.parametrize("case", BAD_MODULES)
async def test_a_private_module_is_fetched_and_checked(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, case: str
) -> None:
    name, make = BAD_MODULES[case]
    fleet, (bad, good) = await federation(stack, one_broker, store, "bad", "good", layout=IN_TWO_PARTS)
    running = asyncio.create_task(
        fleet.run("share", dict.fromkeys(("bad", "good"), SharePrivate(kept_by=TrainRod.STEP)))
    )
    await bad.report(await bad.order("share"), PrivateShared(module=bad.serves(make(), Codec.FLOAT32)))
    data = to_bytes(tensors(0.5))
    await good.report(await good.order("share"), PrivateShared(module=good.serves(data, Codec.FLOAT32)))
    ack = await bad.ack("r.1.share.bad")
    assert (ack.accepted, ack.reason.split(":")[0]) == (False, name)
    answers = await running
    assert answers["bad"] == Answer("bad", None)
    assert isinstance(answers["good"].result, PrivateShared)
    assert to_bytes(fleet.get_tensors(answers["good"].result.module)) == data


BAD_RESULTS: dict[str, tuple[str, Callable[[RawDevice], Result]]] = {
    "no samples": ("no-samples", lambda d: d.trained(0.5, n_samples=0)),
    "another action's result": ("malformed", lambda d: Tried(delta=1.0)),
    "another codec": ("wrong-result", lambda d: d.trained(0.5, Codec.FLOAT32)),
    "a start that was not offered": ("wrong-result", lambda d: d.trained(0.5, cluster=3)),
    "too large": (
        "oversized",
        lambda d: trained(msgspec.structs.replace(d.trained(0.5).update, size_bytes=2**30)),
    ),
}


@pytest.mark.parametrize("case", BAD_RESULTS)
async def test_a_result_that_does_not_answer_the_order_is_rejected_by_name(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, case: str
) -> None:
    name, make = BAD_RESULTS[case]
    fleet, (bad,) = await federation(stack, one_broker, store, "bad")
    running = asyncio.create_task(fleet.run("train", {"bad": train(fleet)}))
    await bad.report(await bad.order("train"), make(bad))
    ack = await bad.ack("r.1.train.bad")
    assert (ack.accepted, ack.reason.split(":")[0]) == (False, name)
    assert await running == {"bad": Answer("bad", None)}
    assert fleet.take_counts()[f"refused.{name}"] == 1


async def test_bytes_that_are_not_what_the_digest_says_are_rejected(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (bad,) = await federation(stack, one_broker, store, "bad")
    running = asyncio.create_task(fleet.run("train", {"bad": train(fleet)}))
    result = bad.trained(0.5)
    bad.blobs[result.update.digest] = bytes(result.update.size_bytes)
    await bad.report(await bad.order("train"), result)
    assert (await bad.ack("r.1.train.bad")).reason.startswith("digest")
    assert await running == {"bad": Answer("bad", None)}
    assert result.update.digest not in store.blobs


async def test_an_update_that_never_comes_is_given_up_at_the_deadline(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (bad,) = await federation(stack, one_broker, store, "bad", deadline_s=1.5)
    running = asyncio.create_task(fleet.run("train", {"bad": train(fleet)}))
    result = bad.trained(0.5)
    bad.blobs.clear()
    await bad.report(await bad.order("train"), result)
    assert await running == {"bad": Answer("bad", None)}
    await until(lambda: not fleet._taking)  # the cancelled fetch ends
    await until(lambda: not any("/blobs/" in s.topic_filter for s in fleet._transport._subscriptions))


async def test_why_a_device_did_not_do_its_work_is_logged_and_told_with_its_name(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("declines", "fails", "rejected", "silent", "well")
    fleet, devices = await federation(stack, one_broker, store, *names, deadline_s=5)
    events: list[dict[str, Any]] = []
    fleet._observe = lambda event, fields: events.append(fields) if event == "problem" else None
    running = asyncio.create_task(fleet.run("trial", dict.fromkeys(names, DescribeLabels())))
    results: tuple[Result, ...] = (
        Declined(why=Why.HOT),
        Failed(why=Why.ERROR, reason="no torch"),
        Tried(),
        LabelsDescribed(feature=1, n_samples=5),
    )
    with caplog.at_level(logging.WARNING, "fedge"):
        for device, result in zip((*devices[:3], devices[4]), results, strict=True):
            await device.report(await device.order("trial"), result)
        await devices[0].ack("r.1.trial.declines")
        await devices[0].appear("2", task=OTHER_TASK)
        await running
    reasons = {i: problem.reason for i, problem in fleet.problems.items()}
    assert reasons.pop("declines").startswith("task-mismatch: declines has another task than the federation")
    assert reasons == {
        "fails": "failed: its own code failed; its log says more",
        "rejected": "malformed: LabelsDescribed: Object missing required field `feature`",
        "silent": "no report before the deadline",
    }
    declined = "declined: it is too hot; its log says more"
    for device, reason in {**reasons, "declines": declined}.items():
        assert f"device={device} order=r.1.trial.{device} reason={reason!r}" in caplog.text
        assert events.count({"device": device, "round": 1, "reason": reason}) == 1
    assert {i: (streak.count, streak.reason) for i, streak in fleet.failing.items()} == {
        device: (1, reason) for device, reason in {**reasons, "declines": declined}.items()
    }
    assert {i: streak.name for i, streak in fleet.refusals.items()} == {
        "declines": "task-mismatch",
        "rejected": "malformed",
    }
    again = make_fleet(one_broker, store)
    await again._set_devices(2, fleet.get_devices())
    assert {i: p.reason for i, p in again.problems.items()} == {**reasons, "declines": declined}


async def test_a_slow_device_gets_the_time_that_it_needs_also_after_a_restart(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, clock: SimpleNamespace
) -> None:
    """Its last order took nearly as long as a step lasts by default, and this one is twice as much work."""
    async with AsyncExitStack() as first:
        fleet, (slow,) = await federation(first, one_broker, store, "slow", deadline_s=100)
        start = Start(model=fleet.put(tensors(1.0)))
        running = asyncio.create_task(fleet.run("train", {"slow": Train(starts=(start,), sgd=Sgd(steps=100))}))
        order = await slow.order("train")
        assert order.left_s <= 100
        clock.ahead_s = 50
        await slow.report(order, slow.trained(0.5), seconds=50)
        await running
        twice = {"slow": Train(starts=(start,), sgd=Sgd(steps=200))}
        running = asyncio.create_task(fleet.run("again", twice))
        assert (await slow.order("again")).left_s > 100
        running.cancel()
        await asyncio.wait([running])
    fleet, (slow,) = await federation(stack, one_broker, store, "slow")
    running = asyncio.create_task(fleet.run("again", twice))
    assert (await slow.order("again")).left_s > 100
    running.cancel()
    await asyncio.wait([running])


async def test_an_update_out_of_all_proportion_is_no_answer_also_after_a_restart(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    """It is known when the step is over, so the device is told that its report has come."""
    fleet, devices = await federation(stack, one_broker, store, "a", "b", "c")
    actions = dict.fromkeys("abc", train(fleet))
    running = asyncio.create_task(fleet.run("train", actions))
    for device, value, n in zip(devices, (1e6, 0.5, 0.5), (5, 5, 2**40), strict=True):
        await device.report(await device.order("train"), device.trained(value, n_samples=n))
        assert (await device.ack(f"r.1.train.{device.id}")).accepted
    answers = await running
    assert [a.result and a.result.n_samples for a in answers.values()] == [None, 5, 500]
    assert fleet.take_counts()["refused.update-too-large"] == 1
    assert await fleet.run("train", actions) == answers  # all of it is in the store


async def test_a_device_that_offends_again_is_left_out_also_after_a_restart_until_it_is_readmitted(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    ids = ("a", "b", "c", "d")
    async with AsyncExitStack() as first:
        fleet, devices = await federation(first, one_broker, store, *ids)
        for r in (1, 2, 3):
            if r > 1:
                await fleet.start_round(r, 1)
            running = asyncio.create_task(fleet.run(f"train-{r}", dict.fromkeys(ids, train(fleet))))
            for device in devices:
                await device.report(await device.order(f"train-{r}"), device.trained(0.5 if device.id != "d" else 20.0))
            answers = await running
            assert isinstance(answers["d"].result, Trained)  # it counts, but as no more than twice the median
        await fleet.start_round(4, 1)
        assert [device.id for device in fleet.get_devices()] == ["a", "b", "c"]
        assert [o.round for o in fleet.quarantined["d"].evidence] == [1, 2, 3]
        assert "in quarantine until round 23" in fleet.problems["d"].reason
    assert "event=quarantined device=d until=23" in caplog.text
    fleet = await stack.enter_async_context(make_fleet(one_broker, store))
    for i in ids:
        await stack.enter_async_context(RawDevice(one_broker, i, store.blobs.get_path("").parent.parent / "again"))
    await until(lambda: len(fleet.registry.list_presence()) == 4)
    await fleet.start_round(5, 1)
    assert [device.id for device in fleet.get_devices()] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="b cannot be readmitted"):
        fleet.readmit(["b"])
    fleet.readmit(["d"])
    await fleet.start_round(6, 4)
    assert [device.id for device in fleet.get_devices()] == list(ids)
    assert not fleet.quarantined


async def test_a_device_gets_the_models_of_the_step_and_nobody_elses_update(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a, b) = await federation(stack, one_broker, store, "a", "b")
    secret = fleet.put(tensors(7.0))
    running = asyncio.create_task(fleet.run("train", {"a": train(fleet), "b": train(fleet)}))
    await a.order("train")
    await a.say("wants", Want(device_id="a", digest=secret.digest, ranges=((0, secret.size_bytes),)))
    await a.say("wants", Want(device_id="b", digest=secret.digest, ranges=((0, 1),)))
    for device in (a, b):
        await device.report(await device.order("train"), Declined(why=Why.HOT))
    await running
    await until(lambda: fleet._counted.total() == 2)
    counts = fleet.take_counts()
    assert (counts["refused.unknown-blob"], counts["refused.foreign-id"]) == (1, 1)


async def test_a_device_with_another_task_is_not_asked(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, tmp_path: Path
) -> None:
    stranger = await stack.enter_async_context(RawDevice(one_broker, "stranger", tmp_path))
    await stranger.appear("2", task=OTHER_TASK)
    fleet, _ = await federation(stack, one_broker, store, "a")
    assert [d.id for d in fleet.get_devices()] == ["a"]
    assert fleet.take_counts()["refused.task-mismatch"] == 1


async def test_failures_in_a_row_and_refusals_are_counted_until_they_end_also_over_a_restart(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    async with AsyncExitStack() as first:
        fleet, (a,) = await federation(first, one_broker, store, "a")
        for label in ("train", "again"):
            running = asyncio.create_task(fleet.run(label, {"a": train(fleet)}))
            await a.report(await a.order(label), Declined(why=Why.HOT))
            await running
        await a.say("context", b"?")
        await until(lambda: "a" in fleet.refusals)
        assert fleet.failing["a"].count == 2
    later, (a,) = await federation(stack, one_broker, store, "a")
    assert (later.failing, later.refusals) == (fleet.failing, {})  # its new status was accepted
    await a.say("context", b"?")
    await a.say("context", b"?")
    await until(lambda: later._counted["refused.malformed"] == 2)
    assert (later.refusals["a"].name, later.refusals["a"].count) == ("malformed", 2)


async def test_when_the_broker_goes_and_comes_people_are_told(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "LOOK_S", 0.01)
    monkeypatch.setattr(presence, "AWAY_S", 0.05)
    fleet, _ = await federation(stack, one_broker, store, "a")
    events: list[str] = []
    fleet._observe = lambda event, _: events.append(event)
    assert (fleet.describe_broker()["connected"], fleet.describe_broker()["since"]) == (True, None)
    fleet._transport._online.clear()
    await until(lambda: events == ["broker_lost"])
    assert fleet.describe_broker()["connected"] is False
    assert time.time() - float(str(fleet.describe_broker()["since"])) < DEADLINE_S
    fleet._transport._online.set()
    await until(lambda: events == ["broker_lost", "broker_back"])
    assert fleet.describe_broker()["connected"] is True


async def test_who_lost_the_store_to_another_coordinator_ends(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.fleet.mqtt.fleet.RENEW_S", 0.02)
    fleet, _ = await federation(stack, one_broker, store, "a")
    await until(lambda: '"renewed":2' in (store.find_value(LEASE) or ""))
    take_lease(store, make_lease(store.home / "copy"))
    with pytest.raises(ConfigError, match=r"this coordinator ends, since another coordinator \(.*copy, which began"):
        await fleet.sleep(DEADLINE_S)


async def test_the_fleets_rollout_and_a_runtime_that_ends_are_noted(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    said = Rollout(id="r4", state=RolloutState.ABORTED, target="4/m", release=4, share=1.0, metadata={})
    announced = encode_message(Announcement(rollout=encode_message(said), signatures={}))
    await a.transport.publish("fedge/1/f/rollout", announced, retain=True)
    await until(lambda: fleet.rollout is not None)
    assert {n: fleet.rollout[n] for n in ("id", "state", "release")} == {"id": "r4", "state": "aborted", "release": 4}
    await a.say("health", Health(device_id="a", at=1.0, phase=Phase.SERVING, release=1, serving=False))
    await until(lambda: fleet.registry.describe_devices()["a"]["serving"] == "down")


async def test_an_agent_of_fedge_0_1_is_told_of_with_its_name_and_what_to_do_until_it_was_updated(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = await stack.enter_async_context(RawDevice(one_broker, "cam1", tmp_path))
    await old.say("status", IN_0_1, retain=True)
    events: list[dict[str, Any]] = []
    with caplog.at_level(logging.WARNING, "fedge"):
        fleet, _ = await federation(stack, one_broker, store, "a")
        fleet._observe = lambda event, fields: events.append(fields) if event == "problem" else None
        await until(lambda: "cam1" in fleet.problems)
        await old.say("context", msgspec.msgpack.encode((1, {"type": "context", "device_id": "cam1"})))
        await until(lambda: fleet._counted["refused.version"] == 2)
    assert [d.id for d in fleet.get_devices()] == ["a"]
    reason = fleet.problems["cam1"].reason
    assert reason.endswith("update fedge on cam1 to 0.2 or later")
    assert f"name=version device=cam1 topic=fedge/1/f/agents/cam1/status detail={reason!r}" in caplog.text
    await old.appear("2")
    await until(lambda: "cam1" not in fleet.problems)
    assert [d.id for d in fleet.registry.list_online()] == ["a", "cam1"]


async def test_a_message_of_a_newer_fedge_is_refused_and_nobody_is_told_to_update_the_device(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    await a.say("context", msgspec.msgpack.encode((3, {"type": "context", "device_id": "a"})))
    await until(lambda: fleet._counted["refused.version"] == 1)
    assert "update fedge on a" not in fleet.problems["a"].reason


async def test_a_device_that_lacks_a_step_is_not_asked_and_shown_with_the_reason(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a, old) = await federation(stack, one_broker, store, "a", "old")
    await old.appear("2", capabilities=Capabilities(trains=True, steps={"install": 1, "train": 7}))
    await until(lambda: fleet.registry.list_online()[1].steps is not None)
    await fleet._set_devices(1, fleet.registry.list_online())
    running = asyncio.create_task(fleet.run("train", dict.fromkeys(("a", "old"), train(fleet))))
    await a.report(await a.order("train"), Declined(why=Why.HOT))
    answers = await running
    assert isinstance(answers["old"].result, Unsupported)
    assert "step train version 1" in fleet.problems["old"].reason
    assert old.orders == []
    assert [e.order.device_id for e in store.get_entries(1)] == ["a"]


async def test_an_unknown_order_is_refused_and_its_sender_may_forget_it(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    await a.say("reports", Report(order_id="r.9.x.a", device_id="a", seconds=1.0, outcome=Outcome.DONE))
    ack = await a.ack("r.9.x.a")
    assert (ack.accepted, ack.reason) == (False, "unknown-order")
    assert fleet.take_counts()["refused.unknown-order"] == 1


# -------------------------------------------------------------------------------------------------- broken disks


async def test_a_report_that_cannot_be_written_is_not_acknowledged_and_stops_the_fleet(
    one_broker: LocalBroker, store: Store, stack: AsyncExitStack
) -> None:
    fleet, (a,) = await federation(stack, one_broker, store, "a")
    extractor = fleet.put(tensors(1.0))
    running = asyncio.create_task(fleet.run("profile", {"a": Profile(extractor=extractor)}))
    order = await a.order("profile")
    ((pages,),) = store._writer.db.execute("PRAGMA page_count")
    store._writer.db.execute(f"PRAGMA max_page_count = {pages}")
    await a.report(order, Profiled(extractor=extractor.digest, profile=(0.123,) * 4096, n_samples=5))
    with pytest.raises(StoreError, match="full"):
        await running
    entry = store.find_entry(order.id)
    assert entry is not None
    assert entry.status is OrderStatus.OPEN
    assert a.acks == []


async def test_models_that_are_not_there_are_errors(one_broker: LocalBroker, store: Store) -> None:
    fleet = make_fleet(one_broker, store)
    ref = fleet.put(tensors(1.0))
    assert ref.digest == compute_digest(codecs.encode(tensors(1.0), Codec.FLOAT32))
    np.testing.assert_array_equal(fleet.get_tensors(ref)["w"], tensors(1.0)["w"])
    store.remove_others(())
    with pytest.raises((StoreError, ProtocolError)):
        fleet.get(ref, LAYOUT)


@pytest.mark.parametrize("end", [ConnectionError, asyncio.CancelledError])
async def test_however_it_ends_its_client_leaves_the_broker(
    one_broker: LocalBroker, store: Store, end: type[BaseException]
) -> None:
    """A client that stayed would come back whenever the next coordinator, of the same name, pushes it off."""
    fleet = make_fleet(one_broker, store)
    with pytest.raises(end):
        async with fleet:
            raise end
    assert not fleet._transport.connected
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith(("transport", "handler", "sender"))]
