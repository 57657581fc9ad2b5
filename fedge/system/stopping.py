"""Early termination of long-running work."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a process that SIGINT or SIGTERM has ended, as shells give it."""

Stop = Callable[[], bool]
"""Function that is called between two batches and returns whether to stop."""


class StoppedError(Exception):
    """The work was stopped from outside, without a result."""


def never() -> bool:
    """Return False, so that work never stops early."""
    return False


def ignore_signals() -> None:
    """Ignore both signals, for `atexit`: Python drops its handlers on exit, so a signal would change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
