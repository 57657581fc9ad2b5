"""The demo's child processes, real `fedge` commands with a log file each, which all end with the demo."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from fedge.errors import FedgeError, FruitlessError
from fedge.system.child import make_command, make_environment, make_tethered_command

GRACE_S: Final = 10.0
"""Time for a child process to end after SIGTERM; after it, the child is killed."""

ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",  # a dozen devices share this machine's cores
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class ProcessError(FedgeError):
    """A child process ended unexpectedly. The text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running `fedge` command, which prints into the file `output` and logs into the file `log`."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet."""
        return self.process.poll() is None

    def require(self, *codes: int) -> None:
        """Require one of these exit codes, or that it still runs when none is given.

        Raises:
            FruitlessError: the command ended without a result, and says why.
            ProcessError: the command ended otherwise.
        """
        code = self.process.poll()
        if (code is None and not codes) or code in codes:
            return
        if code == FruitlessError.exit_code:
            why = self.log.read_text(encoding="utf-8", errors="replace").strip().rpartition("error: ")[2]
            raise FruitlessError(f"{why}; the logs are in {self.log.parent}")
        raise ProcessError(f"{self.name} ended with exit code {code}; {self.log} ends with:\n{read_tail(self.log)}")


class Children:
    """The `fedge` commands that were started; on exit all are stopped, the last started first.

    A child gets a process group of its own, so that Ctrl-C reaches only the demo, which then stops them in order; if
    the demo itself is killed, the kernel kills them.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._children)

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Run `fedge ARGUMENTS` with logs/NAME.log and logs/NAME.out. Call it from the main thread."""
        output, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with output.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                make_tethered_command(*make_command("fedge", *arguments)),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=ENVIRONMENT | make_environment(),
                start_new_session=True,
            )
        child = Child(name, process, output, log)
        self._children.append(child)
        return child

    def stop(self, children: Sequence[Child]) -> None:
        """Terminate these children all at once, and after a while kill those that remain."""
        for child in reversed(children):
            if child.running:
                child.process.terminate()
        patience = time.monotonic() + GRACE_S
        for child in children:
            try:
                child.process.wait(max(0.0, patience - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def read_tail(log: Path) -> str:
    """Read the last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return "\n".join(f"    {line}" for line in text.splitlines()[-15:]) or "    (nothing)"
