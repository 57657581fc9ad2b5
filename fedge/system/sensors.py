"""A device's hardware sensors, as both of its roles read them."""

from __future__ import annotations

import psutil


def temperature_c() -> float | None:
    """The hottest sensor, since it triggers throttling. None without sensors."""
    read = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read is not None else {}
    return max((float(entry.current) for entries in sensors.values() for entry in entries), default=None)
