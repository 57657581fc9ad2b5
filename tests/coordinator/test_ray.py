"""Ray as fedge starts it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Engine, Running, Scenario
from fedge.errors import ConfigError
from fedge.loading import hold
from fedge.tasks import Task


def test_what_lives_in_this_process_alone_cannot_go_to_ray(tmp_path: Path) -> None:
    x, y = np.zeros((200, 8), np.float32), np.arange(200) % 3
    task = Task.from_arrays(x, y)
    scenario = Scenario(task=hold(task), devices=2, rounds=1)
    with pytest.raises(ConfigError, match="write it into a module"):
        simulate(scenario, "fedavg", {}, 0, tmp_path, lambda _: None, "", Running(engine=Engine.RAY))


@pytest.mark.process
def test_ray_reports_nothing_and_listens_here_alone() -> None:
    code = (
        "import psutil\n"
        "from coordinator.ray import connected\n"
        "from ray._common.usage import usage_lib\n"
        "with connected(None):\n"
        "    print(usage_lib.usage_stats_enabled())\n"
        "    started = psutil.Process().children(recursive=True)\n"
        "    found = [c for each in started for c in each.net_connections() if c.status == psutil.CONN_LISTEN]\n"
        "    print(*sorted({each.laddr.ip for each in found}))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reports, addresses = ran.stdout.splitlines()[-2:]
    assert reports == "False"
    assert set(addresses.split()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert addresses
