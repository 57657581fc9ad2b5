"""Monotonic time, since a Raspberry Pi without a clock chip starts in the past until the network sets its clock."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def get_uptime_s() -> float:
    """Return the seconds since this boot, with suspended time if the system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def read_boot_id() -> str:
    """Return the id of this boot, within which `get_uptime_s` is comparable, or "" if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
