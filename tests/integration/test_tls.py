"""Certificates: a whole federation over TLS, and who is not let in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fedge.topics import Topics
from fedge.transport import CHECK_TLS, BrokerSettings, Transport
from tests.support.federation import NAME, Federation, Running, words
from tests.support.tls import Authority, TlsBroker

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


async def test_a_federation_over_tls(broker: TlsBroker, authority: Authority, tmp_path: Path) -> None:
    async with Federation(broker, tmp_path, devices=DEVICES) as federation:
        for device in DEVICES:
            await federation.agent(device, **authority.client(device))
        coordinator = await federation.coordinator(method="fedavg", rounds=2, **authority.client("coordinator"))
        assert await coordinator.ended() == 0, coordinator.log.read_text()
        summary = json.loads((federation.home / "summary.json").read_bytes())
        assert summary["selection"] == dict.fromkeys(DEVICES, 2)
        assert set(summary["installed"]) == set(DEVICES)

        code, seen = await status(broker, tmp_path / "status.log", **authority.client("status"))
        assert code == 0, seen.log.read_text()
        assert seen.events[0]["devices"] == dict.fromkeys(DEVICES, "online")


async def test_nobody_speaks_for_another(broker: TlsBroker, authority: Authority, tmp_path: Path) -> None:
    """An agent whose --id is not the name in its certificate is heard by nobody; agents see nothing of others."""
    async with Federation(broker, tmp_path, devices=DEVICES) as federation:
        await federation.agent("cam1", **authority.client("cam1"))
        impostor = await federation.agent("cam0", **authority.client("cam9"))
        await impostor.logged("agents/cam0/status: Not authorized")
        code, seen = await status(broker, tmp_path / "status.log", **authority.client("status"))
        assert (code, seen.events[0]["devices"]) == (0, {"cam1": "online"})
        code, seen = await status(broker, tmp_path / "cam8.log", **authority.client("cam8"))
        assert code == 2
        assert "knows no device of a federation" in seen.log.read_text()


async def test_agent_and_runtime_of_a_device_share_its_certificate(broker: TlsBroker, authority: Authority) -> None:
    files = {key: str(path) for key, path in authority.client("cam1").items()}
    settings = BrokerSettings(broker.host, broker.port, **files)
    topics = Topics(NAME)
    agent, runtime = (Transport(settings, topics.client_id(role, "cam1")) for role in ("agent", "serve"))
    async with agent, runtime:
        for _ in range(3):
            await agent.publish(topics.agent("cam1", "reports"), b"")
            await runtime.publish(topics.agent("cam1", "health"), b"")
            assert agent.connected
            assert runtime.connected


async def test_a_broker_of_another_authority_is_not_trusted(
    broker: TlsBroker, authority: Authority, tmp_path: Path
) -> None:
    foreign = authority.client("status") | {"ca_file": Authority(tmp_path / "foreign").file}
    code, asked = await status(broker, tmp_path / "log", **foreign)
    assert code == 3
    assert "certificate: self-signed certificate in certificate chain" in asked.log.read_text()


async def test_nobody_is_let_in_without_a_certificate_of_the_authority(
    broker: TlsBroker, authority: Authority, tmp_path: Path
) -> None:
    """Mosquitto only closes the connection; the message names what may be wrong."""
    foreign = Authority(tmp_path / "foreign").client("status") | {"ca_file": authority.file}
    logs = tmp_path / "none", tmp_path / "foreign.log"
    answers = await asyncio.gather(
        status(broker, logs[0], ca_file=authority.file),
        status(broker, logs[1], **foreign),
    )
    for code, asked in answers:
        assert code == 3
        assert "cannot be reached, or it does not accept our certificate (cert_file)" in asked.log.read_text()
        assert asked.log.read_text().count(CHECK_TLS) == 1
