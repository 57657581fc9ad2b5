"""What both roles on a device read of its sensors."""

from __future__ import annotations

import psutil


def temperature_c() -> float | None:
    """The hottest sensor: it is what makes a device throttle. None where there is none."""
    read = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read is not None else {}
    return max((float(entry.current) for entries in sensors.values() for entry in entries), default=None)
