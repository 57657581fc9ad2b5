"""The shell over real brokers: every test has a broker process, an agent and the other side of the wire."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.methods.parts.grouping import make_arm
from coordinator.selection.ccmab import estimate_transfer
from coordinator.store.records import Device
from edge_agent.agent.carrier import SPARE_DISK_BYTES, OrderExecutor
from edge_agent.agent.context import Limits
from edge_agent.agent.identity import Identity, SampleCounts
from edge_agent.agent.loop import UNANSWERED, Agent
from edge_agent.device.device import CACHED_MODELS, Fetch
from edge_agent.device.own_task import adopt_classes, read_own_task
from edge_agent.device.worker import FinishedOrder
from fedge.commands.broker import LocalBroker
from fedge.data.classes import AddedClasses, add_classes
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, StoreError, TransportError
from fedge.privacy.egress import PRESETS, Rules
from fedge.steps.contract import Action, Reveals, decode_result, list_versions, load_installed_steps
from fedge.steps.descriptions.profile import Profile
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Trained
from fedge.system.logs import LINES_PER_MINUTE
from fedge.system.stopping import Stop
from fedge.tensors.codecs import apply_differences
from fedge.tensors.codecs import encode as encode_tensors
from fedge.tensors.layout import Codec
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import (
    MAX_LEFT_S,
    Ack,
    Beacon,
    BlobRef,
    Context,
    Difference,
    Order,
    Outcome,
    Presence,
    Want,
    Why,
    encode_message,
)
from tests.chaos.network import Network
from tests.support.peer import TASK, WAIT_S, EchoWorker, Peer, later, order_of, train

ME = "pi"


class Events:
    """What an agent says, to wait for."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Condition()

    def observe(self, event: str, fields: dict[str, Any]) -> None:
        self.all.append((event, fields))
        self._task = asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.all if event == name]

    async def until(self, name: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: len(self.of(name)) >= count)
        return self.of(name)[count - 1]


def make_agent(
    broker: LocalBroker | Network,
    home: Path,
    worker: OrderExecutor | Callable[[], OrderExecutor],
    events: Events,
    **options: Any,
) -> Agent:
    return Agent(
        Identity(ME, "test", TASK, n_shared=3),
        BrokerSettings(broker.host, broker.port),
        home,
        worker if callable(worker) else lambda: worker,
        observe=events.observe,
        **options,
    )


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        agent.stop()
        async with asyncio.timeout(WAIT_S):
            await task


async def killed(task: asyncio.Task[None]) -> None:
    """End the loop's part of an agent at once, without a good-bye."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Blocking(EchoWorker):
    """Works until it is let go or asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Event()
        self.go = threading.Event()
        self.thread = ""

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action) -> FinishedOrder:
        self.thread = threading.current_thread().name
        self.started.set()
        while not self.go.wait(0.01):
            if stop():
                raise InterruptedError
        return super().execute(order, fetch, stop=stop, action=action)


class Raising(EchoWorker):
    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action) -> FinishedOrder:
        raise ZeroDivisionError("a network of the user's own")


class Diverging(EchoWorker):
    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action) -> FinishedOrder:
        return FinishedOrder(Tried(delta=float("nan")))


# ------------------------------------------------------------------------------------------------ the main way


async def test_from_order_to_acknowledgement(broker: LocalBroker, tmp_path: Path) -> None:
    events = Events()
    agent = make_agent(broker, tmp_path / "home", EchoWorker(), events)
    async with Peer(broker, tmp_path) as peer, running(agent):
        await peer.presence(Presence.ONLINE)
        status = peer.statuses[-1]
        assert (status.device_id, status.n_samples, status.task_fingerprint) == (ME, 3, TASK.compute_fingerprint())
        await peer.until(lambda: bool(peer.contexts))
        assert peer.contexts[0].n_samples == 3

        model = peer.model(200_000)
        order = order_of(action := train(model))
        await peer.send(order)
        result = await peer.result_of(action, order)
        assert isinstance(result, Trained)
        update = await peer.fetch_update(ME, result.update)
        assert update == peer.sent.get(model.digest)[::-1]

        await peer.ack(order)
        acked = await events.until("report_acked")
        assert acked["order"] == order.id
        left = {p.name for p in (tmp_path / "home" / "outbox").rglob("*") if p.is_file()}
        assert left == {"acked", "lock", "version"}
        agent.stop()
        await peer.presence(Presence.SLEEPING)


async def test_an_order_that_comes_many_times_is_carried_out_once(one_broker: LocalBroker, tmp_path: Path) -> None:
    events, worker = Events(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, events)):
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        for _ in range(5):
            await peer.send(order)
        await peer.report_of(order)
        await peer.ack(order)
        await events.until("report_acked")
        await peer.send(order)
        other = order_of(Profile(extractor=peer.model()), "r.1.t.pi")
        await peer.send(other)
        await peer.report_of(other)
        assert worker.done == [order.id, other.id]


async def test_a_report_is_repeated_until_it_is_acknowledged(one_broker: LocalBroker, tmp_path: Path) -> None:
    events, worker = Events(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, events)):
        await peer.presence(Presence.ONLINE)
        order = order_of(Profile(extractor=peer.model()))
        await peer.send(order)
        await peer.until(lambda: len(peer.reports) >= 2)
        assert msgspec.structs.replace(peer.reports[1], again=0) == peer.reports[0]
        assert worker.done == [order.id]


async def test_a_report_says_how_often_it_was_sent_and_the_log_that_nobody_answers_it(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.agent.session.FIRST_RESEND_S", 0.01)
    monkeypatch.setattr("edge_agent.agent.session.LAST_RESEND_S", 0.02)
    events = Events()
    async with Peer(one_broker, tmp_path) as peer:
        order = order_of(train(peer.model()))
        async with running(make_agent(one_broker, tmp_path / "home", EchoWorker(), events)):
            await peer.presence(Presence.ONLINE)
            await peer.send(order)
            await peer.until(lambda: any(report.again > UNANSWERED for report in peer.reports))
            said = [report.again for report in peer.reports]
            assert said[0] == 0
            assert said == sorted(said)
            assert (await events.until("unanswered"))["order"] == order.id
            await peer.ack(order)
            await events.until("report_acked")
    assert len(events.of("unanswered")) == 1


async def test_orders_of_another_run_are_told_of_also_after_a_restart(one_broker: LocalBroker, tmp_path: Path) -> None:
    """Such as those of a coordinator with another home."""
    events = Events()
    async with Peer(one_broker, tmp_path) as peer:
        runs = ["r", "r", "s", "s", "r"]
        for n, run in enumerate(runs):
            order = msgspec.structs.replace(order_of(train(peer.model()), f"{run}.{n}.s.pi"), run=run)
            async with running(make_agent(one_broker, tmp_path / "home", EchoWorker(), events)):
                await peer.presence(Presence.ONLINE)
                await peer.send(order)
                await peer.report_of(order)
                await peer.ack(order)
                await events.until("report_acked", n + 1)
            await peer.presence(Presence.SLEEPING)
    assert [(told["before"], told["run"]) for told in events.of("other_run")] == [("r", "s"), ("s", "r")]


async def test_one_model_for_two_orders_is_fetched_once(one_broker: LocalBroker, tmp_path: Path) -> None:
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        model = peer.model(1000)
        for order in (order_of(Profile(extractor=model), "r.1.a.pi"), order_of(train(model), "r.1.b.pi")):
            await peer.send(order)
            await peer.report_of(order)
        assert peer.wants == {model.digest: 1}


async def test_a_device_behind_a_slow_link_tells_a_lower_rate(one_broker: LocalBroker, tmp_path: Path) -> None:
    """With it the bandit expects transfers to take time. Small models tell nothing of the link."""
    rates: list[float] = []
    async with Network(one_broker.host, one_broker.port) as link:
        for bytes_per_s in (0.0, 1e5):
            link.bytes_per_s = bytes_per_s
            agent = make_agent(link, tmp_path / f"{bytes_per_s}", EchoWorker(), Events(), context_interval_s=0.05)
            async with Peer(one_broker, tmp_path) as peer, running(agent):
                await peer.presence(Presence.ONLINE)
                small, large = peer.model(1000), peer.model(200_000 + len(rates))
                for k, model in enumerate((small, large)):
                    order = order_of(train(model), f"r.1.{k}.pi")
                    await peer.send(order)
                    await peer.report_of(order)
                    if model is small:
                        assert [context.link_mbit_s for context in peer.contexts] == [None] * len(peer.contexts)
                await peer.until(lambda: peer.contexts[-1].link_mbit_s is not None)
                found = make_arm(Device(ME, 3, peer.contexts[-1]), Sgd(), large)
                rates.append(found.link_mbit_s or 0.0)
                assert 0 < estimate_transfer(found) == pytest.approx(2 * 8e-6 * large.size_bytes / rates[-1])
    fast, slow = rates
    assert slow < 8e-6 * 1e5 < fast


# ------------------------------------------------------------------------------------------------ differences


def versions(peer: Peer) -> tuple[BlobRef, BlobRef, Difference]:
    """A model, the next one, and the difference, all to be had from the peer."""

    def put(data: bytes) -> BlobRef:
        return BlobRef(digest=peer.sent.put(data), size_bytes=len(data))

    rng = np.random.default_rng(0)
    first = put(base := encode_tensors({"w": rng.standard_normal(5000, np.float32)}, Codec.FLOAT32))
    change = put(data := encode_tensors({"w": rng.standard_normal(5000, np.float32)}, Codec.INT8))
    second = put(b"".join(map(bytes, apply_differences(BytesIO(base), [data]))))
    return first, second, Difference(base=first.digest, blob=change)


@pytest.mark.parametrize(
    ("held", "shown", "fetched"),
    [
        ("first", "right", "difference"),
        ("nothing", "right", "second"),
        ("first", "wrong", "difference second"),
        ("first", "no tensors", "difference second"),
        ("first", "none", "second"),
    ],
)
async def test_a_model_comes_as_a_difference_to_one_that_is_there_or_whole(
    one_broker: LocalBroker, tmp_path: Path, held: str, shown: str, fetched: str
) -> None:
    events, worker = Events(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, events)):
        await peer.presence(Presence.ONLINE)
        first, second, difference = versions(peer)
        if shown == "wrong":  # it leads to another model
            data = encode_tensors({"w": np.ones(5000, np.float32)}, Codec.INT8)
        elif shown == "no tensors":
            data = os.urandom(500)
        else:
            data = peer.sent.get(difference.blob.digest)
        blob = BlobRef(digest=peer.sent.put(data), size_bytes=len(data))
        if held == "first":
            await peer.send(order := order_of(train(first), "r.1.t.pi"))
            await peer.report_of(order)
        peer.wants.clear()
        order = order_of(action := train(second), "r.2.t.pi")
        if shown != "none":
            own = Difference(base=first.digest, blob=blob)
            order = msgspec.structs.replace(order, differences={second.digest: own})
        await peer.send(order)
        result = await peer.result_of(action, order)
        assert isinstance(result, Trained)
        assert await peer.fetch_update(ME, result.update) == peer.sent.get(second.digest)[::-1]
        names = {first.digest: "first", second.digest: "second", blob.digest: "difference"}
        assert " ".join(sorted(names[digest] for digest in peer.wants)) == fetched
        assert not (tmp_path / "home" / "models" / blob.digest).exists()


async def test_models_with_a_base_in_common_take_the_way_to_it_once(one_broker: LocalBroker, tmp_path: Path) -> None:
    """So does an order for the base itself, later."""
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        first, base, way = versions(peer)
        differences, siblings = {base.digest: way}, []
        for number in 1.0, 2.0:
            data = encode_tensors({"w": np.full(5000, number, np.float32)}, Codec.INT8)
            blob = BlobRef(digest=peer.sent.put(data), size_bytes=len(data))
            whole = b"".join(map(bytes, apply_differences(BytesIO(peer.sent.get(base.digest)), [data])))
            siblings.append(BlobRef(digest=peer.sent.put(whole), size_bytes=len(whole)))
            differences[siblings[-1].digest] = Difference(base=base.digest, blob=blob)
        trial = Trial(global_model=siblings[0], expert=siblings[1])
        for number, action in enumerate((train(first), trial, train(base))):
            order = msgspec.structs.replace(order_of(action, f"r.{number}.t.pi"), differences=differences)
            await peer.send(order)
            await peer.report_of(order)
    assert peer.wants == dict.fromkeys((first.digest, *(known.blob.digest for known in differences.values())), 1)


# ------------------------------------------------------------------------------------------------ restarts


async def test_a_finished_report_survives_the_death_of_its_agent(one_broker: LocalBroker, tmp_path: Path) -> None:
    events, first, second = Events(), EchoWorker(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer:
        task = asyncio.create_task(make_agent(one_broker, tmp_path / "home", first, events).run())
        await peer.presence(Presence.ONLINE)
        order = order_of(action := train(peer.model()))
        await peer.send(order)
        report = await peer.report_of(order)
        await killed(task)
        peer.reports.clear()
        async with running(make_agent(one_broker, tmp_path / "home", second, Events())):
            assert await peer.report_of(order) == report
            result = decode_result(report, action)
            assert isinstance(result, Trained)
            await peer.fetch_update(ME, result.update)
        assert (first.done, second.done) == ([order.id], [])
        assert peer.statuses[0].incarnation != peer.statuses[-1].incarnation


async def test_a_report_that_its_owner_allows_no_more_never_leaves(one_broker: LocalBroker, tmp_path: Path) -> None:
    first, second = EchoWorker(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer:
        task = asyncio.create_task(make_agent(one_broker, tmp_path / "home", first, Events()).run())
        await peer.presence(Presence.ONLINE)
        await peer.send(order := order_of(train(peer.model())))
        assert (await peer.report_of(order)).outcome is Outcome.DONE
        await killed(task)
        peer.reports.clear()
        rules = Rules(PRESETS["default"] - {Reveals.UPDATE})
        async with running(make_agent(one_broker, tmp_path / "home", second, Events(), rules=rules)):
            again = await peer.report_of(order)
    assert (again.outcome, again.why) == (Outcome.DECLINED, Why.NOT_ALLOWED)
    assert second.done == []


async def test_an_unfinished_order_is_carried_out_after_a_restart(one_broker: LocalBroker, tmp_path: Path) -> None:
    stuck, second = Blocking(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer:
        task = asyncio.create_task(make_agent(one_broker, tmp_path / "home", stuck, Events()).run())
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        await peer.send(order)
        await asyncio.to_thread(stuck.started.wait, WAIT_S)
        await killed(task)
        async with running(make_agent(one_broker, tmp_path / "home", second, Events())):
            await peer.report_of(order)
        assert (stuck.done, second.done) == ([], [order.id])


async def test_stopping_interrupts_the_work_and_keeps_the_order(one_broker: LocalBroker, tmp_path: Path) -> None:
    stuck, events = Blocking(), Events()
    agent = make_agent(one_broker, tmp_path / "home", stuck, events)
    async with Peer(one_broker, tmp_path) as peer:
        async with running(agent):
            await peer.presence(Presence.ONLINE)
            order = order_of(train(peer.model()))
            await peer.send(order)
            await asyncio.to_thread(stuck.started.wait, WAIT_S)
            assert stuck.thread != threading.main_thread().name
        await peer.presence(Presence.SLEEPING)
        assert peer.reports == []
        assert (tmp_path / "home" / "outbox" / "orders" / order.id).exists()


async def test_a_broker_that_restarts_is_told_all_again(one_broker: LocalBroker, tmp_path: Path) -> None:
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        await one_broker.stop()
        await one_broker.start()
        await peer.until(lambda: sum(s.presence is Presence.ONLINE for s in peer.statuses) >= 2)
        order = order_of(train(peer.model()))
        await peer.send(order)
        await peer.report_of(order)


# ------------------------------------------------------------------------------------------------ deadlines


async def test_work_is_given_up_at_the_deadline(one_broker: LocalBroker, tmp_path: Path) -> None:
    stuck, events = Blocking(), Events()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", stuck, events)):
        await peer.presence(Presence.ONLINE)
        await peer.send(order_of(train(peer.model()), in_s=1.0))
        gone = await events.until("order_discarded")
        assert gone["reason"] == "expired"
        assert peer.reports == []
        stuck.go.set()
        order = order_of(train(peer.model()), "r.2.s.pi")
        await peer.send(order)
        await peer.report_of(order)


async def test_a_model_that_nobody_sends_costs_the_deadline_at_most(one_broker: LocalBroker, tmp_path: Path) -> None:
    events = Events()
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), events)),
    ):
        await peer.presence(Presence.ONLINE)
        await peer.send(order_of(train(BlobRef(digest="ab" * 32, size_bytes=10)), in_s=1.0))
        await events.until("order_discarded")
        assert peer.wants["ab" * 32] >= 1


async def test_an_order_whose_model_nobody_has_gives_way_to_the_next(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged, lost, or of a coordinator whose home is gone: it may have a day, and the device goes on all the same."""
    monkeypatch.setattr("edge_agent.agent.models.FETCH_PATIENCE_S", 5.0)
    agent = make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())
    async with Peer(one_broker, tmp_path) as peer, running(agent):
        await peer.presence(Presence.ONLINE)
        forged = order_of(train(BlobRef(digest="ab" * 32, size_bytes=10)), "forged", in_s=MAX_LEFT_S)
        genuine = order_of(train(peer.model()), "r.2.s.pi")
        await peer.send(forged)
        await peer.send(genuine)
        assert (await peer.report_of(forged)).why is Why.UNREACHABLE
        assert (await peer.report_of(genuine)).outcome is Outcome.DONE


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("leaf", "payload", "name"),
    [
        ("orders", b"", "malformed"),
        ("orders", b"\xc1 nonsense", "malformed"),
        ("orders", b"\x00" * 70_000, "oversized"),
        ("orders", msgspec.msgpack.encode((1, {"type": "order"})), "version"),
        ("orders", msgspec.msgpack.encode((3, {"type": "order"})), "version"),
        ("orders", msgspec.msgpack.encode((2, {"type": "order", "id": "../../etc"})), "malformed"),
        ("orders", encode_message(Ack(order_id="a", device_id=ME, accepted=True)), "unexpected-type"),
        (
            "orders",
            encode_message(order_of(train(BlobRef(digest="0" * 64, size_bytes=1)), device="pi-2")),
            "foreign-id",
        ),
        *(
            (
                "orders",
                encode_message(order_of(train(BlobRef(digest="0" * 64, size_bytes=1)), in_s=left_s)),
                "malformed",
            )
            for left_s in (-1.0, 0.0, 86401.0, 4e12)
        ),
        ("acks", b"\x93", "malformed"),
        ("acks", encode_message(Ack(order_id="never", device_id=ME, accepted=True)), "unknown-order"),
        ("acks", encode_message(Ack(order_id="never", device_id="pi-2", accepted=True)), "foreign-id"),
        ("wants", b"{}", "malformed"),
        ("wants", encode_message(Want(device_id="pi-2", digest="0" * 64, ranges=((0, 1),))), "foreign-id"),
        ("wants", encode_message(Want(device_id=ME, digest="0" * 64, ranges=((0, 1),))), "unknown-blob"),
    ],
)
async def test_bad_input_is_refused_by_name_and_changes_nothing(
    one_broker: LocalBroker, tmp_path: Path, leaf: str, payload: bytes, name: str
) -> None:
    events, worker = Events(), EchoWorker()
    agent = make_agent(one_broker, tmp_path / "home", worker, events)
    async with Peer(one_broker, tmp_path) as peer, running(agent):
        await peer.presence(Presence.ONLINE)
        topic = peer.topics.make_wants_topic(ME) if leaf == "wants" else peer.topics.make_agent_topic(ME, leaf)
        await peer.transport.publish(topic, payload)
        refusal = await events.until("refused")
        assert (refusal["name"], refusal["topic"]) == (name, topic)
        assert agent.refused == {name: 1}
        assert not list((tmp_path / "home" / "outbox" / "orders").iterdir())
        order = order_of(train(peer.model()))
        await peer.send(order)
        await peer.report_of(order)
        assert worker.done == [order.id], "and it goes on as before"


async def test_a_flood_of_bad_messages_is_few_lines_and_each_is_counted(
    one_broker: LocalBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events, flood = Events(), 5 * LINES_PER_MINUTE
    agent = make_agent(one_broker, tmp_path / "home", EchoWorker(), events)
    async with Peer(one_broker, tmp_path) as peer, running(agent):
        await peer.presence(Presence.ONLINE)
        for _ in range(flood):
            await peer.transport.publish(peer.topics.make_agent_topic(ME, "orders"), b"nonsense")
        order = order_of(train(peer.model()))
        await peer.send(order)
        await peer.report_of(order)
        assert agent.refused == {"malformed": flood}
    assert LINES_PER_MINUTE <= caplog.text.count("event=refused") <= 2 * LINES_PER_MINUTE
    told = events.of("refused")
    assert len(told) == caplog.text.count("event=refused")


async def test_a_private_file_is_served_to_nobody(one_broker: LocalBroker, tmp_path: Path) -> None:
    """A model that the device received, or any file of its home, is no update of a kept report."""
    events = Events()
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), events)),
    ):
        await peer.presence(Presence.ONLINE)
        model = peer.model()
        order = order_of(Profile(extractor=model))
        await peer.send(order)
        await peer.report_of(order)
        assert (tmp_path / "home" / "models" / model.digest).exists()
        want = Want(device_id=ME, digest=model.digest, ranges=((0, 10),))
        await peer.transport.publish(peer.topics.make_wants_topic(ME), encode_message(want))
        assert (await events.until("refused"))["name"] == "unknown-blob"


async def test_an_order_with_other_contents_is_refused(one_broker: LocalBroker, tmp_path: Path) -> None:
    events, worker = Events(), EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, events)):
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        await peer.send(order)
        await peer.report_of(order)
        await peer.send(later(order, 90.0))
        await peer.send(msgspec.structs.replace(order, seed=7))
        assert (await events.until("refused"))["name"] == "order-changed"
        assert worker.done == [order.id]


# ------------------------------------------------------------------------------------------------ cannot or will not


async def test_a_broker_that_forbids_to_fetch_a_model_fails_the_order_and_not_the_agent(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Peer(one_broker, tmp_path) as peer:
        agent = make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())
        async with running(agent):
            await peer.presence(Presence.ONLINE)

            async def refuse(topic_filter: str, handler: object) -> None:
                raise TransportError("subscription refused: Not authorized")

            with monkeypatch.context() as patch:
                patch.setattr(agent._transport, "subscribe", refuse)
                order = order_of(train(peer.model()))
                await peer.send(order)
                report = await peer.report_of(order)
                assert (report.outcome, report.why) == (Outcome.FAILED, Why.UNREACHABLE)
            order = order_of(train(peer.model()), "r.2.s.pi")
            await peer.send(order)
            assert (await peer.report_of(order)).outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("worker", "why", "reason"),
    [
        (Raising(), Why.ERROR, "ZeroDivisionError: a network of the user's own"),
        (Diverging(), Why.UNFIT, "Tried holds a number that is not finite"),
    ],
)
async def test_work_that_breaks_is_reported_as_failed(
    one_broker: LocalBroker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    worker: EchoWorker,
    why: Why,
    reason: str,
) -> None:
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, Events())):
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        await peer.send(order)
        report = await peer.report_of(order)
        assert (report.outcome, report.why) == (Outcome.FAILED, why)
        assert f"event=order_refused order={order.id} why={why} reason={reason!r}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "outcome", "why"),
    [
        ({"step": "dance"}, Outcome.UNSUPPORTED, Why.UNKNOWN_STEP),
        ({"version": 9}, Outcome.UNSUPPORTED, Why.UNKNOWN_STEP),
        ({"body": b"nonsense"}, Outcome.FAILED, Why.MALFORMED),
    ],
)
async def test_a_step_that_the_device_does_not_know_is_answered_without_fetching_a_model(
    one_broker: LocalBroker, tmp_path: Path, changes: dict[str, Any], outcome: Outcome, why: Why
) -> None:
    worker = EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, Events())):
        await peer.presence(Presence.ONLINE)
        order = msgspec.structs.replace(order_of(train(peer.model())), **changes)
        await peer.send(order)
        report = await peer.report_of(order)
        assert (report.outcome, report.why) == (outcome, why)
        assert (peer.wants, worker.done) == ({}, [])
        known = order_of(train(peer.model()), "r.1.known.pi")
        await peer.send(known)
        assert (await peer.report_of(known)).outcome is Outcome.DONE


class Installing(EchoWorker):
    """Each order leaves a bundle."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._bundles = home / "bundles"

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop, action: Action) -> FinishedOrder:
        (self._bundles / str(4 + len(self.done))).mkdir(parents=True)
        return super().execute(order, fetch, stop=stop, action=action)


class Growing:
    """Samples that change while an agent runs."""

    def __init__(self) -> None:
        self.counts = SampleCounts(5)
        self.next = self.counts
        self.closed = False

    def refresh(self) -> None:
        self.counts = self.next

    def close(self) -> None:
        self.closed = True


async def test_the_status_is_published_again_when_the_samples_have_changed(
    one_broker: LocalBroker, tmp_path: Path
) -> None:
    samples = Growing()
    agent = make_agent(one_broker, tmp_path / "pi", EchoWorker(), Events(), samples=samples, context_interval_s=0.05)
    async with Peer(one_broker, tmp_path) as peer:
        async with running(agent):
            await peer.presence(Presence.ONLINE)
            await peer.until(lambda: len(peer.contexts) > 3)
            assert len(peer.statuses) == 1, "nothing has changed"
            samples.next = SampleCounts(7, data_version=2, n_arrived=9)
            await peer.until(lambda: len(peer.statuses) > 1)
            status = peer.statuses[-1]
            assert (status.n_samples, status.data_version, status.n_arrived) == (7, 2, 9)
            await peer.until(lambda: peer.contexts[-1].n_samples == 7)
        assert samples.closed


async def say_task(peer: Peer, task: TaskSpec, *names: str) -> None:
    """Say what the federation learns, as its coordinator does."""
    classes = AddedClasses(names=names, fingerprint=task.compute_fingerprint())
    beacon = Beacon(at=0.0, classes=classes, task=msgspec.json.encode(task))
    await peer.transport.publish(peer.topics.beacon, encode_message(beacon), retain=True)


async def test_a_device_with_another_task_says_in_words_what_differs_until_it_is_the_same(
    one_broker: LocalBroker, tmp_path: Path
) -> None:
    events = Events()
    agent = make_agent(one_broker, tmp_path / "pi", EchoWorker(), events)
    async with Peer(one_broker, tmp_path) as peer, running(agent):
        await peer.presence(Presence.ONLINE)
        assert peer.statuses[-1].other_task == ""
        await say_task(peer, msgspec.structs.replace(TASK, model="cnn"))
        await peer.until(lambda: f"the network {TASK.model} in place of cnn" in peer.statuses[-1].other_task)
        await say_task(peer, TASK)
        await peer.until(lambda: peer.statuses[-1].other_task == "")
    assert len(events.of("other_task")) == 1


async def test_an_agent_ends_for_another_one_when_a_class_has_joined(one_broker: LocalBroker, tmp_path: Path) -> None:
    grown, home = add_classes(TASK, ("bird",)), tmp_path / "pi"
    adopt = partial(adopt_classes, TASK, home)
    agent = make_agent(one_broker, home, EchoWorker(), Events(), adopt=adopt)
    async with Peer(one_broker, tmp_path) as peer, running(agent) as task:
        await peer.presence(Presence.ONLINE)
        await say_task(peer, grown, "bird")
        await asyncio.wait_for(asyncio.shield(task), WAIT_S)
        assert agent.is_outdated
        assert read_own_task(TASK, home) == grown
        await say_task(peer, TASK)


async def test_the_status_tells_the_steps_and_the_highest_release(one_broker: LocalBroker, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, home, Installing(home), Events())):
        await peer.presence(Presence.ONLINE)
        capabilities = peer.statuses[-1].capabilities
        assert capabilities is not None
        assert capabilities.steps == list_versions(load_installed_steps())
        assert peer.statuses[-1].release == 0
        for n, release in enumerate((4, 5)):
            await peer.send(order_of(train(peer.model()), f"r.{n}.s.pi"))
            await peer.until(lambda release=release: peer.statuses[-1].release == release)


async def test_an_order_of_another_task_fails_without_fetching_its_model(
    one_broker: LocalBroker, tmp_path: Path
) -> None:
    worker = EchoWorker()
    async with Peer(one_broker, tmp_path) as peer, running(make_agent(one_broker, tmp_path / "home", worker, Events())):
        await peer.presence(Presence.ONLINE)
        order = msgspec.structs.replace(order_of(train(peer.model())), task_fingerprint="f" * 16)
        await peer.send(order)
        report = await peer.report_of(order)
        assert (report.outcome, report.why) == (Outcome.FAILED, Why.OTHER_TASK)
        assert (peer.wants, worker.done) == ({}, [])


@pytest.mark.parametrize(
    ("limits", "size_bytes", "why"),
    [(Limits(min_free_ram_gb=1e6), 10, Why.MEMORY), (Limits(), 2**40, Why.DISK)],
)
async def test_a_device_past_its_limits_declines_with_a_reason(
    one_broker: LocalBroker, tmp_path: Path, limits: Limits, size_bytes: int, why: Why
) -> None:
    worker = EchoWorker()
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", worker, Events(), limits=limits)),
    ):
        await peer.presence(Presence.ONLINE)
        order = order_of(train(BlobRef(digest="ab" * 32, size_bytes=size_bytes)))
        await peer.send(order)
        report = await peer.report_of(order)
        assert (report.outcome, report.why) == (Outcome.DECLINED, why)
        assert worker.done == []


async def test_an_order_that_would_fill_the_disk_is_declined_and_the_next_is_done(
    one_broker: LocalBroker, tmp_path: Path, free_disk: SimpleNamespace
) -> None:
    worker = EchoWorker()
    free_disk.bytes = SPARE_DISK_BYTES + 499_999
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", worker, Events())),
    ):
        await peer.presence(Presence.ONLINE)
        large = order_of(train(BlobRef(digest="ab" * 32, size_bytes=500_000)))
        await peer.send(large)
        report = await peer.report_of(large)
        assert (report.outcome, report.why) == (Outcome.DECLINED, Why.DISK)
        assert peer.wants == {}
        free_disk.bytes += 1_000_000
        small = order_of(train(peer.model(500_000)), order_id="small")
        await peer.send(small)
        assert (await peer.report_of(small)).outcome is Outcome.DONE
        assert worker.done == ["small"]


@pytest.mark.parametrize(
    ("limits", "now", "excuse"),
    [
        (Limits(), {"free_ram_gb": 0.0, "temperature_c": 999.0, "battery": 0.0}, None),
        (Limits(min_free_ram_gb=0.5), {"free_ram_gb": 0.5}, None),
        (
            Limits(min_free_ram_gb=0.5),
            {"free_ram_gb": 0.49},
            (Why.MEMORY, "free RAM 0.49 GB is below 0.5 GB"),
        ),
        (Limits(max_temperature_c=70), {"temperature_c": 70.0}, None),
        (
            Limits(max_temperature_c=70),
            {"temperature_c": 71.0},
            (Why.HOT, "temperature 71 C is above 70 C"),
        ),
        (Limits(min_battery=0.3), {"battery": 0.3}, None),
        (Limits(min_battery=0.3), {"battery": 0.1}, (Why.BATTERY, "battery 10% is below 30%")),
        (Limits(min_free_ram_gb=1, max_temperature_c=1, min_battery=1), {}, None),
    ],
)
def test_limits(limits: Limits, now: dict[str, float], excuse: tuple[Why, str] | None) -> None:
    found = limits.find_refusal(Context(device_id=ME, **now))
    assert (found and (found.why, found.reason)) == excuse


# ------------------------------------------------------------------------------------------------ the process


async def test_stopping_without_a_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # never says a word
        nobody.setblocking(False)
        port = nobody.getsockname()[1]
        agent = Agent(Identity(ME, "test", TASK, n_shared=3), BrokerSettings("127.0.0.1", port), tmp_path, EchoWorker)
        running = asyncio.create_task(agent.run())
        connection, _ = await asyncio.get_running_loop().sock_accept(nobody)
        with connection:
            agent.stop()
            await asyncio.wait_for(running, WAIT_S)
    assert not running.cancelling()


async def test_one_agent_for_each_home(one_broker: LocalBroker, tmp_path: Path) -> None:
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        with pytest.raises(ConfigError, match="another agent"):
            await make_agent(one_broker, tmp_path / "home", EchoWorker(), Events()).run()


async def test_a_disk_that_takes_no_more_ends_the_agent(one_broker: LocalBroker, tmp_path: Path) -> None:
    """The limit on file sizes stands in for a full disk: the kernel refuses the write in the same place."""
    worker = EchoWorker()
    async with Peer(one_broker, tmp_path) as peer:
        model = peer.model(500_000)
        task = asyncio.create_task(make_agent(one_broker, tmp_path / "home", worker, Events()).run())
        await peer.presence(Presence.ONLINE)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            await peer.send(order_of(train(model)))
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(StoreError):
                    await task
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert worker.done == []
        assert (tmp_path / "home" / "outbox" / "orders" / "r.1.s.pi").exists(), "the order waits for a better day"


async def test_a_disk_that_takes_no_more_ends_an_agent_that_speaks_again(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr("edge_agent.agent.speech.voice.YIELD_BASE_S", 0.1)
    async with Peer(one_broker, tmp_path) as peer:
        agent = make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())
        task = asyncio.create_task(agent.run())
        await peer.presence(Presence.ONLINE)
        twin = msgspec.structs.replace(agent._make_status(Presence.ONLINE), incarnation="twin")
        monkeypatch.setattr(agent, "_handle_event", full)
        await peer.transport.publish(peer.topics.make_agent_topic(ME, "status"), encode_message(twin), retain=True)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(StoreError):
                await task


async def test_models_of_somebody_else_are_used_as_they_are(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch
) -> None:
    """An agent that ran as root has left them: who may not set their times may still read them."""

    opened = os.open

    def not_ours(path: Path, *times: object) -> None:
        raise PermissionError(path)

    def read_only(path: Path, flags: int, *rest: int, **more: int) -> int:
        if len(Path(path).name) == 64 and flags & os.O_WRONLY:
            raise PermissionError(path)
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "utime", not_ours)
    monkeypatch.setattr(os, "open", read_only)
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        order = order_of(train(peer.model()))
        await peer.send(order)
        await peer.report_of(order)


async def test_models_that_are_used_no_more_are_deleted(one_broker: LocalBroker, tmp_path: Path) -> None:
    async with (
        Peer(one_broker, tmp_path) as peer,
        running(make_agent(one_broker, tmp_path / "home", EchoWorker(), Events())),
    ):
        await peer.presence(Presence.ONLINE)
        models = [peer.model() for _ in range(12)]
        for n, model in enumerate(models):
            order = order_of(Trial(global_model=models[0], expert=model), f"r.{n}.s.pi")
            await peer.send(order)
            await peer.report_of(order)
            await peer.ack(order)
        kept = [model for model in models if (tmp_path / "home" / "models" / model.digest).exists()]
        assert kept == [models[0], *models[-1 - CACHED_MODELS :]]
        assert peer.wants == {model.digest: 1 for model in models}


def test_the_shell_needs_no_torch() -> None:
    program = (
        "import sys, edge_agent.agent, edge_agent.agent.cli, fedge.tasks;"
        "print([m for m in ('torch', 'sklearn', 'onnx', 'onnxruntime', 'scipy') if m in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
