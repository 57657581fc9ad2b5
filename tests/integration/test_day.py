"""`make day`: one scripted day of a fleet, with real programs, brokers and a browser."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("selenium")
from tests.support.browser import INSTALLED


@pytest.mark.skipif(not INSTALLED, reason="chromium and chromium-driver are not installed")
def test_all_of_the_day_is_seen() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-m", "tests.day"], cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all was seen" in ran.stdout
