"""Time that nobody sets: a Raspberry Pi without a clock chip wakes up in the past, and the network sets it later."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def uptime_s() -> float:
    """Seconds since some moment of this boot, those in which the machine was suspended included where Linux counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def boot() -> str:
    """The name of this boot, by which two readings of `uptime_s` can be compared; empty: nobody knows."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
