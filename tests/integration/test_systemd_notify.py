"""Real processes tell a real socket, as systemd's is, when they are ready and that they are not stuck."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedge.commands.broker import LocalBroker
from fedge.system.systemd import notify_ready

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
STUCK = """
import asyncio, time
from fedge.system.systemd import notify_ready

async def main():
    notify_ready()
    notify_ready()
    await asyncio.sleep(0.5)
    time.sleep(60)

asyncio.run(main())
"""


class Heard:
    """Where systemd would listen, and a process that is told so."""

    def __init__(self, tmp_path: Path, *command: object, limit_s: float = 0.3) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(tmp_path / "notify"))
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(int(limit_s * 1e6))}
        self.process = subprocess.Popen([sys.executable, *map(str, command)], env=os.environ | told, cwd=ROOT)

    def word(self, timeout_s: float = 60.0) -> str:
        self.socket.settimeout(timeout_s)
        return self.socket.recv(100).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


def test_a_loop_that_is_stuck_feeds_no_watchdog(tmp_path: Path) -> None:
    heard = Heard(tmp_path, "-c", STUCK)
    assert [heard.word() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"], "ready once"
    with pytest.raises(TimeoutError):
        set(iter(lambda: heard.word(2.0), ""))
    heard.close()


@pytest.mark.parametrize("role", ["agent", "coordinator"])
async def test_it_is_ready_when_the_broker_has_let_it_in(one_broker: LocalBroker, tmp_path: Path, role: str) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 8, 8), np.float32), y=np.arange(20) % 10)
    own = ("--id", "cam0", "--data", tmp_path / "d.npz") if role == "agent" else ("--method", "fedavg")
    common = ("-m", "fedge", role, "--federation", "f", "--task", "digits", "--home", tmp_path / role, *own)
    port = one_broker.port
    await one_broker.stop()
    heard = Heard(tmp_path, *common, "--broker", f"{one_broker.host}:{port}")
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(heard.word, 2.0)
    await one_broker.start()
    assert [await asyncio.to_thread(heard.word) for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
    heard.close()


def test_the_runtime_is_ready_when_its_port_is_open(tmp_path: Path) -> None:
    bundle = ROOT / "tests" / "deploy" / "golden" / "bundle"
    heard = Heard(tmp_path, "-m", "fedge", "serve", bundle, "--port", "0")
    assert [heard.word() for _ in range(2)] == ["READY=1", "WATCHDOG=1"]
    heard.close()


async def test_where_nobody_listens_the_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_ready()
    notify_ready()
    assert caplog.text.count("event=not_notified") == 1
