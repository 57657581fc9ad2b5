"""Work that needs torch for a process that shall not hold it: a short-lived child does it."""

from __future__ import annotations

import os
import subprocess
import sys

from fedge.errors import ConfigError


def run(module: str, *words: str) -> None:
    """Run `python -m MODULE WORDS...` to its end; it finds the user's modules, too.

    Raises:
        ConfigError: it failed; the text is the last line of what it said.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise ConfigError((child.stderr.strip().splitlines() or ["no message"])[-1])
