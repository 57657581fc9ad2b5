from io import StringIO

import pytest
from rich.console import Console

from coordinator.demo.progress import Rounds, Watch

DONE = {"event": "round_done", "round": 1, "history": [{"accuracy": 0.5}], "bytes_up": 1_200_000, "bytes_down": 0}


@pytest.fixture
def rounds() -> Rounds:
    return Rounds(rounds=2, agents=3)


def test_devices_are_counted_once_however_often_they_come_back(rounds: Rounds) -> None:
    for device in ("a", "b", "a"):
        assert not rounds.take({"event": "device", "device": device, "presence": "online"})
    assert rounds.detail == "2 of 3 devices online"


def test_a_round_from_begin_to_end(rounds: Rounds) -> None:
    rounds.take({"event": "round_begun", "round": 1, "devices": 3})
    rounds.take({"event": "answer", "device": "a", "result": "trained", "seconds": 0.1})
    assert rounds.detail == "round 1 of 2, 1 reports"
    assert rounds.completed == 0
    assert rounds.take(DONE)
    assert rounds.completed == 1
    assert rounds.detail == "round 1 of 2, 1 reports, validation accuracy 50.0 %, 1.2 MB up, 0.0 MB down"


def test_after_the_last_round_come_the_mixtures(rounds: Rounds) -> None:
    rounds.take({"event": "round_begun", "round": 3, "devices": 3})
    assert rounds.detail == "personal mixtures"


def test_without_a_terminal_only_milestones_make_lines() -> None:
    output = StringIO()
    with Watch(Console(file=output, force_terminal=False)) as watch:
        watch.phase("first", 2)
        watch.update(1, "one", milestone=False)
        watch.update(2, "two")
        watch.phase("second")
    assert output.getvalue() == "first\n  two\nsecond\n"


def test_a_terminal_sees_the_phase_and_its_detail() -> None:
    output = StringIO()
    with Watch(Console(file=output, force_terminal=True, width=120)) as watch:
        watch.phase("rounds", 4)
        watch.update(3, "round 3 of 4", milestone=False)
    assert "rounds" in output.getvalue()
    assert "round 3 of 4" in output.getvalue()
