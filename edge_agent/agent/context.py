"""Measures a device's present state, mostly by psutil, for selection, for the console, and to decline work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedge.steps.contract import Declined
from fedge.system.hardware import measure_temperature_c
from fedge.wire.messages import Context, Why


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond which the device declines work. A limit that is None, or on a missing sensor, never applies."""

    min_free_ram_gb: float | None = None
    max_temperature_c: float | None = None
    min_battery: float | None = None  # as a share of full charge

    def find_refusal(self, now: Context) -> Declined | None:
        """Return why the device declines work now, or None."""
        ram_gb, temperature_c, battery = self.min_free_ram_gb, self.max_temperature_c, self.min_battery
        if ram_gb is not None and now.free_ram_gb is not None and now.free_ram_gb < ram_gb:
            return Declined(why=Why.MEMORY, reason=f"free RAM {now.free_ram_gb:.2f} GB is below {ram_gb:g} GB")
        if temperature_c is not None and now.temperature_c is not None and now.temperature_c > temperature_c:
            text = f"temperature {now.temperature_c:.0f} C is above {temperature_c:g} C"
            return Declined(why=Why.HOT, reason=text)
        if battery is not None and now.battery is not None and now.battery < battery:
            return Declined(why=Why.BATTERY, reason=f"battery {now.battery:.0%} is below {battery:.0%}")
        return None


def measure_context(device_id: str, n_samples: int, home: Path, link_mbit_s: float | None) -> Context:
    """Read all sensors; a field is None if the device has no such sensor.

    n_samples: number of samples whose model may be uploaded. home: a folder on the disk that the agent fills.
    link_mbit_s: the rate that the receiver of models measured.
    """
    return Context(
        device_id=device_id,
        at=time.time(),
        cpu_ghz=_measure_cpu_ghz(),
        load=psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        free_ram_gb=psutil.virtual_memory().available / 1e9,
        free_disk_gb=psutil.disk_usage(str(home)).free / 1e9,
        battery=_measure_battery(),
        temperature_c=measure_temperature_c(),
        link_mbit_s=link_mbit_s,
        n_samples=n_samples,
    )


def _measure_cpu_ghz() -> float | None:
    """Read the present clock rate in GHz; None on containers and boards that hide it."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return float(frequency.current) / 1e3 if frequency is not None and frequency.current > 0 else None


def _measure_battery() -> float | None:
    """Read the charge as a share of full, 0 to 1, or None on mains or without a known power supply."""
    read = getattr(psutil, "sensors_battery", None)
    try:
        battery = read() if read is not None else None
    except OSError:  # psutil lists /sys/class/power_supply without checking that it exists
        return None
    if battery is None or battery.power_plugged:
        return None
    return min(max(float(battery.percent) / 100, 0.0), 1.0)
