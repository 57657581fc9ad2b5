import math
from collections import Counter

import pytest

from coordinator.fleet.simulated.devices import CLASSES, PI_4, PI_5, PI_ZERO_2_W, Hardware, draw_mixed


def test_the_default_takes_no_time_and_is_always_there():
    own = Hardware()
    assert own.availability == 1
    assert own.speed == own.up_mbit_s == own.down_mbit_s == math.inf
    assert own.jitter == own.straggles == own.drops == own.latency_s == 0


def test_availability_is_the_chains_long_run_share():
    assert Hardware(stays=0.9, returns=0.5).availability == pytest.approx(0.5 / 0.6)
    assert Hardware(stays=0.5, returns=0.5).availability == pytest.approx(0.5)
    assert Hardware(stays=1.0, returns=0.0).availability == 1


def test_the_classes_are_plausible():
    assert PI_ZERO_2_W.speed < PI_4.speed == 1 < PI_5.speed
    for own in CLASSES:
        assert own.speed > 0 < own.up_mbit_s <= own.down_mbit_s
        assert 0.8 < own.availability < 1
        assert 0 < own.drops < 0.1
    assert len({own.name for own in CLASSES}) == 5


def test_every_class_is_hardware_out_equally_often_by_the_seed():
    ids = [f"d{i}" for i in range(23)]
    hardware = draw_mixed(ids, seed=1)
    assert set(hardware) == set(ids)
    counts = Counter(own.name for own in hardware.values())
    assert sorted(counts.values()) == [4, 4, 5, 5, 5]
    assert draw_mixed(reversed(ids), seed=1) == hardware
    assert draw_mixed(ids, seed=2) != hardware
