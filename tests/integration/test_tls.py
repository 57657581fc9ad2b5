"""Certificates: a whole federation over TLS, and who is not let in."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.baselines.shared.scaffold import ScaffoldState
from coordinator.methods.state import State
from fedge.errors import TransportError
from fedge.identity.names import Role
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.connection.refusals import CHECK_TLS
from fedge.wire.topics import ClientRole, Topics
from fedge.wire.transport import Transport
from tests.support.federation import NAME, Federation, Running, same, settings, words
from tests.support.identities import Authority, TlsBroker
from tests.support.waiting import until

DEVICES = ("cam0", "cam1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
async def broker(mosquitto_program: str, authority: Authority, tmp_path: Path) -> AsyncIterator[TlsBroker]:
    async with TlsBroker(authority, tmp_path / "broker") as running:
        yield running


async def status(broker: TlsBroker, log: Path, **flags: object) -> tuple[int, Running]:
    """`fedge status` of this broker: exit code and what it said."""
    where = {"broker": f"{broker.host}:{broker.port}", "federation": NAME}
    asked = await Running.start(log, "status", *words(where | flags))
    return await asked.ended(), asked


@pytest.mark.parametrize(("method", "kind"), [("fedavg", FedAvgState), ("scaffold", ScaffoldState)])
async def test_a_federation_over_tls(
    method: str, kind: type[State], broker: TlsBroker, authority: Authority, tmp_path: Path
) -> None:
    """All messages are signed, since whoever has a certificate signs."""
    async with Federation(broker, tmp_path, devices=DEVICES) as federation:
        for device in DEVICES:
            await federation.agent(device, **authority.client(device))
        coordinator = await federation.coordinator(method=method, rounds=2, **authority.client("coordinator"))
        assert await coordinator.ended() == 0, coordinator.log.read_text()
        summary = json.loads((federation.home / "summary.json").read_bytes())
        assert summary["selection"] == dict.fromkeys(DEVICES, 2)
        assert set(summary["installed"]) == set(DEVICES)
        assert same(federation.state(kind), await federation.undisturbed(method, settings(2)))

        code, seen = await status(broker, tmp_path / "status.log", **authority.client("status"))
        assert code == 0, seen.log.read_text()
        assert seen.events[0]["devices"] == dict.fromkeys(DEVICES, "online")


async def test_nobody_speaks_for_another(broker: TlsBroker, authority: Authority, tmp_path: Path) -> None:
    """An agent whose --id is not the name in its certificate does not begin, and the broker would not let it speak."""
    topics, heard = Topics(NAME), Heard()
    async with Federation(broker, tmp_path, devices=DEVICES) as federation:
        await federation.agent("cam1", **authority.client("cam1"))
        impostor = await federation.agent("cam0", **authority.client("cam9"))
        assert await impostor.ended() == 2
        assert "own.crt is of device cam9 of f, and this is device cam0 of f" in impostor.log.read_text()
        code, seen = await status(broker, tmp_path / "status.log", **authority.client("status"))
        assert (code, seen.events[0]["devices"]) == (0, {"cam1": "online"})
        code, seen = await status(broker, tmp_path / "cam8.log", **authority.client("cam8"))
        assert code == 2
        assert "is of device cam8 of f, and this is status status of f" in seen.log.read_text()
        cam8 = transport(broker.port, authority.client("cam8"))
        await cam8.subscribe(topics.make_agent_topic("+", "status"), heard.note)
        async with cam8:
            with pytest.raises(TransportError, match="Not authorized"):
                await cam8.publish(topics.make_agent_topic("cam0", "status"), b"x")
            await cam8.publish(topics.make_agent_topic("cam8", "status"), b"x")
            await until(lambda: heard.topics)
        assert heard.topics == [topics.make_agent_topic("cam8", "status")]


def transport(port: int, client: dict[str, object], role: ClientRole = "agent", name: str = "x") -> Transport:
    files = {key: str(path) for key, path in client.items()}
    return Transport(BrokerSettings("127.0.0.1", port, **files), Topics(NAME).make_client_id(role, name))  # type: ignore[arg-type]


def is_let_in(port: int, client: dict[str, object]) -> bool:
    """Whether a broker accepts the CONNECT of somebody with this certificate."""
    context = ssl.create_default_context(cafile=str(client["ca_file"]))
    context.load_cert_chain(str(client["cert_file"]), str(client["key_file"]))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01x")
            return connection.recv(4) == b"\x20\x02\x00\x00"
    except (ssl.SSLError, ConnectionError):
        return False


class Heard:
    """What came to a topic filter."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    async def note(self, inbound: Inbound) -> None:
        self.topics.append(inbound.topic)


@pytest.mark.parametrize("role", ["status", "rollout"])
async def test_who_is_no_device_cannot_speak_as_one_nor_hear_what_is_not_for_it(
    broker: TlsBroker, authority: Authority, role: ClientRole
) -> None:
    topics = Topics(NAME)
    may = {"status": set(), "rollout": {topics.rollout, topics.make_model_topic("a" * 64, 0)}}[role]
    here, coordinator = (
        transport(broker.port, authority.client(role), role),
        transport(broker.port, authority.client("coordinator"), "coordinator"),
    )
    heard = Heard()
    for topic_filter in (
        "#",
        f"{topics.prefix}/#",
        topics.make_model_topic("+", "+"),
        topics.make_agent_topic(role, "#"),
    ):
        await here.subscribe(topic_filter, heard.note)
    everything = [
        *(
            topics.make_agent_topic(i, leaf)
            for i in (role, "cam0")
            for leaf in ("status", "reports", "orders", "acks", "health")
        ),
        *(
            topics.make_model_topic("a" * 64, 0),
            topics.make_update_topic("cam0", "a" * 64, 0),
            topics.make_update_topic(role, "a", 0),
        ),
        *(topics.make_wants_topic(role), topics.rollout),
    ]
    async with here, coordinator:
        own = [
            topics.make_agent_topic(role, leaf) for leaf in ("status", "reports")
        ]  # Mosquitto closes on each that it refuses
        for topic in (
            *own,
            topics.make_agent_topic("cam0", "status"),
            topics.rollout,
            topics.make_model_topic("a" * 64, 0),
        ):
            if topic in may:
                await here.publish(topic, b"x")
            else:
                with pytest.raises(TransportError, match="Not authorized"):
                    await here.publish(topic, b"x")
        heard.topics.clear()
        for topic in everything:
            await coordinator.publish(topic, b"x")
        await coordinator.publish(topics.make_agent_topic("end", "status" if role == "status" else "health"), b"x")
        await until(lambda: any("/end/" in topic for topic in heard.topics))
    leaf = "status" if role == "status" else "health"
    others = {topics.make_agent_topic("cam0", leaf), topics.make_agent_topic("end", leaf)}
    assert set(heard.topics) <= others | ({topics.rollout} | {t for t in everything if "/blobs/aa" in t})
    assert role != "status" or set(heard.topics) == others


@pytest.mark.parametrize("role", [Role.RELAY, Role.INTAKE, Role.OPERATOR])
async def test_a_part_without_business_at_the_broker_says_and_hears_nothing(
    broker: TlsBroker, authority: Authority, role: Role
) -> None:
    authority.issuer.equip(role)
    topics, heard, told = Topics(NAME), Heard(), Heard()
    here = transport(broker.port, authority.client(role), "status")
    coordinator = transport(broker.port, authority.client("coordinator"), "coordinator")
    await here.subscribe("#", heard.note)
    await coordinator.subscribe(topics.rollout, told.note)
    async with here, coordinator:
        with pytest.raises(TransportError, match="Not authorized"):
            await here.publish(topics.make_agent_topic(role, "status"), b"x")
        for topic in (topics.make_agent_topic(role, "orders"), topics.make_model_topic("a" * 64, 0), topics.rollout):
            await coordinator.publish(topic, b"x")
        await until(lambda: told.topics)
    assert heard.topics == []


async def test_a_certificate_of_one_federation_is_nobody_in_another(
    mosquitto_program: str, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "of another", "g")
    async with TlsBroker(authority, tmp_path / "broker", other=other) as broker:
        there = Heard()
        cam1, cam2 = (
            transport(broker.port, authority.client("cam1")),
            transport(broker.other_port, other.client("cam2")),
        )
        await cam1.subscribe(f"{Topics('g').prefix}/#", there.note)
        async with cam1, cam2:
            await cam1.publish(Topics(NAME).make_agent_topic("cam1", "status"), b"x")
            await cam2.publish(Topics("g").make_agent_topic("cam2", "status"), b"x")
            for device in ("cam1", "cam2"):
                for leaf in ("status", "reports", "orders"):
                    with pytest.raises(TransportError, match="Not authorized"):
                        await cam1.publish(Topics("g").make_agent_topic(device, leaf), b"x")
            coordinator = transport(broker.other_port, other.client("coordinator"), "coordinator")
            async with coordinator:
                for topic in (
                    Topics("g").make_model_topic("a" * 64, 0),
                    Topics("g").make_agent_topic("cam1", "orders"),
                ):
                    await coordinator.publish(topic, b"x")
        assert there.topics == []
        assert await asyncio.to_thread(is_let_in, broker.other_port, other.client("status"))
        foreign = authority.client("status") | {"ca_file": other.client("status")["ca_file"]}
        assert not await asyncio.to_thread(is_let_in, broker.other_port, foreign)


async def test_who_is_revoked_is_not_let_in(mosquitto_program: str, authority: Authority, tmp_path: Path) -> None:
    clients = {name: authority.client(name) for name in ("status", "coordinator")}
    authority.issuer.revoke("status")
    async with TlsBroker(authority, tmp_path / "broker") as broker:
        async with transport(broker.port, clients["coordinator"]) as good:
            await good.publish(Topics(NAME).make_agent_topic("cam0", "status"), b"", retain=True)
        code, asked = await status(broker, tmp_path / "log", **clients["status"])
        assert code == 3
        assert "it does not accept our certificate" in asked.log.read_text()


async def test_agent_and_runtime_of_a_device_share_its_certificate(broker: TlsBroker, authority: Authority) -> None:
    topics, client = Topics(NAME), authority.client("cam1")
    agent, runtime = (transport(broker.port, client, role, "cam1") for role in ("agent", "serve"))
    async with agent, runtime:
        for _ in range(3):
            await agent.publish(topics.make_agent_topic("cam1", "reports"), b"")
            await runtime.publish(topics.make_agent_topic("cam1", "health"), b"")
            assert agent.connected
            assert runtime.connected


async def test_a_broker_of_another_authority_is_not_trusted(
    broker: TlsBroker, authority: Authority, tmp_path: Path
) -> None:
    foreign = authority.client("status") | {"ca_file": Authority(tmp_path / "foreign").client("status")["ca_file"]}
    code, asked = await status(broker, tmp_path / "none", ca_file=foreign["ca_file"])
    assert code == 3
    assert "certificate: self-signed certificate in certificate chain" in asked.log.read_text()
    code, asked = await status(broker, tmp_path / "log", **foreign)
    assert code == 2
    assert "own.crt: it was not issued by the authority in" in asked.log.read_text()


async def test_nobody_is_let_in_without_a_certificate_of_the_authority(
    broker: TlsBroker, authority: Authority, tmp_path: Path
) -> None:
    """Mosquitto only closes the connection; the message names what may be wrong, or what is."""
    foreign = Authority(tmp_path / "foreign").client("status") | {"ca_file": authority.client("status")["ca_file"]}
    ca_file = authority.client("status")["ca_file"]
    (no_code, none), (other_code, other) = await asyncio.gather(
        status(broker, tmp_path / "none", ca_file=ca_file), status(broker, tmp_path / "foreign.log", **foreign)
    )
    assert no_code == 3
    assert "cannot be reached, or it does not accept our certificate (cert_file)" in none.log.read_text()
    assert none.log.read_text().count(CHECK_TLS) == 1
    assert other_code == 2
    cause = f"cert_file {foreign['cert_file']}: it was not issued by the authority in {ca_file}"
    assert cause in other.log.read_text()
    assert not await asyncio.to_thread(is_let_in, broker.port, foreign)
