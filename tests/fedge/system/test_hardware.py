from types import SimpleNamespace

from fedge.system.hardware import measure_temperature_c


def test_the_hottest_sensor_counts(sensors):
    readings = {
        "cpu": [SimpleNamespace(current=41.0), SimpleNamespace(current=63.5)],
        "gpu": [SimpleNamespace(current=50)],
    }
    sensors(sensors_temperatures=readings)
    assert measure_temperature_c() == 63.5


def test_a_device_may_have_none(sensors):
    sensors(sensors_temperatures={})
    assert measure_temperature_c() is None
    sensors(sensors_temperatures=None)
    assert measure_temperature_c() is None
