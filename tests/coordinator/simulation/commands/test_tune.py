"""The command `fedge tune`, as a process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.process
def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "search"
    command = [sys.executable, "-m", "fedge", "tune", "--method=fedavg", "--devices=2", "--samples=200"]
    command += ["--rounds=2", "--local-steps=2", "--trials=3", "--search=learning_rate", f"--out={out}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("1/3"))
        while not any("TERMINATED" in file.read_text() for file in out.glob("trials/experiment_state*")):
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        first.stderr.read()
    assert first.returncode == 130
    assert not (out / "best.toml").exists()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    done = [line for line in again.stderr.splitlines() if "/3  learning_rate" in line]
    assert len(done) < 3
    assert done[-1].startswith("3/3")
    found = json.loads((out / "figures.json").read_text())
    assert len(found["trials"]) == 3
    assert found["best"]["rounds"] == 2
    assert found["asked"]["values"] == {"learning_rate": 0.05}
