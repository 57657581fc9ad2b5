"""What a relay sends up: means of the updates that it has, by the weights that it is given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.clustering import geometry
from coordinator.fleet.relayed import Relay, Relayed, SiteOrders, SiteRequest, Sum, Summed
from coordinator.fleet.sites import SiteSums
from coordinator.relay.site import Site
from coordinator.store.store import Store
from edge_agent.device.worker import FinishedOrder
from fedge.commands.broker import LocalBroker
from fedge.models import build
from fedge.privacy.egress import PRESETS, Rules
from fedge.steps.contract import Reveals, encode_body
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.system.files import compute_digest
from fedge.system.stopping import never
from fedge.tasks import Partitioning, load_pool, load_task, make_device_data, partition_pool
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, TensorInfo, from_bytes, unflatten
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import BlobRef, Order
from tests.support.agents import agents
from tests.support.contracts import order_of
from tests.support.waiting import until

SAMPLES = load_pool("digits", limit=60)
LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(3,)),))
VALUES = {"a": [1.0, 0.0, 0.0], "b": [0.0, 4.0, 0.0], "c": [0.0, 0.0, 2.0]}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(BrokerSettings("localhost", 1), "f", tmp_path, load_task("digits"), lambda *_: None)
    with contextlib.closing(Store(tmp_path / "store")) as found.store:
        yield found


def put(site: Site, values: list[float]) -> BlobRef:
    data = codecs.encode({"w": np.float32(values)}, Codec.FLOAT32)
    return BlobRef(digest=site.store.blobs.put(data), size_bytes=len(data))


def summed(site: Site, wanted: SiteSums) -> tuple[Summed, FinishedOrder]:
    ref = BlobRef(digest="ab" * 32, size_bytes=1)
    action = Sum(wanted=ref)
    order: Order = order_of(action)
    finished = site.execute(order, lambda _: msgspec.msgpack.encode(wanted), stop=never, action=action)
    assert isinstance(finished.result, Summed)
    return finished.result, finished


def test_means_of_each_cluster_with_weights_and_factors(site: Site) -> None:
    updates = {i: put(site, values) for i, values in VALUES.items()}
    wanted = SiteSums(
        layout=LAYOUT,
        updates=updates,
        weights={"a": 1.0, "b": 3.0, "c": 4.0},
        sums=({"a": (1.0, 1.0), "b": (0.5, 1.0)}, {}, dict.fromkeys("abc", (1.0, 1.0))),
        directions=("a", "b", "c"),
    )
    result, finished = summed(site, wanted)
    assert result.means[1] is None
    means = [from_bytes(finished.blobs[ref.digest])["w"].tolist() for ref in result.means if ref]
    assert means == [[0.25, 1.5, 0.0], [0.125, 1.5, 1.0]]
    assert result.missing == ()
    assert result.directions is not None
    directions = from_bytes(finished.blobs[result.directions.digest])
    for i, values in VALUES.items():
        np.testing.assert_array_equal(directions[i], np.float32(geometry.compute_direction(np.float32(values))))
    assert summed(site, wanted)[1].blobs == finished.blobs, "again it is the same, byte for byte"


def test_what_is_lost_is_named_and_left_out(site: Site) -> None:
    updates = {"a": put(site, VALUES["a"]), "b": BlobRef(digest="cd" * 32, size_bytes=100)}
    both = dict.fromkeys("ab", (1.0, 1.0))
    wanted = SiteSums(
        layout=LAYOUT, updates=updates, weights={"a": 1.0, "b": 9.0}, sums=(both, {"b": (1.0, 1.0)}), directions=()
    )
    result, finished = summed(site, wanted)
    assert result.missing == ("b",)
    assert result.directions is None
    assert result.means[0] is not None
    assert from_bytes(finished.blobs[result.means[0].digest])["w"].tolist() == VALUES["a"]
    assert result.means[1] is None


async def test_a_new_run_does_not_make_devices_disappear(one_broker: LocalBroker, tmp_path: Path) -> None:
    """Else the coordinator above takes them for gone, and begins rounds without them."""
    data = make_device_data(SAMPLES.spec, partition_pool(SAMPLES, 1, Partitioning(sensitive=0.2), seed=0)[0])
    address = BrokerSettings(one_broker.host, one_broker.port)
    site = Site(address, "all", tmp_path / "relay", SAMPLES.spec, lambda *_: None)
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(len(site.list_present()))
            await asyncio.sleep(0)

    async with agents(one_broker, SAMPLES.spec, dict.fromkeys(("a", "b"), data), tmp_path), site:
        await until(lambda: len(site.list_present()) == 2)
        known = {facts.id: facts for facts in site.fleet.registry.list_facts()}
        assert all(
            (here.data_version, here.n_arrived) == (known[here.id].data_version, known[here.id].n_arrived)
            for here in site.list_present()
        )
        looking = asyncio.create_task(look())
        orders = msgspec.msgpack.encode(SiteOrders(seed=0, layout=LAYOUT, keep=(), asked=(), devices={}))
        action = Relay(orders=BlobRef(digest=compute_digest(orders), size_bytes=len(orders)), models=(), work=0.0)
        await asyncio.to_thread(site.execute, order_of(action), lambda _: orders, stop=never, action=action)
        looking.cancel()
    assert seen == {2}


async def test_what_does_not_answer_the_order_from_above_is_not_handed_on(
    one_broker: LocalBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that has begun to withhold losses, of which the coordinator above has not heard when it asks for them.

    It would be evidence against the relay, and a device could make it at will.
    """
    data = make_device_data(SAMPLES.spec, partition_pool(SAMPLES, 1, Partitioning(), seed=0)[0])
    address = BrokerSettings(one_broker.host, one_broker.port)
    site = Site(address, "all", tmp_path / "relay", SAMPLES.spec, lambda *_: None)
    layout, first = build.make_initial_model(SAMPLES.spec, 0)
    model = codecs.encode(unflatten(first, layout), Codec.FLOAT32)
    start = Start(model=BlobRef(digest=compute_digest(model), size_bytes=len(model), codec=Codec.FLOAT32))
    train = Train(starts=(start,), sgd=Sgd(steps=1))
    kind = SiteRequest(train.STEP, train.VERSION, encode_body(train))
    orders = msgspec.msgpack.encode(SiteOrders(seed=0, layout=layout, keep=(), asked=(kind,), devices={"a": 0}))
    ref = BlobRef(digest=compute_digest(orders), size_bytes=len(orders))
    files = {ref.digest: orders, start.model.digest: model}
    action = Relay(orders=ref, models=(start.model,), work=0.0)
    order = msgspec.structs.replace(order_of(action), task_fingerprint=SAMPLES.spec.compute_fingerprint())
    rules = Rules(PRESETS["default"] - {Reveals.LOSS})
    async with agents(one_broker, SAMPLES.spec, {"a": data}, tmp_path, rules), site:
        await until(lambda: len(site.list_present()) == 1)
        done = await asyncio.to_thread(site.execute, order, lambda ref: files[ref.digest], stop=never, action=action)
    assert isinstance(done.result, Relayed)
    assert msgspec.msgpack.decode(done.blobs[done.result.answers.digest]) == {}
    assert "no losses, which were asked for" in caplog.text
