"""Certificates are renewed over a real broker, by `coordinator.provision.renewals` at the other end."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.provision.renewals import answer_requests
from fedge.commands.broker import find_free_port
from fedge.errors import TransportError
from fedge.identity.certificates import (
    encode_pem,
    load_certificate,
    make_certificate_request,
    make_device_subject,
    make_key,
)
from fedge.membership.renewal import Renewal
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer
from tests.support.broker import transport as over
from tests.support.federation import NAME
from tests.support.identities import Authority, TlsBroker
from tests.support.waiting import until

TOPICS = Topics(NAME)
AGO = dt.timedelta(days=250)


@pytest.fixture
async def broker(mosquitto_program: str, tmp_path: Path) -> AsyncIterator[TlsBroker]:
    authority = Authority(tmp_path / "f", port=find_free_port("127.0.0.1"))
    running = TlsBroker(authority, tmp_path / "broker")
    running.port = authority.issuer.settings.port
    async with running:
        yield running


@pytest.fixture
def authority(broker: TlsBroker) -> Authority:
    return broker.authority


def transport(authority: Authority, name: str) -> Transport:
    files = {key: str(path) for key, path in authority.client(name).items()}
    settings = BrokerSettings("127.0.0.1", authority.issuer.settings.port, **files)  # type: ignore[arg-type]
    return Transport(settings, TOPICS.make_client_id("agent", name))


async def device(authority: Authority, name: str) -> Transport:
    """A device that has its certificate renewed; not entered yet."""
    one = transport(authority, name)
    await Renewal(one, TOPICS, name).attach()
    return one


def made_long_ago(authority: Authority, name: str) -> Path:
    """The certificate of a device, past two thirds of its life."""
    authority.ago = AGO
    authority.client(name)
    authority.ago = dt.timedelta()
    return authority.folder / name / "own.crt"


async def test_an_old_certificate_is_replaced_while_the_device_works(authority: Authority) -> None:
    old, young = made_long_ago(authority, "cam1"), authority.folder / "cam2/own.crt"
    first, second = await device(authority, "cam1"), await device(authority, "cam2")
    before = {file: load_certificate(file) for file in (old, young)}
    key = old.with_name("own.key").read_bytes()
    async with first, second:
        await answered(authority, ["cam1"])
        await until(lambda: load_certificate(old) != before[old])
        assert await answer_requests(authority.issuer) == [], "request and answer are gone from the broker"
    assert load_certificate(old).public_key() == before[old].public_key()
    assert load_certificate(old).not_valid_after_utc > before[old].not_valid_after_utc
    assert old.with_name("own.key").read_bytes() == key
    assert load_certificate(young) == before[young]
    async with await device(authority, "cam1") as again:
        assert again.connected


async def answered(authority: Authority, devices: list[str]) -> None:
    """Answer until these have asked."""
    async with asyncio.timeout(300):
        while (found := await answer_requests(authority.issuer)) != devices:
            assert found == []


async def test_nobody_has_to_be_there_at_the_same_time(authority: Authority) -> None:
    file = made_long_ago(authority, "cam1")
    before = load_certificate(file)
    one = await device(authority, "cam1")
    watcher = transport(authority, "coordinator")
    seen = asyncio.Event()

    async def note(_: object) -> None:
        seen.set()

    await watcher.subscribe(TOPICS.make_agent_topic("cam1", "renewal"), note)
    async with watcher, one, asyncio.timeout(300):
        await seen.wait()
    assert await answer_requests(authority.issuer) == ["cam1"]
    assert load_certificate(file) == before
    async with await device(authority, "cam1"):
        await until(lambda: load_certificate(file) != before)


async def test_only_the_key_of_the_present_certificate_counts(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    made_long_ago(authority, "cam1")
    async with transport(authority, "cam1") as one, transport(authority, "coordinator") as anybody:
        await one.publish(
            TOPICS.make_agent_topic("cam1", "renewal"),
            encode_pem(make_certificate_request("cam1", make_key())),
            retain=True,
        )
        await anybody.publish(
            TOPICS.make_agent_topic("status", "renewal"),
            encode_pem(make_certificate_request("status", make_key())),
            retain=True,
        )
        await anybody.publish(TOPICS.make_agent_topic("cam9", "renewal"), b"hello", retain=True)
        with caplog.at_level(logging.WARNING, "fedge.provision"):
            assert await answer_requests(authority.issuer) == []
    assert [
        record.getMessage().split(" reason=")[0] for record in caplog.records if "renewal_refused" in record.msg
    ] == [f"event=renewal_refused device={name}" for name in ("cam1", "cam9", "status")]


class Forbidding:
    """A transport whose broker lets nobody ask."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings

    async def publish(self, topic: str, payload: bytes, *, retain: bool) -> None:
        raise TransportError(f"{topic}: Not authorized")


async def test_a_broker_that_forbids_it_and_a_damaged_certificate_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "f")
    file = made_long_ago(authority, "cam1")
    files = {key: str(path) for key, path in authority.client("cam1").items()}
    renewal = Renewal(Forbidding(BrokerSettings("x", **files)), TOPICS, "cam1")  # type: ignore[arg-type]
    answer = Inbound(TOPICS.make_agent_topic("cam1", "certificate"), file.read_bytes(), retained=True)
    for says in ("Not authorized", "holds no certificate"):
        asking = asyncio.ensure_future(renewal._request_when_due())
        await until(lambda says=says: says in caplog.text)  # type: ignore[misc]
        assert not asking.done()
        asking.cancel()
        await renewal._handle_answer(answer)
        file.write_bytes(b"\0")


async def test_a_broker_that_refuses_to_tell_of_certificates_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_back_off: None
) -> None:
    """As one with the rules of an earlier version: the other subscriptions stay, also on later connections."""
    answers, connections = TOPICS.make_agent_topic("cam1", "certificate"), 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1000)
        writer.write(bytes([0x20, 3, 0, 0, 0]))  # CONNACK
        for _ in range(2):
            packet = await reader.read(1000)
            reason = 0x87 if answers.encode() in packet else 1
            writer.write(bytes([0x90, 4, *packet[2:4], 0, reason]))  # SUBACK
            await writer.drain()
        if connections > 1:
            await reader.read()

    authority = Authority(tmp_path / "f")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority.folder / "broker/own.crt", authority.folder / "broker/own.key")
    files = {key: str(path) for key, path in authority.client("cam1").items()}
    async with TcpServer(refuse, tls=tls) as server, AsyncExitStack() as stack:
        one = over(server, "one", **files)
        await Renewal(one, TOPICS, "cam1").attach()
        await one.subscribe("orders", lambda _: asyncio.sleep(0))
        await stack.enter_async_context(one)
        await until(lambda: connections == 2 and one.connected)
    assert caplog.text.count("event=not_renewed") == 1
    assert "`fedge provision broker` again" in caplog.text


async def test_a_device_that_asks_without_end_holds_up_no_renewal(authority: Authority) -> None:
    made_long_ago(authority, "cam1")
    async with transport(authority, "cam1") as one:

        async def ask() -> None:
            for _ in range(10_000):
                await one.publish(TOPICS.make_agent_topic("cam1", "renewal"), b"renew me", retain=True)
                await asyncio.sleep(0.2)

        asking = asyncio.ensure_future(ask())
        async with asyncio.timeout(300):
            assert await answer_requests(authority.issuer) == []
        asking.cancel()


async def test_a_device_takes_no_certificate_that_is_not_for_it(authority: Authority, tmp_path: Path) -> None:
    file = made_long_ago(authority, "cam1")
    before = file.read_bytes()
    foreign = Authority(tmp_path / "foreign")
    mine = make_device_subject(NAME, "cam1")
    own = load_certificate(file).public_key()
    answers = [
        b"hello",
        encode_pem(foreign.issuer.issue(mine, own)),  # type: ignore[arg-type]
        encode_pem(authority.issuer.issue(mine, make_key().public_key())),
        encode_pem(authority.issuer.issue(make_device_subject(NAME, "cam2"), own)),  # type: ignore[arg-type]
    ]
    one = await device(authority, "cam1")
    async with one, transport(authority, "coordinator") as anybody:
        for answer in answers:
            await anybody.publish(TOPICS.make_agent_topic("cam1", "certificate"), answer)
        right = encode_pem(authority.issuer.issue(mine, own))  # type: ignore[arg-type]
        await anybody.publish(TOPICS.make_agent_topic("cam1", "certificate"), right)
        await until(lambda: file.read_bytes() != before)
        assert file.read_bytes() == right
