"""The fastest devices, by what they took and by their clock."""

import math

from coordinator.selection import fastest

IDS = ["a", "b", "c", "d"]


def test_measured_times_count_before_the_clock() -> None:
    assert fastest(IDS, 2, {"a": 1.0, "b": 4.0, "c": 2.0, "d": 3.0}, {"b": 9.0}) == ["a", "c"]


def test_without_measurements_the_clock_decides() -> None:
    assert fastest(IDS, 2, {}, {"a": 1.0, "b": 1.5, "c": 2.0, "d": 0.5}) == ["b", "c"]


def test_a_clock_is_turned_into_time_by_the_cycles_of_the_others() -> None:
    # a and b: 6 * 1 = 3 * 2 = 6 cycles (10^9); d at 4 GHz needs 1.5 s, c at 0.5 GHz 12 s
    clocks = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
    assert fastest(IDS, 1, {"a": 6.0, "b": 3.0}, clocks) == ["d"]
    assert fastest(IDS, 3, {"a": 6.0, "b": 3.0}, clocks) == ["a", "b", "d"]


def test_unknown_devices_come_late_and_silent_ones_last() -> None:
    assert fastest(IDS, 3, {"a": math.inf, "b": 2.0}, {"c": 1.0}) == ["b", "c", "d"]
    assert fastest(IDS, 4, {"a": math.inf, "b": 2.0}, {"c": 1.0}) == IDS


def test_ties_go_to_the_lowest_id_whatever_the_order() -> None:
    assert fastest(["d", "b", "c", "a"], 2, dict.fromkeys(IDS, 1.0), {}) == ["a", "b"]
    assert fastest([], 2, {}, {}) == []
