"""Monotonic time: a Raspberry Pi without a clock chip wakes up in the past until the network sets its clock."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def uptime_s() -> float:
    """Seconds since some moment of this boot, including suspended time where Linux counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def boot() -> str:
    """Identifies this boot; readings of `uptime_s` are comparable within it. Empty: unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
