"""A device's present state, mostly by psutil: the context used by selection and shown at the console."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from fedge.system.hardware import temperature_c
from fedge.wire.messages import Context


def measure(device_id: str, n_samples: int, home: Path, link_mbit_s: float | None) -> Context:
    """Read all sensors; None if the device has no such sensor.

    n_samples: those whose model may be uploaded. home: a folder on the disk that the agent fills. link_mbit_s: measured
    by the receiver of models.
    """
    return Context(
        device_id=device_id,
        at=time.time(),
        cpu_ghz=_cpu_ghz(),
        load=psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        free_ram_gb=psutil.virtual_memory().available / 1e9,
        free_disk_gb=psutil.disk_usage(str(home)).free / 1e9,
        battery=_battery(),
        temperature_c=temperature_c(),
        link_mbit_s=link_mbit_s,
        n_samples=n_samples,
    )


def _cpu_ghz() -> float | None:
    """Present clock rate; hidden by containers and some boards."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return float(frequency.current) / 1e3 if frequency is not None and frequency.current > 0 else None


def _battery() -> float | None:
    """Charge as a share of full; None on mains, or if the kernel knows no power supply."""
    read = getattr(psutil, "sensors_battery", None)
    try:
        battery = read() if read is not None else None
    except OSError:  # psutil lists /sys/class/power_supply without checking that it exists
        return None
    if battery is None or battery.power_plugged:
        return None
    return min(max(float(battery.percent) / 100, 0.0), 1.0)
