"""`fedge doctor` on real faults: each is named, with what to do."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import fedge
from fedge.commands.broker import LocalBroker, find_mosquitto
from fedge.commands.doctor import (
    DoctorSettings,
    Finding,
    compare_beacon,
    diagnose_broker,
    diagnose_certificates,
    diagnose_home,
    doctor,
    find_providers,
)
from fedge.identity.names import Role, Subject
from fedge.membership import broker_configuration
from fedge.membership.signed_messages import Plain, Signed, make_speaker
from fedge.settings import Secret
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import Beacon, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.broker import OwnBroker
from tests.support.identities import Authority, TlsBroker
from tests.support.proxies import ProxyServer

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


def bad(findings: Iterator[Finding]) -> list[str]:
    found = [finding for finding in findings if finding.state != "ok"]
    assert all(finding.do for finding in found)
    return [finding.found for finding in found]


@pytest.mark.process
def test_a_healthy_machine(tmp_path: Path) -> None:
    done = CliRunner().invoke(doctor, ["--home", str(tmp_path), "--json"])
    found = msgspec.json.decode(done.output, type=list[Finding])
    looked_at = {finding.check for finding in found if finding.state != "skipped"}
    assert looked_at == {"versions", "clock", "memory", "torch", "onnxruntime", "disk"}
    skipped = {finding.check: finding.found for finding in found if finding.state == "skipped"}
    assert skipped == {"certificates": "none are given", "broker": "no broker is given"}
    assert done.exit_code == 0, done.output


def test_the_processor_runs_a_graph() -> None:
    works, _, wheels = find_providers()
    assert "CPUExecutionProvider" in works
    assert wheels


@pytest.mark.process
def test_settings_come_from_the_section_of_the_role(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[agent]\nhome = "{tmp_path}/gone"\ntask = "digits"\nbroker = "nobody:x"\n')
    done = CliRunner().invoke(doctor, ["--config", str(config)])
    assert f"{tmp_path}/gone is no folder" in done.output
    assert "HOST:PORT" in done.output


# ------------------------------------------------------------------------------------------------------------ disk


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=50", "x", tmp_path], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (tmp_path / "full").write_bytes(bytes(120_000))
        found = bad(diagnose_home(tmp_path))
        assert [text for text in found if "more files" in text]
        assert [text for text in found if "MB are free" in text]
        assert found[-1] == f"{tmp_path} cannot be written: No space left on device"
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert bad(diagnose_home(tmp_path))[-1] == f"{tmp_path} cannot be written: Read-only file system"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# ---------------------------------------------------------------------------------------------------- certificates


def test_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")

    def settings(name: str, **more: object) -> DoctorSettings:
        files = {key: str(path) for key, path in authority.client(name).items()}
        return DoctorSettings(**{"federation": "f", "id": name} | files | more)  # type: ignore[arg-type]

    assert bad(diagnose_certificates(settings("cam1"))) == []
    (wrong,) = bad(diagnose_certificates(settings("cam1", id="cam2")))
    assert wrong.endswith("names cam1, not cam2")
    (other,) = bad(diagnose_certificates(settings("cam1", federation="g")))
    assert other.endswith("is of device cam1 of f, not of g")
    own = Path(authority.client("cam1")["ca_file"])  # type: ignore[arg-type]
    stranger = Authority(tmp_path / "b")
    own.write_bytes(Path(stranger.client("x")["ca_file"]).read_bytes())  # type: ignore[arg-type]
    assert "is not of the authority" in bad(diagnose_certificates(settings("cam1")))[0]
    authority.ago = dt.timedelta(days=400)
    assert "expired on" in bad(diagnose_certificates(settings("cam3")))[0]
    authority.ago = dt.timedelta(days=-2)
    assert "which is to come" in bad(diagnose_certificates(settings("cam4")))[0]
    assert "holds no certificates" in bad(diagnose_certificates(settings("cam1", ca_file="nowhere")))[0]


# ---------------------------------------------------------------------------------------------------------- broker


def said(running: LocalBroker, **more: object) -> Finding:
    return told(running, **more)[0]


def told(running: LocalBroker, **more: object) -> list[Finding]:
    where = {"broker": f"{running.host}:{running.port}", "federation": "f", "id": "cam1"}
    return [*diagnose_broker(DoctorSettings(**where | more))]  # type: ignore[arg-type]


def test_nobody_or_nobody_of_ours_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
    (gone,) = bad(diagnose_broker(DoctorSettings(broker=silent)))
    assert gone == f"{silent} cannot be reached: Connection refused"


@needs_mosquitto
@pytest.mark.broker
async def test_a_broker_for_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.commands.doctor.PATIENCE_S", 2.0)
    authority = Authority(tmp_path / "authority")
    async with TlsBroker(authority, tmp_path / "broker") as broker:
        files = {key: str(path) for key, path in authority.client("cam1").items()}
        well = await asyncio.to_thread(said, broker, **files)
        assert (well.state, well.found.partition(" ")[2]) == ("ok", "lets us in, MQTT 5, and our topics are open to us")
        assert "Not authorized" in (await asyncio.to_thread(said, broker, id="cam2", **files)).found
        plain = await asyncio.to_thread(said, broker)
        assert plain.state == "bad"
        elsewhere = await asyncio.to_thread(said, broker, broker=f"127.1:{broker.port}", **files)
        assert "Hostname mismatch" in elsewhere.found
        assert "a name that its certificate has" in elsewhere.do
        stranger = Authority(tmp_path / "stranger").client("cam1")
        other = await asyncio.to_thread(said, broker, **{key: str(path) for key, path in stranger.items()})
        assert "is not who it should be" in other.found
        assert "authority" in other.do
        authority.ago = dt.timedelta(days=400)
        expired = {key: str(path) for key, path in authority.client("cam3").items()}
        assert (await asyncio.to_thread(said, broker, **expired)).state == "bad"


@pytest.mark.broker
async def test_a_broker_for_everybody(one_broker: LocalBroker) -> None:
    assert (await asyncio.to_thread(said, one_broker)).state == "ok"
    assert (await asyncio.to_thread(said, one_broker, role="coordinator")).state == "ok"


# ----------------------------------------------------------------------------------------------------- the coordinator

BEACON = Topics("f").beacon


def found(*findings: Finding) -> list[tuple[str, str]]:
    return [(finding.check, finding.state) for finding in findings]


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (-6, ("clock", "bad")),
        (-4, ("coordinator", "ok")),
        (0, ("coordinator", "ok")),
        (180, ("coordinator", "ok")),
        (181, ("coordinator", "warning")),
    ],
)
def test_the_clock_beside_the_coordinators(age_s: float, expected: tuple[str, str]) -> None:
    assert found(*compare_beacon(Beacon(at=1e9, fedge_version=fedge.__version__), 1e9 + age_s)) == [expected]


def test_the_version_beside_the_coordinators() -> None:
    *_, version = compare_beacon(Beacon(at=1e9, fedge_version="0.9.0"), 1e9)
    assert version.found == f"the coordinator has fedge 0.9.0, this machine {fedge.__version__}"
    assert version.state == "warning"


async def shine(broker: BrokerSettings, speaks: Plain | Signed, at: float) -> None:
    async with Transport(broker, "coordinator") as transport:
        payload = encode_message(Beacon(at=at, fedge_version=fedge.__version__))
        await transport.publish(BEACON, speaks.seal(BEACON, payload), retain=True)


@pytest.mark.broker
async def test_a_coordinator_is_heard_or_missed(one_broker: LocalBroker) -> None:
    _, missed = await asyncio.to_thread(told, one_broker)
    assert missed.found.startswith("nothing was heard of one of f")
    await shine(BrokerSettings(one_broker.host, one_broker.port), Plain(), time.time())
    assert found(*await asyncio.to_thread(told, one_broker))[1:] == [("coordinator", "ok")]
    assert found(*await asyncio.to_thread(told, one_broker, role="coordinator"))[1:] == []
    assert found(*await asyncio.to_thread(told, one_broker, federation=None))[1:] == [("coordinator", "skipped")]


@needs_mosquitto
@pytest.mark.broker
async def test_a_coordinator_whose_word_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "authority", "f")
    files = {key: str(path) for key, path in authority.client("cam1").items()}
    own = {key: str(path) for key, path in authority.client("coordinator").items()}
    rules = broker_configuration.format_access_list
    async with TlsBroker(authority, tmp_path / "broker") as broker:
        ours = BrokerSettings(broker.host, broker.port, **own)  # type: ignore[arg-type]
        speaks = make_speaker(ours, Subject("f", Role.COORDINATOR, "coordinator"), tmp_path)
        await shine(ours, speaks, time.time())
        assert found(*await asyncio.to_thread(told, broker, **files))[1:] == [("coordinator", "ok")]
        await shine(ours, Plain(), time.time())
        assert found(*await asyncio.to_thread(told, broker, **files))[1:] == [("coordinator", "bad")]
    monkeypatch.setattr(
        broker_configuration, "format_access_list", lambda *names: rules(*names).replace(f"pattern read {BEACON}\n", "")
    )
    async with TlsBroker(authority, tmp_path / "older") as broker:
        _, refused = await asyncio.to_thread(told, broker, **files)
        assert refused.state == "warning"
        assert "run `fedge provision broker` there again" in refused.do


@needs_mosquitto
@pytest.mark.broker
async def test_a_port_for_websockets_is_named(tmp_path: Path) -> None:
    lines = "listener {other} 127.0.0.1", "allow_anonymous true", "listener {port}", "protocol websockets"
    async with OwnBroker(tmp_path, *lines) as broker:
        (found,) = await asyncio.to_thread(
            lambda: list(diagnose_broker(DoctorSettings(broker=f"localhost:{broker.port}")))
        )
        assert found.found.endswith(f"speaks MQTT over WebSockets: give the address ws://localhost:{broker.port}")
        (found, *_) = await asyncio.to_thread(
            lambda: list(diagnose_broker(DoctorSettings(broker=f"ws://localhost:{broker.port}")))
        )
        assert found.state == "ok"


@pytest.mark.broker
async def test_a_proxy_that_forbids_it_is_named() -> None:
    async with ProxyServer("http", forbids=1883) as proxy:
        settings = DoctorSettings(broker="localhost", proxy=Secret(proxy.url))
        (found,) = await asyncio.to_thread(lambda: list(diagnose_broker(settings)))
    assert found.found.startswith("localhost:1883 cannot be reached: the proxy at 127.0.0.1:")
    assert "--proxy" in found.do
