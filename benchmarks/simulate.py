"""Time and memory of large simulations; `frameworks.py` has the fleet's speed against others.

scale   `fedge` for 20 rounds with 1,000 devices on digits: aim 10 minutes and 4 GiB (largest resident set). Digits has
        1,797 samples; each device gets 40 that are drawn with replacement from its own Dirichlet shares of the classes,
        so devices share samples: the figures are about time and memory, not about accuracy.
many    `fedge simulate` with 100,000 devices that are made from their number, 60 samples each, 1 % in each of 20
        rounds, 100 measured: time, and the largest memory of all its processes together (PSS, looked at twice a
        second). Aim: 4 GiB.

    python benchmarks/simulate.py scale [--json FILE]
    python benchmarks/simulate.py many [--method fedavg] [--engine ray] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from script import finish, machine

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.tasks import DeviceData, Partitioning, Pool, load_pool, make_device_data, partition_pool
from fedge.tensors.layout import unflatten


def workers_of(task: TaskSpec, data: dict[str, DeviceData], home: Path) -> dict[str, Worker]:
    return {i: Worker(i, task, own, home / i) for i, own in data.items()}


# ------------------------------------------------------------------------------------------------------------ scale


def resampled(n_devices: int, n_each: int = 40, alpha: float = 0.5) -> tuple[TaskSpec, dict[str, DeviceData]]:
    """Digits for any number of devices: samples drawn with replacement."""
    samples = load_pool("digits")
    rng = np.random.default_rng(0)
    by_class = [np.flatnonzero(samples.y == label) for label in range(10)]
    data = {}
    for i in range(n_devices):
        labels = rng.choice(10, n_each, p=rng.dirichlet(np.full(10, alpha)))
        own = np.array([rng.choice(by_class[label]) for label in labels])
        # groups: a third of the devices hold their camera turned
        (share,) = partition_pool(
            Pool(np.rot90(samples.x[own], i % 3, axes=(1, 2)), samples.y[own], samples.spec),
            1,
            Partitioning(sensitive=0.1),
            seed=i,
        )
        data[f"d{i:05}"] = make_device_data(samples.spec, share)
    return samples.spec, data


def scale_figures(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    task, data = resampled(args.devices)
    layout, first = build.make_initial_model(task, 0)
    fleet = SimulatedFleet(task, layout, workers_of(task, data, home), seed=0)
    method = make_method("fedge", MethodSettings(rounds=args.rounds, participation=args.participation))
    state = method.init(layout, fleet.put(unflatten(first, layout)))
    ends, cpu = [time.perf_counter()], time.process_time()

    def on_round(state: Any) -> None:
        ends.append(time.perf_counter())
        print(f"  round {state.round}: {ends[-1] - ends[-2]:.1f} s", flush=True)

    steps: dict[str, float] = {}
    real = fleet.run

    async def timed(step: str, actions: Any) -> Any:
        start = time.perf_counter()
        answers = await real(step, actions)
        steps[step] = steps.get(step, 0.0) + time.perf_counter() - start
        return answers

    fleet.run = timed  # type: ignore[method-assign]
    state = asyncio.run(run_rounds(method, state, fleet, on_round))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total = ends[-1] - ends[0]
    return {
        "devices": args.devices,
        "rounds": args.rounds,
        "participation": args.participation,
        "seconds": round(total, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds_of_steps": {step: round(taken, 1) for step, taken in steps.items()},
        "seconds_of_the_coordinator": round(total - sum(steps.values()), 1),
        "peak_gib": round(peak / 2**30, 3),
        "installed": len(state.installed),
        "split": bool(method.summarise(state)["split"]),
        "aims": {"10 minutes": total <= 600, "4 GiB": peak <= 4 * 2**30},
    }


# ------------------------------------------------------------------------------------------------------------- many


def many_figures(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    flags = {
        "method": args.method,
        "devices": args.devices,
        "participation": args.participation,
        "rounds": args.rounds,
        "partition": "generated",
        "min-samples": 60,
        "measured": 100,
        "engine": args.engine,
        "json": home / "run",
    }
    command = [sys.executable, "-m", "fedge", "simulate", *(f"--{name}={value}" for name, value in flags.items())]
    began, peak = time.perf_counter(), 0
    run = psutil.Popen(command)
    while run.poll() is None:
        peak = max(peak, sum(map(pss, [run, *run.children(recursive=True)])))
        time.sleep(0.5)
    outcome = json.loads((home / "run").read_text())
    return {
        **{name: str(value) for name, value in flags.items() if name != "json"},
        "seconds": round(time.perf_counter() - began, 1),
        "seconds_of_measuring": outcome["evaluation_s"],
        "peak_gib": round(peak / 2**30, 3),
        "accuracy": outcome["accuracy"],
        "aims": {"4 GiB": peak <= 4 * 2**30},
    }


def pss(process: psutil.Process) -> int:
    """Bytes of a process, those that several share in equal parts; 0: it has gone."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    after = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)  # the same, behind the kind
    after.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    kinds = parser.add_subparsers(dest="kind", required=True)
    scale = kinds.add_parser("scale", parents=[after])
    scale.add_argument("--devices", type=int, default=1000)
    scale.add_argument("--rounds", type=int, default=20)
    scale.add_argument("--participation", type=float, default=1.0)
    many = kinds.add_parser("many", parents=[after])
    many.add_argument("--devices", type=int, default=100_000)
    many.add_argument("--method", default="fedge")
    many.add_argument("--rounds", type=int, default=20)
    many.add_argument("--participation", type=float, default=0.01)
    many.add_argument("--engine", default="local")
    args = parser.parse_args()
    figures_of = {"scale": scale_figures, "many": many_figures}[args.kind]
    with tempfile.TemporaryDirectory() as folder:
        figures = figures_of(args, Path(folder))
    figures = {"benchmark": f"simulate {args.kind}", **machine(), "torch": torch.__version__} | figures
    print(json.dumps(figures, indent=2))
    finish(args, figures)


if __name__ == "__main__":
    main()
