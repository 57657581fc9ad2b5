"""Ray as fedge starts it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.fleet.simulated.ray import plan_actors, ray
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import EngineScenario, Scenario
from fedge.errors import ConfigError
from fedge.system.hardware import Processor
from fedge.system.loading import register_object
from fedge.tasks import Task


def test_what_lives_in_this_process_alone_cannot_go_to_ray(tmp_path: Path) -> None:
    x, y = np.zeros((200, 8), np.float32), np.arange(200) % 3
    task = Task.from_arrays(x, y)
    scenario = Scenario(task=register_object(task), devices=2, rounds=1)
    with pytest.raises(ConfigError, match="write it into a module"):
        simulate(scenario, "fedavg", {}, 0, tmp_path, lambda _: None, "", EngineScenario(engine="ray"))


@pytest.mark.parametrize(
    ("n_processors", "n_gpus", "n_actors", "resources"),
    [
        (16, 1, 16, {"num_cpus": 1.0, "num_gpus": 0.0625}),
        (7, 2, 6, {"num_cpus": 1.0, "num_gpus": 0.3333}),
        (2, 4, 4, {"num_cpus": 0.5, "num_gpus": 1.0}),
    ],
)
def test_actors_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, n_processors: int, n_gpus: int, n_actors: int, resources: dict[str, float]
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": n_processors, "GPU": n_gpus})
    assert plan_actors(n_processors, Processor.CUDA) == (n_actors, resources)
    assert plan_actors(n_processors, Processor.CPU) == (n_processors, {"num_cpus": 1})


@pytest.mark.process
def test_cuda_is_refused_where_the_cluster_has_no_gpu(tmp_path: Path) -> None:
    scenario = Scenario(samples=200, devices=2, rounds=1, train_on=Processor.CUDA)
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        simulate(scenario, "fedavg", {}, 0, tmp_path, lambda _: None, "", EngineScenario(engine="ray"))


@pytest.mark.process
def test_ray_reports_nothing_and_listens_here_alone() -> None:
    code = (
        "import psutil\n"
        "from coordinator.fleet.simulated.ray import connect, ray\n"
        "from ray._common.usage import usage_lib\n"
        "with connect(None):\n"
        "    print(usage_lib.usage_stats_enabled())\n"
        "    @ray.remote\n"
        "    def niceness(): return psutil.Process().nice()\n"
        "    print(ray.get(niceness.remote()))\n"
        "    started = psutil.Process().children(recursive=True)\n"
        "    found = [c for each in started for c in each.net_connections() if c.status == psutil.CONN_LISTEN]\n"
        "    print(*sorted({each.laddr.ip for each in found}))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reports, niceness, addresses = ran.stdout.splitlines()[-3:]
    assert reports == "False"
    assert niceness == str(os.nice(0))
    assert set(addresses.split()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert addresses
