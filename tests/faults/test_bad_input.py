"""A member of the federation that sends what the contract does not allow: refused by name, and without effect.

Real processes; the member behaves in between, so that the others' rounds go on. What it did must leave no trace but the
log lines, the counters and its own rejected orders: the model is that of a run without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.profile import Profiled
from fedge.system.files import compute_digest
from fedge.tensors.layout import Codec, from_bytes, to_bytes
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    BlobRef,
    Context,
    Health,
    Message,
    Order,
    Outcome,
    Phase,
    Presence,
    Report,
    Status,
    Want,
    Why,
    encode_message,
)
from tests.support.device import RawDevice, trained
from tests.support.federation import Federation, Running, same, settings
from tests.support.peer import action_of
from tests.support.waiting import until

HONEST = ("cam0", "cam1")
ME = "mallory"
ACCOMPLICES = ("mallory1", "mallory2")
TURNS = (4, 3, 2)
"""Rounds with bad results from one device: three are evidence enough to leave it out, but a digest blames nobody."""
ACK = Ack(order_id="o", device_id=ME, accepted=True)
CONTEXT = Context(device_id=ME)
HEALTH = Health(device_id=ME, at=1.0, phase=Phase.SERVING, release=0)
"""Of version 1, as a Want is."""
UNKNOWN = Want(device_id=ME, digest="0" * 64, ranges=((0, 1),))


class Mallory(RawDevice):
    """Also says how often the coordinator wanted bytes."""

    wants = 0

    async def order_of(self, round_number: int, label: str) -> Order:
        found: Callable[[Order], bool] = lambda o: (o.round, o.label) == (round_number, label)  # noqa: E731
        await self._until(lambda: any(map(found, self.orders)))
        return next(filter(found, self.orders))

    async def wanted(self) -> None:
        await self._until(lambda: self.wants > 0)

    async def _on_want(self, inbound: Inbound) -> None:
        async with self._news:
            self.wants += 1
            self._news.notify_all()
        await super()._on_want(inbound)


def raw(message: Message, version: int | None = None) -> bytes:
    """As `encode_message`, without its checks."""
    return msgspec.msgpack.encode((version or message.VERSION, message))


def status(**changes: object) -> Status:
    values = {"device_id": ME, "incarnation": "1", "presence": Presence.ONLINE, "task_fingerprint": "0"}
    return Status(**(values | changes))  # type: ignore[arg-type]


def bad_messages(order: Order, others: bytes) -> list[tuple[str, str, bytes]]:
    """(topic, refusal, payload) for each topic that the coordinator reads. `others`: the accepted report of cam0."""
    report = Report(order_id=order.id, device_id=ME, seconds=0.0, outcome=Outcome.DECLINED)
    changed = msgspec.structs.replace
    model = action_of(order).starts[0].model  # type: ignore[attr-defined]
    good = {"status": status(), "context": CONTEXT, "reports": report, "wants": UNKNOWN}
    everywhere = [
        *((leaf, "malformed", b"\xc1 no message") for leaf in good),
        *((leaf, "malformed", encode_message(message)[:-1]) for leaf, message in good.items()),
        *((leaf, "version", raw(message, 99)) for leaf, message in good.items()),
        *((leaf, "oversized", bytes(MAX_MESSAGE_BYTES + 1)) for leaf in good),
        *((leaf, "unexpected-type", encode_message(HEALTH if leaf == "wants" else ACK)) for leaf in good),
        *((leaf, "foreign-id", encode_message(changed(message, device_id="cam0"))) for leaf, message in good.items()),
    ]
    return [
        *everywhere,
        ("status", "task-mismatch", encode_message(status())),
        ("context", "not-finite", raw(Context(device_id=ME, temperature_c=math.nan))),
        ("context", "not-finite", raw(Context(device_id=ME, temperature_c=-math.inf))),
        ("reports", "not-finite", raw(changed(report, seconds=math.inf))),
        ("reports", "unknown-order", encode_message(changed(report, order_id="another.1.train.mallory"))),
        ("reports", "foreign-id", encode_message(changed(report, order_id=order.id.replace(ME, "cam0")))),
        ("../cam0/reports", "replayed-report", raw(msgspec.msgpack.decode(others, type=Report))),
        ("wants", "unknown-blob", encode_message(UNKNOWN)),
        (
            "wants",
            "out-of-range",
            encode_message(changed(UNKNOWN, digest=model.digest, ranges=((0, model.size_bytes + 1),))),
        ),
    ]


def bad_results(mallory: RawDevice, model: bytes) -> list[tuple[str, Result]]:
    """(refusal, result of a training order); one for each round."""
    tensors = from_bytes(model)
    name = min(tensors, key=lambda name: tensors[name].size)  # twice as wide it is still no larger than allowed

    def update(data: bytes) -> Result:
        return trained(mallory.serves(data, Codec.FLOAT32))

    def with_first(change: Callable[[np.ndarray], np.ndarray]) -> Result:
        return update(to_bytes(tensors | {name: change(tensors[name])}))

    right = to_bytes(tensors)
    wrong_digest = compute_digest(b"of something else")
    mallory.blobs[wrong_digest] = right
    return [
        ("digest", trained(BlobRef(digest=wrong_digest, size_bytes=len(right)))),
        ("malformed", Profiled(extractor="0" * 64, profile=(0.5,), n_samples=3)),
        ("wrong-result", trained(mallory.serves(right, Codec.FLOAT32), cluster=3)),
        ("no-samples", trained(mallory.serves(right, Codec.FLOAT32), n_samples=0)),
        ("not-finite", with_first(lambda t: np.full_like(t, np.nan))),
        ("layout", with_first(lambda t: t[None])),
        ("layout", with_first(lambda t: t.astype(np.float64))),
        ("malformed", update(b"no tensors")),
        ("oversized", trained(BlobRef(digest="1" * 64, size_bytes=2**40))),
    ]


async def bother_agent(mallory: RawDevice, cam0: Running, order: Order) -> None:
    """The topics that an agent reads, one after the other: it refuses by name."""
    orders, acks = mallory.topics.make_agent_topic("cam0", "orders"), mallory.topics.make_agent_topic("cam0", "acks")
    wants = mallory.topics.make_wants_topic("cam0")
    mine = msgspec.structs.replace(order, device_id="cam0")
    for topic, payload in (
        *((topic, b"\xc1 no message") for topic in (orders, acks, wants)),
        *((topic, raw(ACK, 99)) for topic in (orders, acks, wants)),
        *((topic, bytes(MAX_MESSAGE_BYTES + 1)) for topic in (orders, acks, wants)),
        *((topic, encode_message(HEALTH if topic == wants else CONTEXT)) for topic in (orders, acks, wants)),
        (orders, encode_message(order)),
        (acks, encode_message(ACK)),
        (wants, encode_message(UNKNOWN)),
        (orders, encode_message(msgspec.structs.replace(mine, id="old", left_s=0.0))),
        (acks, encode_message(msgspec.structs.replace(ACK, device_id="cam0"))),
        (wants, encode_message(msgspec.structs.replace(UNKNOWN, device_id="cam0"))),
    ):
        await mallory.transport.publish(topic, payload)
    threes = dict.fromkeys(("version", "oversized", "unexpected-type", "foreign-id"), 3)
    await until(lambda: cam0.refused() == {**threes, "malformed": 4, "unknown-order": 1, "unknown-blob": 1})


async def garbage_chunks(mallory: Mallory, coordinator: Running, digest: str) -> None:
    """While the coordinator fetches from us: chunks at no offset, and beyond the end."""
    await mallory.wanted()
    for offset in ("x", "-1", str(10**12)):
        await mallory.transport.publish(mallory.topics.make_update_topic(ME, digest, offset), b"garbage")
    await until(lambda: coordinator.log.read_text().count(f"/blobs/{digest}/") >= 3)


@pytest.mark.smoke
async def test_each_topic(mosquitto: LocalBroker, tmp_path: Path) -> None:
    async with Federation(mosquitto, tmp_path, devices=HONEST) as federation:
        agents = await federation.agents()
        rounds = len(bad_results(RawDevice(mosquitto, "x", tmp_path), to_bytes({"w": np.zeros(1, np.float32)})))
        flags = {"method": "fedavg", "rounds": rounds, "devices": 5, "codec": Codec.FLOAT32}
        coordinator = await federation.coordinator(**flags)
        await coordinator.logged("event=connected")
        async with AsyncExitStack() as stack:
            band = [await stack.enter_async_context(Mallory(mosquitto, i, tmp_path)) for i in (ME, *ACCOMPLICES)]
            refused = Counter({"task-mismatch": len(band)})  # they began with another task
            for member in band:
                await member.appear(task=federation.task)
            mallory = band[0]

            order = await mallory.order_of(1, "train")
            await until(lambda: len(federation.accepted()) == 2)
            before = federation.rows("SELECT * FROM orders"), federation.rows("SELECT * FROM states")
            (cam0,) = [report for order_id, report in federation.accepted().items() if order_id.endswith("cam0")]
            for leaf, name, payload in bad_messages(order, cam0):
                await mallory.transport.publish(topic(mallory, leaf), payload)
                refused[name] += 1
            await bother_agent(mallory, agents["cam0"], order)
            await until(lambda: without_repeats(coordinator.refused(), refused) == refused)
            assert before == (federation.rows("SELECT * FROM orders"), federation.rows("SELECT * FROM states"))

            model = await mallory.fetch(action_of(order).starts[0].model)  # type: ignore[attr-defined]
            for number in range(1, rounds + 1):
                guilty, *innocent = band[turn(number) :]
                for member in innocent:
                    await member.report(await member.order_of(number, "train"), Declined(why=Why.NOT_ALLOWED))
                name, result = bad_results(guilty, model)[number - 1]
                order = await guilty.order_of(number, "train")
                if name == "digest":
                    digest = result.update.digest  # type: ignore[union-attr]
                    lies = guilty.blobs.pop(digest)
                    await guilty.report(order, result)
                    await garbage_chunks(guilty, coordinator, digest)
                    guilty.blobs[digest] = lies
                else:
                    await guilty.report(order, result)
                ack = await guilty.ack(order.id)
                assert (ack.accepted, ack.reason.split(":")[0]) == (False, name)
                refused[name] += 1
            await guilty.report(await guilty.order_of(rounds + 1, "install"), Declined(why=Why.NOT_ALLOWED))
            assert await coordinator.ended() == 0

        counted = dict(federation.rows("SELECT substr(name, 9), value FROM counters WHERE name LIKE 'refused.%'"))
        assert without_repeats(counted, refused) == refused
        assert federation.rows(
            "SELECT device_id, status, count(*) FROM orders WHERE label = 'train' GROUP BY device_id, status"
        ) == [
            ("cam0", "accepted", rounds),
            ("cam1", "accepted", rounds),
            (ME, "rejected", 4),
            ("mallory1", "accepted", 4),
            ("mallory1", "rejected", 3),
            ("mallory2", "accepted", 7),
            ("mallory2", "rejected", 2),
        ]
        asked = "SELECT device_id FROM orders WHERE label = 'install' AND device_id LIKE 'mallory%'"
        assert federation.rows(asked) == [("mallory2",)]
        state = federation.state(FedAvgState)
        history = tuple(
            msgspec.structs.replace(line, asked=line.asked - len(band[turn(number) :]))
            for number, line in enumerate(state.history, start=1)
        )
        expected = await federation.undisturbed("fedavg", settings(rounds, codec=Codec.FLOAT32))
        assert same(msgspec.structs.replace(state, history=history), expected)


def without_repeats(found: dict[str, int], wanted: Counter[str]) -> dict[str, int]:
    """Without what honest devices repeat when their verdict is late; what Mallory replays must be among them."""
    name = "replayed-report"
    return found | {name: min(found.get(name, 0), wanted[name])}


def turn(number: int) -> int:
    """Which of the band sends the bad result of a round, from 1 on."""
    return next(k for k in range(len(TURNS)) if number <= sum(TURNS[: k + 1]))


def topic(mallory: RawDevice, leaf: str) -> str:
    """One of its own topics, or "../{id}/{leaf}": another device's."""
    return (
        mallory.topics.make_agent_topic("cam0", "reports")
        if leaf.startswith("..")
        else mallory.topics.make_agent_topic(ME, leaf)
    )
