"""The first federations of `make chaos`: some forty kills, and the books right afterwards."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)  # with a load of 15 on two cores it took 650 s
def test_two_minutes_of_bad_weather_lose_nothing() -> None:
    command = (sys.executable, "-m", "tests.chaos", "--minutes", "0.7", "--rounds", "20", "--seed", "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "without a loss" in done.stdout
