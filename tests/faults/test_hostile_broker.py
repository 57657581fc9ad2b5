"""A broker that was taken over: it reads everything, says what it likes to anybody, and can delay but not forge."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coordinator.store.records import OrderStatus
from edge_agent.device.worker import Worker
from fedge.identity.names import CRL, Role
from fedge.membership.signed_messages import Envelope, Signed
from fedge.privacy.masked_sums import Member, make_member, write_roster
from fedge.steps.contract import Action, Declined, Result
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares, SharesMade
from fedge.steps.training.train import Trained
from fedge.tasks import DeviceData
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import (
    Ack,
    Context,
    Health,
    Outcome,
    Phase,
    Presence,
    Report,
    Status,
    Want,
    Why,
    encode_message,
)
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.device import TASK
from tests.support.identities import Authority, OpenBroker
from tests.support.scene import Scene, one_round, train
from tests.support.waiting import until

WAIT_S = 300.0
TOPICS = Topics("test")
_envelope = msgspec.msgpack.Decoder(Envelope)


class Taken:
    """What whoever has taken the broker over can do: keep all that is said, and say anything on any topic."""

    def __init__(self, broker: OpenBroker, authority: Authority) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self._transport = Transport(broker.settings({"ca_file": str(authority.file)}), "taken")

    async def __aenter__(self) -> Taken:
        await self._transport.subscribe("#", self._note)
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._transport.__aexit__(None, None, None)

    async def _note(self, inbound: Inbound) -> None:
        if not inbound.retained:
            self.heard.append((inbound.topic, inbound.payload))

    def said(self, topic: str) -> list[bytes]:
        """All that was said there."""
        return [payload for known, payload in self.heard if known == topic]

    async def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        await self._transport.publish(topic, payload, retain=retain)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", "test")


@pytest.fixture
async def scene(mosquitto_program: str, authority: Authority, tmp_path: Path) -> AsyncIterator[Scene]:
    async with OpenBroker(authority, tmp_path / "broker") as broker, AsyncExitStack() as stack:
        yield Scene(stack, broker, authority, tmp_path)


@pytest.fixture
async def taken(scene: Scene) -> AsyncIterator[Taken]:
    async with Taken(scene.broker, scene.authority) as taken:
        yield taken


async def test_a_round_in_which_everything_is_signed(scene: Scene, taken: Taken) -> None:
    fleet = await scene.coordinator()
    await scene.agent("cam1")
    answers = await one_round(fleet, 1, "cam1")
    assert isinstance(answers["cam1"].result, Trained)
    await until(lambda: taken.said(TOPICS.make_agent_topic("cam1", "acks")) != [])
    topics = {topic for topic, _ in taken.heard if "/blobs/" not in topic and topic != TOPICS.revocations}
    for leaf in ("status", "context", "orders", "reports", "acks", "wants"):
        assert TOPICS.make_agent_topic("cam1", leaf) in topics
    assert TOPICS.make_wants_topic("cam1") in topics
    for topic in topics:
        for payload in taken.said(topic):
            _envelope.decode(payload)  # nothing goes out without an envelope
    assert not scene.refused("cam1")
    assert not [name for name in fleet.take_counts() if name.startswith("refused")]


async def test_what_is_forged_is_refused_by_everybody(scene: Scene, taken: Taken, tmp_path: Path) -> None:
    """Unsigned, by a foreign authority, by another member, and by the right one for another topic."""
    fleet = await scene.coordinator()
    await scene.agent("cam1")
    await scene.agent("cam2")
    await one_round(fleet, 1, "cam1", "cam2")
    order = next(entry.order for entry in scene.store.get_entries(1) if entry.order.device_id == "cam1")
    forged = msgspec.structs.replace(order, id="r.9.train.cam1", round=9)
    foreign = Authority(tmp_path / "foreign", "test")
    liars = [
        Signed(BrokerSettings("x", **foreign.issue("coordinator", Role.COORDINATOR)), None),
        Signed(BrokerSettings("x", **scene.files("cam2")), None),
    ]
    agent_topics = {
        TOPICS.make_agent_topic("cam1", "orders"): encode_message(forged),
        TOPICS.make_agent_topic("cam1", "acks"): encode_message(
            Ack(order_id=order.id, device_id="cam1", accepted=True)
        ),
        TOPICS.make_wants_topic("cam1"): encode_message(Want(device_id="cam1", digest="a" * 64, ranges=((0, 1),))),
    }
    report = Report(order_id=order.id, device_id="cam1", seconds=0.0, outcome=Outcome.FAILED)
    status = Status(device_id="cam1", incarnation="x", presence=Presence.OFFLINE, n_samples=10**9)
    fleet_topics = {
        TOPICS.make_agent_topic("cam1", "status"): encode_message(status),
        TOPICS.make_agent_topic("cam1", "context"): encode_message(Context(device_id="cam1", cpu_ghz=99.0)),
        TOPICS.make_agent_topic("cam1", "reports"): encode_message(report),
        TOPICS.make_agent_topic("cam1", "wants"): encode_message(
            Want(device_id="cam1", digest="a" * 64, ranges=((0, 1),))
        ),
        TOPICS.make_agent_topic("cam1", "health"): encode_message(
            Health(device_id="cam1", at=0.0, phase=Phase.SERVING, release=9, drift=True)
        ),
        TOPICS.make_agent_topic("invented", "status"): encode_message(
            msgspec.structs.replace(status, device_id="invented")
        ),
    }
    before = scene.store.get_entries(1), fleet.registry.list_online()
    seen = [fleet.registry.list_presence(), fleet.registry.get_incarnation("cam1")]
    genuine = {
        topic: taken.said(topic)[-1]
        for topic in (
            TOPICS.make_agent_topic("cam1", "status"),
            TOPICS.make_agent_topic("cam2", "reports"),
            TOPICS.make_agent_topic("cam1", "orders"),
        )
    }
    for topic, payload in (agent_topics | fleet_topics).items():
        await taken.say(topic, payload)
        for liar in liars:
            await taken.say(topic, liar.seal(topic, payload))
        for other, said in genuine.items():
            if other != topic:
                await taken.say(topic, said)
    await until(lambda: len(scene.refused("cam1")) >= 5 * len(agent_topics))
    assert set(scene.refused("cam1")) == {"unsigned", "certificate", "forged"}
    await asyncio.sleep(0.3)
    assert [fleet.registry.list_presence(), fleet.registry.get_incarnation("cam1")] == seen
    assert (scene.store.get_entries(1), [d.id for d in fleet.registry.list_online()]) == (before[0], ["cam1", "cam2"])
    assert all(device.n_samples == 5 and not device.drift for device in fleet.registry.list_online())
    assert scene.workers["cam1"].done == [order.id]
    counts = fleet.take_counts()
    assert {name for name in counts if name.startswith("refused.")} == {
        "refused.unsigned",
        "refused.certificate",
        "refused.forged",
    }
    answers = await one_round(fleet, 2, "cam1", "cam2")
    assert all(isinstance(answer.result, Trained) for answer in answers.values())


async def test_what_was_said_once_does_nothing_when_it_is_said_again_or_in_another_order(
    scene: Scene, taken: Taken
) -> None:
    """All traffic of two rounds and two lives of an agent, sent again backwards and forwards, changes nothing."""
    fleet = await scene.coordinator()
    await scene.agent("cam1")
    await one_round(fleet, 1, "cam1")
    await scene.stop("cam1")
    await scene.agent("cam1")
    await until(lambda: bool(fleet.registry.list_online()))
    await one_round(fleet, 2, "cam1")
    await until(lambda: len([1 for event, _ in scene.events["cam1"] if event == "report_acked"]) == 2)
    worker, incarnation = scene.workers["cam1"], fleet.registry.get_incarnation("cam1")
    del scene.agents["cam1"]._session._acked["r.1.train.cam1"]  # so long ago that the device has forgotten it
    entries = scene.store.get_entries(1), scene.store.get_entries(2)
    heard = [(topic, payload) for topic, payload in taken.heard if "/blobs/" not in topic and payload]
    n_orders = len([1 for topic, _ in heard if topic.endswith("/orders")])
    for topic, payload in [*reversed(heard), *heard]:
        await taken.say(topic, payload)
    await until(lambda: scene.refused("cam1").count("replayed") >= n_orders)
    await asyncio.sleep(0.3)
    assert [order_id.partition(".train")[0] for order_id in worker.done] == ["r.2"]
    assert (scene.store.get_entries(1), scene.store.get_entries(2)) == entries
    assert fleet.registry.get_incarnation("cam1") == incarnation
    await one_round(fleet, 3, "cam1")
    assert scene.store.get_entries(3)[0].status is OrderStatus.ACCEPTED


async def test_a_new_process_of_the_coordinator_takes_nothing_that_the_last_one_heard(
    scene: Scene, taken: Taken
) -> None:
    async with AsyncExitStack() as first:
        stack, scene.stack = scene.stack, first
        fleet = await scene.coordinator()
        scene.stack = stack
        await scene.agent("cam1")
        await one_round(fleet, 1, "cam1")
        old = taken.said(TOPICS.make_agent_topic("cam1", "status"))[0]
        await scene.stop("cam1")
        await scene.agent("cam1")
        before = msgspec.msgpack.decode(_envelope.decode(old).payload)[1]["incarnation"]
        await until(lambda: fleet.registry.get_incarnation("cam1") != before)
        await one_round(fleet, 2, "cam1")
        await scene.stop("cam1")
    await taken.say(TOPICS.make_agent_topic("cam1", "status"), old, retain=True)
    fleet = await scene.coordinator()
    await until(lambda: fleet._counted["refused.replayed"] > 0)
    assert fleet.registry.list_online() == ()


async def test_who_is_revoked_gets_no_order_and_is_not_believed(scene: Scene, taken: Taken) -> None:
    fleet = await scene.coordinator(deadline_s=8.0)
    await scene.agent("cam1")
    await scene.agent("cam2")
    await one_round(fleet, 1, "cam1", "cam2")
    scene.authority.revoke("cam2")
    await until(lambda: [device.id for device in fleet.registry.list_online()] == ["cam1"])  # within LOOK_S, connected
    n_orders = len(taken.said(TOPICS.make_agent_topic("cam2", "orders")))
    fleet._devices = tuple(  # it is in the snapshot of a round that was begun before
        dataclasses.replace(fleet.registry.list_online()[0], id=name) for name in ("cam1", "cam2")
    )
    async with asyncio.timeout(WAIT_S):
        answers = await fleet.run("again", dict.fromkeys(("cam1", "cam2"), train(fleet)))
    assert answers["cam2"].result is None
    assert len(taken.said(TOPICS.make_agent_topic("cam2", "orders"))) == n_orders
    await until(lambda: fleet._counted["refused.revoked"] > 0)


async def test_a_list_too_long_for_a_message_is_not_published_and_the_log_says_what_to_do(
    scene: Scene, taken: Taken, caplog: pytest.LogCaptureFixture
) -> None:
    scene.authority.issuer.publish_revoked(2**150 + i for i in range(3_500))
    await scene.coordinator()
    await until(lambda: "event=revocations_not_told" in caplog.text)
    assert "copy crl.pem to each device" in caplog.text
    await scene.agent("cam1")
    await until(lambda: taken.said(TOPICS.make_agent_topic("cam1", "status")) != [])
    assert taken.said(TOPICS.revocations) == []


async def test_a_coordinator_that_was_revoked_commands_nobody(scene: Scene, taken: Taken, tmp_path: Path) -> None:
    fleet = await scene.coordinator()
    await scene.agent("cam1")
    await one_round(fleet, 1, "cam1")
    copies = {
        role: shutil.copy(file, tmp_path / role) if role != "ca_file" else file
        for role, file in scene.files("coordinator").items()
    }
    stolen = Signed(scene.broker.settings(copies), None)
    old = (scene.authority.folder / CRL).read_bytes()
    scene.authority.revoke("coordinator")
    scene.authority.issue("coordinator", Role.COORDINATOR)  # its successor, whose file the process takes up
    agent = scene.agents["cam1"]
    assert isinstance(agent._signed, Signed)
    authority = agent._signed.authority
    before = authority.revocations
    await until(lambda: authority.revocations != before)
    order = msgspec.structs.replace(scene.store.get_entries(1)[0].order, id="r.8.train.cam1")
    topic = TOPICS.make_agent_topic("cam1", "orders")
    await taken.say(TOPICS.revocations, old)  # an older list does not help
    await taken.say(topic, stolen.seal(topic, encode_message(order), to=agent._incarnation))
    await until(lambda: "revoked" in scene.refused("cam1"))
    assert len(scene.workers["cam1"].done) == 1
    answers = await one_round(fleet, 2, "cam1")
    assert isinstance(answers["cam1"].result, Trained)
    assert (scene.folder / "cam1" / CRL).exists()


async def test_a_coordinator_that_makes_up_devices_for_a_masked_sum_is_refused_by_those_that_there_are(
    scene: Scene, tmp_path: Path
) -> None:
    """With four of its own it would know what the fifth has sent."""
    fleet = await scene.coordinator()
    genuine = ("cam1", "cam2")
    data = DeviceData.from_inputs(np.zeros((3, *TASK.input_shape)))
    for name in genuine:
        await scene.agent(name, Worker(name, TASK, data, tmp_path / name, min_cohort=2))

    async def results(label: str, action: Action) -> list[Result | None]:
        async with asyncio.timeout(WAIT_S):
            answers = await fleet.run(label, dict.fromkeys(genuine, action))
        return [answers[name].result for name in genuine]

    async def keys(session: str) -> list[Member]:
        found = await results(f"{session}-keys", MaskKeys(session=session))
        return [make_member(i, made) for i, made in zip(genuine, found, strict=True) if isinstance(made, KeysMade)]

    async def shared(*cohort: Member) -> list[Result | None]:
        ref = fleet.put_bytes(write_roster(cohort))
        return await results(f"shares-{ref.digest[:8]}", MaskShares(session="one", roster=ref))

    await fleet.start_round(1, 2)
    cam1, cam2 = await keys("one")
    later = (await keys("two"))[1]
    public = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(3)]
    made_up = Member(id="cam3", encryption=public[0], masking=public[1], signing=public[2])
    foreign = Authority(tmp_path / "foreign", "test").issue("cam3")
    proofs = [
        Signed(BrokerSettings("x", **files), None).sign("masking r 1 one", b"".join(public))
        for files in (foreign, scene.files("coordinator"))
    ]
    replace = msgspec.structs.replace
    for stranger in (
        made_up,
        *(replace(made_up, proof=proof) for proof in proofs),
        replace(made_up, id="coordinator", proof=proofs[1]),
        replace(made_up, proof=cam2.proof),
    ):
        for declined in await shared(cam1, cam2, stranger):
            assert isinstance(declined, Declined)
            assert declined.why is Why.STRANGERS
    for wrong in (
        replace(cam2, proof=b""),
        replace(made_up, id="cam2", proof=cam2.proof),
        replace(cam2, signing=public[2]),
        later,
    ):
        declined = (await shared(cam1, wrong))[0]
        assert isinstance(declined, Declined)
        assert declined.why is Why.STRANGERS
    assert [type(result) for result in await shared(cam1, cam2)] == [SharesMade, SharesMade]
