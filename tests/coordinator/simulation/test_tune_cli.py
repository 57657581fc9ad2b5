"""The command `fedge tune`, as a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "search"
    command = [sys.executable, "-m", "fedge.cli", "tune", "--method=fedavg", "--devices=2", "--samples=200"]
    command += ["--rounds=2", "--local-steps=2", "--trials=4", "--search=learning_rate", f"--out={out}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stderr is not None
        before = next(line for line in first.stderr if line.startswith("1/4"))
        next(line for line in first.stderr if line.startswith("2/4"))  # the first one is on the disk now
        first.send_signal(signal.SIGINT)
        first.stderr.read()
    assert first.returncode == 130
    assert not (out / "best.toml").exists()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert before.split("  ", 1)[1] not in again.stderr
    assert "4/4" in again.stderr
    found = json.loads((out / "figures.json").read_text())
    assert len(found["trials"]) == 4
    assert found["best"]["rounds"] == 2
    assert found["asked"]["values"] == {"learning_rate": 0.05}
