"""Reports over a real broker, to a process that only takes reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.fleet.fleet import make_order
from coordinator.fleet.mqtt.intake import Assignment, Intake
from coordinator.fleet.mqtt.roles import BlobServer, lock_own_folder
from coordinator.store.records import Entry, OrderStatus
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import Declined
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Codec, to_bytes
from fedge.wire.messages import BlobRef, Order, Why
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK, WAIT_S, RawDevice, tensors
from tests.support.waiting import until

MODEL = to_bytes(tensors(1.0))


@pytest.fixture
async def intake(one_broker: LocalBroker, store: Store, tmp_path: Path) -> AsyncIterator[Intake]:
    with contextlib.closing(Store(tmp_path, intake=True)) as opened, lock_own_folder(tmp_path) as folder:
        made = Intake(settings(one_broker), opened, folder, Assignment(federation="f", task=TASK, layout=LAYOUT))
        async with running(made):
            yield made


@contextlib.asynccontextmanager
async def running(helper: Intake | BlobServer) -> AsyncIterator[None]:
    work = asyncio.create_task(helper.serve())
    try:
        await until(lambda: helper._transport.connected)
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def written(store: Store, device: str = "cam1") -> Order:
    ref = BlobRef(digest=store.blobs.put(MODEL), size_bytes=len(MODEL))
    action = Train(starts=(Start(model=ref),), sgd=Sgd())
    order = make_order("r", 3, 1, "train", device, TASK.compute_fingerprint(), action, left_s=60)
    store.write_orders([order])
    return order


async def test_an_intake_accepts_a_report_with_its_update_and_repeats_its_verdict(
    intake: Intake, store: Store, device: RawDevice
) -> None:
    order, result = written(store), device.trained(0.5)
    for n in (1, 2):
        await device.report(order, result)
        assert (await device.ack(order.id, n)).accepted
    entry = store.find_entry(order.id)
    assert entry is not None
    assert entry.status is OrderStatus.ACCEPTED
    assert result.update.digest in store.blobs
    assert [one.order.id for one in store.get_closed_since(0)] == [order.id]


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_an_intake_rejects_an_update_of_another_shape_and_keeps_the_evidence(
    intake: Intake, store: Store, device: RawDevice, request: pytest.FixtureRequest, where: str
) -> None:
    if where == "process":
        request.getfixturevalue("checked_in_processes")
    order, result = written(store), device.trained(0.5)
    wrong = device.serves(to_bytes({"w": tensors(0.5)["w"]}), Codec.INT8)
    await device.report(order, msgspec.structs.replace(result, update=wrong))
    ack = await device.ack(order.id)
    assert not ack.accepted
    assert "malformed" in ack.reason
    assert [offence.name for offence in store.get_offences()] == ["malformed"]
    assert wrong.digest not in store.blobs


async def test_an_intake_tells_what_the_store_says_of_orders_that_are_closed_or_never_were(
    intake: Intake, store: Store, device: RawDevice
) -> None:
    order = written(store)
    assert store.expire(order.id, time.time()).result()
    never = msgspec.structs.replace(order, id="r.9.train.cam1")
    for late, reason in ((order, "no report before the deadline"), (never, "unknown-order")):
        await device.report(late, device.trained(0.5))
        ack = await device.ack(late.id)
        assert (ack.accepted, ack.reason) == (False, reason)


async def test_an_intake_goes_on_when_an_order_was_deleted_while_its_update_came(
    intake: Intake, store: Store, device: RawDevice
) -> None:
    """A slow update may come when its round is long over."""
    order, result = written(store), device.trained(0.5)
    data = device.blobs.pop(result.update.digest)
    await device.report(order, result)
    async with asyncio.timeout(WAIT_S):
        while ("cam1", order.id) not in intake._brought:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert store.expire(order.id, time.time()).result()
    with sqlite3.connect(store.home / "store.db") as raw:
        raw.execute("DELETE FROM orders")
    device.blobs[result.update.digest] = data
    ack = await device.ack(order.id)
    assert (ack.accepted, ack.reason) == (False, "unknown-order")
    other = device.trained(0.25)
    await device.report(written(store), other)
    assert (await device.ack(order.id, 2)).accepted


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names of the refusals in the log."""
    return [record.args[0] for record in caplog.records if record.msg.startswith("event=refused")]  # type: ignore[index,misc]


async def test_a_report_that_comes_while_the_verdict_on_another_is_on_its_way_is_refused_once(
    intake: Intake, store: Store, device: RawDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedge.coordinator")
    order, result, taken, publish = written(store), device.trained(0.5), asyncio.Event(), intake._publish

    async def late(topic: str, payload: bytes, **how: Any) -> None:
        await taken.wait()
        await publish(topic, payload, **how)

    monkeypatch.setattr(intake, "_publish", late)
    await device.report(order, result)
    await until(lambda: not intake._is_open(order.id))
    await device.report(order, result)
    await device.report(order, Declined(why=Why.NOT_ALLOWED))
    await until(lambda: intake._n_taking["cam1"] == 2)
    taken.set()
    assert (await device.ack(order.id, 2)).accepted
    await until(lambda: not intake._n_taking)
    assert refused(caplog) == ["replayed-report", "replayed-report"]
    assert not intake._taking


async def test_another_report_waits_for_the_one_whose_update_is_fetched_and_a_copy_of_that_is_nothing_new(
    intake: Intake, store: Store, device: RawDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedge.coordinator")
    order, result = written(store), device.trained(0.5)
    data = device.blobs.pop(result.update.digest)
    await device.report(order, result)
    await until(lambda: ("cam1", order.id) in intake._brought)
    for _ in range(3):
        await device.report(order, result)
    await device.report(order, Declined(why=Why.NOT_ALLOWED))
    await until(lambda: intake._n_taking["cam1"] == 2)
    device.blobs[result.update.digest] = data
    assert (await device.ack(order.id, 2)).accepted
    await until(lambda: not intake._n_taking)
    assert refused(caplog) == ["replayed-report"]
    assert len(device.acks) == 2


async def test_each_report_of_an_order_that_never_was_is_refused_though_they_come_at_once(
    intake: Intake, store: Store, device: RawDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedge.coordinator")
    never = msgspec.structs.replace(written(store), id="r.9.train.cam1")
    entry, may_look = intake._store.find_entry, threading.Event()

    def slow(order_id: str) -> Entry | None:
        may_look.wait(WAIT_S)
        return entry(order_id)

    monkeypatch.setattr(intake._store, "find_entry", slow)
    for result in (Declined(why=Why.NOT_ALLOWED), Declined(why=Why.NOT_ALLOWED), device.trained(0.5)):
        await device.report(never, result)
    await until(lambda: intake._n_taking["cam1"] == 2)
    may_look.set()
    assert not (await device.ack(never.id, 2)).accepted
    await until(lambda: not intake._n_taking)
    assert refused(caplog) == ["unknown-order"] * 3
