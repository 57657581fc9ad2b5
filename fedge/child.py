"""Work that needs torch for a process that shall not hold it: a short-lived child does it."""

from __future__ import annotations

import os
import subprocess
import sys

from fedge.errors import ConfigError


def command(module: str, *words: str) -> list[str]:
    """`python -m MODULE WORDS...`; a file in the present folder shadows no module of ours."""
    return [sys.executable, "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """Ours, by which a child finds the modules that this process finds, those of the user too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(module: str, *words: str) -> None:
    """Run `command` to its end.

    Raises:
        ConfigError: it failed; the text is the last line of what it said.
    """
    child = subprocess.run(
        command(module, *words),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise ConfigError((child.stderr.strip().splitlines() or ["no message"])[-1])
