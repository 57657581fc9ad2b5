from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.fleet import order_for
from coordinator.fleet.orders import OrderStatus
from coordinator.roles import BlobServer, Intake, Process, begun, own_folder
from coordinator.store import OFFERED, Store
from fedge.broker import LocalBroker
from fedge.codec import Codec
from fedge.errors import ConfigError
from fedge.identity import Role
from fedge.messages import BlobRef, Order
from fedge.sgd import Sgd
from fedge.steps.train import Start, Train
from fedge.tensors import to_bytes
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK, WAIT_S, RawDevice, tensors
from tests.support.waiting import until

MODEL = to_bytes(tensors(1.0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of the dispatcher, which is in round 1."""
    with contextlib.closing(Store(tmp_path)) as opened:
        opened.begin_round(1, (), 0.0)
        yield opened


@pytest.fixture
async def device(one_broker: LocalBroker, tmp_path: Path) -> AsyncIterator[RawDevice]:
    async with RawDevice(one_broker, "cam1", tmp_path / "devices") as found:
        yield found


@pytest.fixture
async def intake(one_broker: LocalBroker, store: Store, tmp_path: Path) -> AsyncIterator[Intake]:
    with contextlib.closing(Store(tmp_path, intake=True)) as opened, own_folder(tmp_path) as folder:
        made = Intake(settings(one_broker), opened, folder, federation="f", task=TASK, layout=LAYOUT)
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
    order = order_for("r", 3, 1, "train", device, TASK.fingerprint(), action, left_s=60)
    store.write_orders([order])
    return order


async def test_an_intake_accepts_a_report_with_its_update_and_repeats_its_verdict(
    intake: Intake, store: Store, device: RawDevice
) -> None:
    order, result = written(store), device.trained(0.5)
    for n in (1, 2):
        await device.report(order, result)
        assert (await device.ack(order.id, n)).accepted
    entry = store.entry(order.id)
    assert entry is not None
    assert entry.status is OrderStatus.ACCEPTED
    assert result.update.digest in store.blobs
    assert [one.order.id for one in store.closed_since(0)] == [order.id]


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
    assert [offence.name for offence in store.offences()] == ["malformed"]
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


async def test_a_server_of_models_has_what_open_orders_name_and_nothing_else(
    one_broker: LocalBroker, store: Store, device: RawDevice, tmp_path: Path
) -> None:
    offered, other = (
        BlobRef(digest=store.blobs.put(data), size_bytes=len(data)) for data in (MODEL, b"an update of somebody")
    )
    store.keep(OFFERED, json.dumps([offered.digest]))
    with contextlib.closing(Store(tmp_path, intake=True)) as opened:
        async with running(BlobServer(settings(one_broker), opened, tmp_path / "own", federation="f")):
            secret = asyncio.create_task(device.fetch(other))
            assert await device.fetch(offered) == MODEL
            assert not secret.done()
            secret.cancel()


async def test_no_log_names_the_groups_secret_and_the_client_id_stays(
    one_broker: LocalBroker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = (Process(settings(one_broker), store, "f", tmp_path, Role.COORDINATOR) for _ in range(2))
    async with first._transport:
        await until(lambda: "event=connected client=coordinator:f:" in caplog.text)
    assert second._transport.client_id == first._transport.client_id
    assert store.at_broker() not in caplog.text


def test_each_process_has_a_folder_of_its_own_and_the_next_one_takes_it_over(tmp_path: Path) -> None:
    with own_folder(tmp_path) as one:
        with own_folder(tmp_path) as other:
            assert one != other
        with own_folder(tmp_path) as again:
            assert again == other


def test_a_home_without_a_federation_or_with_another_task_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start `fedge coordinator` without --role first"):
        begun(store, tmp_path, TASK, None)
    store.remember("start", msgspec.json.encode((LAYOUT, "model")).decode())
    store.remember("identity", json.dumps(["f", "fedavg", "another", 0, 1, {}]))
    with pytest.raises(ConfigError, match="another task"):
        begun(store, tmp_path, TASK, None)


def test_who_names_another_place_of_the_tensors_than_the_dispatcher_is_refused(store: Store, tmp_path: Path) -> None:
    store.remember("start", msgspec.json.encode((LAYOUT, "model")).decode())
    store.remember("identity", json.dumps(["f", "fedavg", TASK.fingerprint(), 0, 1, {}]))
    assert begun(store, tmp_path, TASK, None) == LAYOUT
    with pytest.raises(ConfigError, match="in its home: leave --blobs out"):
        begun(store, tmp_path, TASK, "s3://tensors/shop")
    store.remember("blobs", "s3://tensors/shop")
    with pytest.raises(ConfigError, match="give --blobs s3://tensors/shop"):
        begun(store, tmp_path, TASK, None)
