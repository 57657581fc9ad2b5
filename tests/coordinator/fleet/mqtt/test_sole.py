"""Coordinators of one federation at one broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.fleet.mqtt import sole
from coordinator.fleet.mqtt.sole import FederationClaim
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from fedge.identity.names import Role
from fedge.membership.signed_messages import Plain, Signed
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import Claim, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.broker import settings, transport
from tests.support.identities import Authority
from tests.support.waiting import until

TOPICS = Topics("f")
OLD = Claim(incarnation="old", since=1.0, where="cellar:/srv/shop", works=True)


class Coordinator:
    """What one makes of the others: `ended`, and `noticed`."""

    def __init__(self, broker: BrokerSettings, home: Path, signed: Plain | Signed | None = None) -> None:
        self.broker = broker
        self.ended: list[str] = []
        self.noticed: list[Claim] = []
        end = lambda error: self.ended.append(str(error))  # noqa: E731
        self.sole = FederationClaim(TOPICS, signed or Plain(), home, end=end, notice=self.noticed.append)

    async def start(self, stack: AsyncExitStack, *, looks: bool = True) -> None:
        if looks:
            await self.sole.require_sole(self.broker)
        mine = Transport(self.broker, self.sole._own.incarnation, will=Will(TOPICS.claims, b"", delay_s=0))
        await self.sole.attach(mine)
        await stack.enter_async_context(mine)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def test_who_comes_second_ends_and_is_told_who_is_there(
    broker: LocalBroker, tmp_path: Path, stack: AsyncExitStack
) -> None:
    first, second = (Coordinator(settings(broker), tmp_path / name) for name in ("first", "second"))
    await first.start(stack)
    with pytest.raises(ConfigError) as refused:
        await second.sole.require_sole(settings(broker))
    assert f"{tmp_path / 'first'}, incarnation {first.sole._own.incarnation}, which began at 20" in str(refused.value)
    await until(lambda: first.noticed)
    assert first.noticed[0].where.endswith(str(tmp_path / "second"))
    assert not first.ended


async def test_who_has_gone_holds_up_nobody(
    broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Coordinator(settings(broker), tmp_path / name) for name in ("first", "second"))
    async with AsyncExitStack() as stack:
        await first.start(stack)
        await first.sole.remove_claim()
    monkeypatch.setattr(sole, "ANSWER_S", 300.0)
    await second.sole.require_sole(settings(broker))

    async with transport(broker, "a broker that kept a claim and lost the will") as broken:
        await broken.publish(TOPICS.claims, encode_message(OLD), retain=True)
        monkeypatch.setattr(sole, "ANSWER_S", 0.5)
        await second.sole.require_sole(settings(broker))


async def test_of_two_that_began_together_the_later_ends_and_the_other_goes_on(
    broker: LocalBroker, tmp_path: Path, stack: AsyncExitStack
) -> None:
    first, second = (Coordinator(settings(broker), tmp_path / name) for name in ("first", "second"))
    for one in (second, first):
        await one.start(stack, looks=False)
    await until(lambda: second.ended and first.noticed)
    assert not first.ended
    assert not second.noticed
    assert str(tmp_path / "first") in second.ended[0]

    heard: list[bytes] = []

    async def hear(inbound: Inbound) -> None:
        heard.append(inbound.payload)

    listener = transport(broker, "listener")
    await listener.subscribe(TOPICS.claims, hear)
    async with listener:
        await second.sole.remove_claim()
        await until(lambda: b"" in heard and heard[-1])
    with pytest.raises(ConfigError, match=str(tmp_path / "first")):
        await Coordinator(settings(broker), tmp_path / "third").sole.require_sole(settings(broker))


async def test_what_was_said_to_others_or_before_ends_nobody(
    one_broker: LocalBroker, tmp_path: Path, stack: AsyncExitStack
) -> None:
    first = Coordinator(settings(one_broker), tmp_path)
    await first.start(stack)
    answered = asyncio.Event()

    async def hear(_: object) -> None:
        answered.set()

    other = transport(one_broker, "other")
    async with other:
        for claim in (OLD, replace(OLD, to="somebody"), replace(OLD, incarnation="young", since=4e9)):
            await other.publish(TOPICS.claims, encode_message(claim))
        await other.publish(TOPICS.claims, b"nonsense")
        await other.subscribe(TOPICS.claims, hear)
        await answered.wait()
        assert not first.ended
        assert not first.noticed
        await other.publish(TOPICS.claims, encode_message(replace(OLD, to=first.sole._own.incarnation, works=False)))
        await until(lambda: first.noticed)  # one that only looks goes, however early its clock says that it began
        assert not first.ended
        await other.publish(TOPICS.claims, encode_message(replace(OLD, to=first.sole._own.incarnation)))
        await until(lambda: first.ended)


async def test_two_with_one_key_hear_each_other(mosquitto: LocalBroker, tmp_path: Path, stack: AsyncExitStack) -> None:
    """As those of a copied home; the numbers of the second one are higher."""
    files = Authority(tmp_path / "authority", "f").issue("coordinator", Role.COORDINATOR)
    known = BrokerSettings("x", **files)
    first = Coordinator(settings(mosquitto), tmp_path / "one", Signed(known, tmp_path / "one"))
    await first.start(stack)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "life").write_bytes(b"4000000000")
    second = Coordinator(settings(mosquitto), tmp_path / "other", Signed(known, tmp_path / "other"))
    async with transport(mosquitto, "liar") as liar:
        await liar.publish(TOPICS.claims, encode_message(replace(OLD, to=first.sole._own.incarnation)))
    with pytest.raises(ConfigError, match="another coordinator of federation f"):
        await second.sole.require_sole(settings(mosquitto))
    await until(lambda: first.noticed)
    assert not first.ended
