from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge_agent.agent.context import measure_context
from fedge.wire.messages import Context, decode_message, encode_message


def test_what_this_machine_says_is_a_valid_message(tmp_path):
    found = measure_context("d", 17, tmp_path, 8.5)
    assert decode_message(encode_message(found), Context) == found
    assert found.n_samples == 17
    assert 0 < found.free_ram_gb <= psutil.virtual_memory().total / 1e9
    assert found.free_disk_gb > 0


def test_sensors_in_their_units(sensors, tmp_path):
    battery = SimpleNamespace(percent=40, power_plugged=False)
    hot = {"cpu_thermal": [SimpleNamespace(current=61.5)], "board": [SimpleNamespace(current=40.0)]}
    sensors(
        cpu_freq=SimpleNamespace(current=1500.0),
        getloadavg=(2.0, 0, 0),
        cpu_count=4,
        sensors_battery=battery,
        sensors_temperatures=hot,
    )
    found = measure_context("d", 0, tmp_path, None)
    assert (found.cpu_ghz, found.load, found.battery, found.temperature_c) == (1.5, 0.5, 0.4, 61.5)
    battery.power_plugged = True
    assert measure_context("d", 0, tmp_path, None).battery is None


def test_missing_sensors_are_none(sensors, tmp_path):
    sensors(cpu_freq=FileNotFoundError(), sensors_battery=None, sensors_temperatures=None)
    found = measure_context("d", 0, tmp_path, None)
    assert (found.cpu_ghz, found.battery, found.temperature_c) == (None, None, None)


def test_a_kernel_without_power_supplies(sensors, tmp_path):
    sensors(sensors_battery=FileNotFoundError("/sys/class/power_supply"))
    assert measure_context("d", 0, tmp_path, None).battery is None


@pytest.mark.parametrize("home", ["/", "/dev/shm"])
def test_the_disk_is_that_of_the_home(home):
    """The agent may be started anywhere."""
    assert measure_context("d", 0, Path(home), None).free_disk_gb == pytest.approx(
        shutil.disk_usage(home).free / 1e9, rel=0.05
    )
