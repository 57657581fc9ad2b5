from types import SimpleNamespace

import psutil

from fedge.sensors import temperature_c


def test_the_hottest_sensor_counts(monkeypatch):
    readings = {
        "cpu": [SimpleNamespace(current=41.0), SimpleNamespace(current=63.5)],
        "gpu": [SimpleNamespace(current=50)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: readings, raising=False)
    assert temperature_c() == 63.5


def test_a_device_may_have_none(monkeypatch):
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    assert temperature_c() is None
    monkeypatch.delattr(psutil, "sensors_temperatures")
    assert temperature_c() is None
