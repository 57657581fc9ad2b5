"""A clock that nobody sets, and the boot that it counts from."""

from edge_agent.agent.uptime import boot, uptime_s


def test_it_only_rises_within_a_boot() -> None:
    readings = [uptime_s() for _ in range(5)]
    assert readings == sorted(readings)
    assert readings[0] > 0
    assert boot() == boot()
