"""`fedge` programs as processes that start in milliseconds, so that they can be killed a thousand times.

Each is forked from one process that has imported everything and started nothing. From then on it is what `fedge` is:
its own memory, files, sockets and signals. Each has a wall clock of its own: by libfaketime, which every library of the
process then sees, or where that is not installed by `time.time` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Final

from tests.support.faketime import CLOCK, CLOCKS, FAKETIME, mend_sleep, set_clock

PRELOADED: Final = (
    "fedge.commands.cli", "coordinator.service.cli", "edge_agent.agent.cli", "edge_agent.agent",
    "edge_agent.device.worker", "coordinator.service", "coordinator.methods", "deploy.commands.serve",
    "deploy.commands.install", "deploy.inference.runtime", "deploy.serving.server", "export.bundle",
    "export.parity", "onnxscript", "fedge.models", "fedge.tasks", "fedge.wire.transport", "tests.chaos.programs",
)  # fmt: skip
PR_SET_PDEATHSIG: Final = 1

_forking = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Import everything once, in a process whose children have clocks of their own."""
    _forking.set_forkserver_preload(list(PRELOADED))
    if FAKETIME is not None:
        os.environ |= CLOCKS
    try:
        forkserver.ensure_running()
    finally:
        for name in CLOCKS:
            os.environ.pop(name, None)


class Program:
    """One `fedge` command. It ends with us, even where we are killed.

    Args:
        words: of the command line, after `fedge`.
        log: what it prints is appended to this file.
        ahead_s: how far its wall clock is ahead; may be set while it runs, and then jumps.
        memory: bytes of address space that it may take beyond what it has at its start.
    """

    def __init__(self, words: Sequence[object], log: Path, *, ahead_s: float = 0.0, memory: int | None = None) -> None:
        self.log = log
        self._clock = log.with_suffix(".clock")
        self._ahead: Synchronized[float] = _forking.Value("d", 0.0, lock=False)  # type: ignore[assignment]
        self.jump(ahead_s)
        given = ([str(word) for word in words], log, self._clock, self._ahead, memory)
        self._process = _forking.Process(target=_run, args=given)
        self._process.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended, be it stopped or not."""
        return self._process.is_alive()

    @property
    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.running and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        self._process.kill()
        self._process.join()

    def jump(self, ahead_s: float) -> None:
        """Set its wall clock, as somebody or the network would."""
        if FAKETIME is None:
            self._ahead.value = ahead_s  # type: ignore[attr-defined]
        else:
            set_clock(self._clock, f"{ahead_s:+.0f}")


def _run(words: list[str], log: Path, clock: Path, ahead: Synchronized[float], memory: int | None) -> None:
    """In the new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(handle, number)
    os.environ[CLOCK] = str(clock)
    if FAKETIME is not None:
        mend_sleep()
    right = time.time
    time.time = lambda: right() + ahead.value  # type: ignore[attr-defined]
    if memory is not None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    sys.argv = ["fedge", *words]
    from fedge.commands.cli import main

    sys.exit(main())
