"""Another wall clock for programs that a test starts: libfaketime, Debian's package faketime."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Final

FAKETIME: Final = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
"""The library, if it is installed."""
CLOCK: Final = "FAKETIME_TIMESTAMP_FILE"
"""The environment variable with the file that says how far the clock is ahead."""
CACHE_S: Final = 1
"""Time after which a program has seen that its clock was set."""
CLOCKS: Final = {
    "LD_PRELOAD": str(FAKETIME),
    "FAKETIME_CACHE_DURATION": str(CACHE_S),
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "NO_FAKE_STAT": "1",
}
"""What a program needs in its environment, besides the file."""


def set_clock(file: Path, ahead: str) -> None:
    """Set the clock of all programs that go by this file, such as to +60 or +2d."""
    new = file.with_suffix(".new")
    new.write_text(ahead)
    new.replace(file)


def mend_sleep() -> None:
    """Let this process sleep although libfaketime gives the kernel absolute times by the wrong clock."""
    if CLOCK in os.environ:
        time.sleep = lambda seconds: select.select([], [], [], seconds)  # type: ignore[assignment]
