"""Children of coordinators and agents that have torch from the start: they are forked from a process that imported it.

`fedge.system.child` starts a Python for each piece of work that needs torch, and imports are most of what a federation
of processes costs in tests. `python -m tests.support.warm WORDS...` is `python -m fedge WORDS...`, but for that: its
children are forked from one process for each process of pytest (`forking`). All else is as it was: they have pids and
exit codes of their own, and end with the process that asked for them, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from fedge.commands.cli import main
from fedge.system import child, tether
from tests.support.faketime import mend_sleep

ROOT: Final = Path(__file__).parents[2]
ADDRESS: Final = "FEDGE_TESTS_WARM"
"""The environment variable with the name of the socket, which is no file."""

WARM: Final = (
    *("coordinator.fleet.mqtt.checking", "coordinator.service.checks", "edge_agent.agent.workplace"),
    *("edge_agent.device.worker", "edge_agent.steps", "export.graph", "export.parity", "fedge.bundle.runtime"),
    *("fedge.models.build", "fedge.models.training", "fedge.tasks"),
)
"""What the children of coordinators and agents import."""


@functools.cache
def forking() -> str:
    """The name of the socket at which children are forked; the process behind it ends with this one."""
    name = f"fedge-warm-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        words = (str(listener.fileno()), str(os.getpid()))
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.warm import serve; serve()", *words],
            pass_fds=[listener.fileno()],
            cwd=ROOT,
        )
    atexit.register(process.wait)
    atexit.register(process.kill)  # the last is first
    return name


def command(*words: str, forked: bool) -> list[str]:
    """The command line of `fedge WORDS...`, with forked children where there is what that takes."""
    return [sys.executable, "-m", "tests.support.warm" if forked and sys.platform == "linux" else "fedge", *words]


def environment() -> dict[str, str]:
    """The environment of such a command, by which the commands that it starts find this module, too."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    return {**found, ADDRESS: forking()} if sys.platform == "linux" else found


# ------------------------------------------------------------------------------------------------------ who forks


def serve() -> None:
    """Fork whoever is asked for, until the process of pytest ends."""
    descriptor, parent = map(int, sys.argv[1:])
    tether.die_with_parent(parent)
    listener = socket.socket(fileno=descriptor)
    mend_sleep()
    for module in WARM:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            watch(asking)
        asking.close()


def watch(asking: socket.socket) -> NoReturn:
    """Start the child, say how it ends, and end it with whoever asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, descriptors, *_ = socket.recv_fds(asking, 2**20, 2)
    if (pid := os.fork()) == 0:
        asking.close()
        become(json.loads(data), *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        asking.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        ready, *_ = select.select([ended, asking], [], [])
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(asked: dict[str, Any], wire: int, errors: int) -> NoReturn:
    """Be `python -m fedge.system.child`, as far as it can tell."""
    code = 0
    try:
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.path[:] = asked["env"]["PYTHONPATH"].split(os.pathsep)  # all of that of who asks
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        child._serve(asked["function"], Connection(wire))
    except BaseException:  # noqa: BLE001 - as Python itself
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -------------------------------------------------------------------------------------------------------- who asks


class Forked:
    """In place of `subprocess.Popen`, as far as `fedge.system.child` needs it."""

    def __init__(self, words: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **_: object) -> None:
        self.returncode: int | None = None
        self._words = words
        self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wire.connect("\0" + os.environ[ADDRESS])
        *_rest, function, _, _ = words
        asked = {"function": function, "env": env, "cwd": str(Path.cwd())}
        socket.send_fds(self._wire, [json.dumps(asked).encode()], [*pass_fds, 2])
        self.pid = int(self._wire.recv(64))

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        if self.returncode is None:
            if not select.select([self._wire], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
            self.returncode = int(self._wire.recv(64))
            self._wire.close()
        return self.returncode

    def kill(self) -> None:
        """kill -9."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def make_command(make: Callable[..., list[str]], module: str, *words: str) -> list[str]:
    """As `make`, that of `fedge.system.child`; the children of a further `fedge` are forked, too."""
    return make("tests.support.warm" if module == "fedge" else module, *words)


if __name__ == "__main__":
    child.make_command = functools.partial(make_command, child.make_command)
    mend_sleep()
    child.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    sys.exit(main())
