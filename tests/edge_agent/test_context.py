from __future__ import annotations

from types import SimpleNamespace

import psutil

from edge_agent.context import measure
from fedge.messages import Context, decode, encode


def test_what_this_machine_says_is_a_valid_message(tmp_path):
    found = measure("d", 17, tmp_path)
    assert decode(encode(found), Context) == found
    assert found.n_samples == 17
    assert 0 < found.free_ram_gb <= psutil.virtual_memory().total / 1e9
    assert found.free_disk_gb > 0


def test_sensors_in_their_units(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=1500.0))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.0, 0, 0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    battery = SimpleNamespace(percent=40, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    hot = {"cpu_thermal": [SimpleNamespace(current=61.5)], "board": [SimpleNamespace(current=40.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: hot, raising=False)
    found = measure("d", 0, tmp_path)
    assert (found.cpu_ghz, found.load, found.battery, found.temperature_c) == (1.5, 0.5, 0.4, 61.5)
    battery.power_plugged = True
    assert measure("d", 0, tmp_path).battery is None


def test_missing_sensors_are_none(monkeypatch, tmp_path):
    def hidden():
        raise FileNotFoundError

    monkeypatch.setattr(psutil, "cpu_freq", hidden)
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    found = measure("d", 0, tmp_path)
    assert (found.cpu_ghz, found.battery, found.temperature_c) == (None, None, None)


def test_a_kernel_without_power_supplies(monkeypatch, tmp_path):
    def no_folder():
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", no_folder, raising=False)
    assert measure("d", 0, tmp_path).battery is None


def test_the_disk_is_that_of_the_home(monkeypatch, tmp_path):
    """The agent may be started anywhere."""
    free = {str(tmp_path): 3e9}
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert measure("d", 0, tmp_path).free_disk_gb == 3
