"""The broker as a child process: it starts, it can be killed and come back, and it never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedge.commands import broker as module
from fedge.commands.broker import LocalBroker, broker, choose_broker, find_free_port, make_mosquitto_config
from fedge.errors import ConfigError, TransportError
from fedge.membership.broker_configuration import format_open_listener
from tests.support.broker import BROKERS, transport

WAIT_S = 300.0


def ended(pid: int) -> bool:
    """Whether a process that is not our child has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not ended(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@pytest.fixture
def no_mosquitto(tmp_path, monkeypatch):
    """The folder in which programs are looked for: Mosquitto is nowhere."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "_SBIN", ())
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_auto_is_what_is_installed(no_mosquitto):
    program = no_mosquitto / "mosquitto"
    program.symlink_to(sys.executable)
    assert choose_broker("auto") == "mosquitto"
    program.unlink()
    assert choose_broker("auto") == "amqtt"
    assert choose_broker("amqtt") == "amqtt"
    with pytest.raises(ConfigError, match="apt install mosquitto"):
        choose_broker("mosquitto")
    with pytest.raises(ConfigError, match="choose one of auto, mosquitto, amqtt"):
        choose_broker("rabbit")


def test_configuration_has_our_limits():
    lines = make_mosquitto_config(format_open_listener("127.0.0.1", 1884)).splitlines()
    assert "listener 1884 127.0.0.1" in lines
    assert "max_packet_size 2097152" in lines
    assert "persistence false" in lines
    assert any(line.startswith("max_queued_bytes ") for line in lines)


async def test_killed_and_started_again_on_its_port(broker):
    port = broker.port
    async with transport(broker, "one"):
        pass
    await broker.kill()
    assert not listens(broker.host, port)
    await broker.start()
    assert broker.port == port
    async with transport(broker, "one") as one:
        assert one.connected


async def test_stop_leaves_nothing(broker):
    pid = broker.pid
    await broker.stop()
    await broker.stop()
    await gone(pid)
    assert not listens(broker.host, broker.port)
    assert broker.pid is None


async def test_port_in_use_is_told(broker, tmp_path):
    with pytest.raises(TransportError, match="already listens"):
        await LocalBroker(broker.name, port=broker.port, home=tmp_path / "other").start()


async def test_broker_that_cannot_start_tells_why(tmp_path, no_mosquitto):
    (no_mosquitto / "mosquitto").symlink_to(sys.executable)
    with pytest.raises(TransportError, match="mosquitto ended at once"):
        await LocalBroker("mosquitto", home=tmp_path).start()


PARENT = """
import asyncio, sys
from pathlib import Path
from fedge.commands.broker import LocalBroker

async def main():
    async with LocalBroker(sys.argv[1], home=Path(sys.argv[2])) as running:
        print(running.pid, running.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's parent death signal")
@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
async def test_broker_dies_with_a_parent_that_was_killed_with_9(kind, tmp_path):
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, kind, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(WAIT_S):
        pid, port = (int(word) for word in (await parent.stdout.readline()).split())
    assert listens("127.0.0.1", port)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await gone(pid)
    assert not listens("127.0.0.1", port)


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_command_runs_until_a_signal(kind, number, tmp_path):
    command = (
        f"from fedge.commands.broker import broker; broker(['--kind', '{kind}', '--port', '0', '--home', '{tmp_path}'])"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(WAIT_S):
        line = (await child.stdout.readline()).decode()
        assert line.startswith(f"{kind} listens on 127.0.0.1:")
        port = int(line.partition(";")[0].rpartition(":")[2])
        assert listens("127.0.0.1", port)
        child.send_signal(number)
        assert await child.wait() == 0
    assert not listens("127.0.0.1", port)


async def test_command_tells_machines_where_it_listens(tmp_path):
    command = f"from fedge.commands.broker import broker; broker(['--port', '0', '--home', '{tmp_path}', '--json'])"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(WAIT_S):
        told = json.loads(await child.stdout.readline())
        assert listens(told["host"], told["port"])
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    assert (told["event"], told["host"]) == ("listening", "127.0.0.1")
    assert told["kind"] == choose_broker("auto")


def test_help_has_examples():
    result = CliRunner().invoke(broker, ["--help"])
    assert result.exit_code == 0
    assert "fedge broker --host 0.0.0.0" in result.output


def test_free_port_can_be_used_and_is_none_that_the_system_gives_away():
    port = find_free_port("127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert port < 32_768 <= other.getsockname()[1]


def test_free_port_of_an_address_that_is_not_here_is_refused():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        find_free_port("192.0.2.1")


@pytest.mark.broker
@pytest.mark.parametrize("kind", BROKERS)
async def test_a_file_in_the_present_folder_shadows_no_module(kind, tmp_path, monkeypatch):
    (tmp_path / "fedge.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    async with LocalBroker(kind, home=tmp_path / "home") as running:
        assert running.pid is not None
