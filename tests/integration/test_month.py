"""`make month`: a fleet that lives, with real programs, a real broker and a clock that jumps from day to day."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedge.commands.broker import find_mosquitto
from tests.support.faketime import FAKETIME

pytestmark = [
    pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: apt install faketime)"),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


def test_four_days_with_programs_that_are_killed_lose_no_sample_and_count_none_twice() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.month", "--few", "--only", "disturbed"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all was seen" in ran.stdout
