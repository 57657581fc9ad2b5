"""What marking samples as sensitive costs a device: processor time of its whole part in a federation of `fedge`.

Once for nothing marked, once for each share of --marked, in turn, on the same 20 devices of digits, with everybody in
30 rounds of 10 steps, each device alone on one thread, as an agent works. A device with marks fits its private and its
local model on the unmarked samples, and at the end anew on all (fedge.md section 3.1). Told for each share: seconds of
all devices by step, and all of it as a multiple of that without marks; the smallest of --repeats times.

Run: python benchmarks/marks.py [--marked 0.3 0.7] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from script import finish, parser_of, show

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.simulation.federation import partition_samples
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.settings import Scenario
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning.batched import Job, execute_singly, use_one_thread
from fedge.tasks import make_device_data
from fedge.tensors.layout import unflatten

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "alpha 0.5": {"alpha": 0.5},
    "own label code": {"partition": "groups", "groups": "codes", "n_groups": 1},
}
"""In the second the local model comes in."""


class Stopwatch:
    """Processor time of the devices' work, by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, jobs: Sequence[Job]) -> list[FinishedOrder]:
        """Do the jobs."""
        finished = []
        with use_one_thread():
            for job in jobs:
                began = time.thread_time()
                finished += execute_singly([job])
                self.seconds[job.action.STEP] += time.thread_time() - began
        return finished


def seconds(setting: str, marked: float, rounds: int) -> dict[str, float]:
    """Of all devices, by step."""
    scenario = Scenario(rounds=rounds, sensitive=marked, global_test=0.0, **SETTINGS[setting])
    federation = partition_samples(scenario, 0)
    watch, task = Stopwatch(), federation.task
    with tempfile.TemporaryDirectory() as home:
        workers = {i: Worker(i, task, make_device_data(task, s), Path(home) / i) for i, s in federation.shares.items()}
        fleet = SimulatedFleet(task, federation.layout, workers, seed=0, execute=watch)
        method = make_method("fedge", scenario.make_method_settings(0, {}), Server(task, None))
        first = fleet.put(unflatten(federation.first, federation.layout))
        asyncio.run(run_rounds(method, method.init(federation.layout, first), fleet))
    return dict(watch.seconds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--marked", type=float, nargs="+", default=[0.3, 0.7], help="shares (default 0.3 0.7)")
    parser.add_argument("--rounds", type=int, default=30, help="(default 30)")
    parser.add_argument("--repeats", type=int, default=3, help="the smallest of so many times (default 3)")
    arguments = parser.parse_args()
    shares = [0.0, *arguments.marked]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for setting in SETTINGS:
        times: dict[float, list[dict[str, float]]] = {marked: [] for marked in shares}
        for repeat in range(arguments.repeats):
            for marked in shares:
                print(f"\r{setting}: {repeat + 1}/{arguments.repeats}, {marked:.0%} ", end="", file=sys.stderr)
                times[marked].append(seconds(setting, marked, arguments.rounds))
        print(file=sys.stderr)
        best = {marked: min(found, key=lambda steps: sum(steps.values())) for marked, found in times.items()}
        without = sum(best[0.0].values())
        for marked, steps in best.items():
            row = {step: round(taken, 3) for step, taken in steps.items()}
            row |= {"all": round(sum(steps.values()), 3), "times": round(sum(steps.values()) / without, 3)}
            figures.setdefault(setting, {})[f"{marked:.0%} marked"] = row
    show({"setting": s, "": m} | row for s, rows in figures.items() for m, row in rows.items())
    finish(arguments, figures)


if __name__ == "__main__":
    main()
