"""A clock that nobody sets, and the boot that it counts from."""

from edge_agent.agent.uptime import get_uptime_s, read_boot_id


def test_it_only_rises_within_a_boot() -> None:
    readings = [get_uptime_s() for _ in range(5)]
    assert readings == sorted(readings)
    assert readings[0] > 0
    assert read_boot_id() == read_boot_id()
