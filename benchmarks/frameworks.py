"""How fast simulated rounds are: fedge's fleet, a plain PyTorch loop, Flower's simulation and Apple's pfl-research.

Same work for all, in turn in one run: FedAvg in which every client takes part and makes one pass over its samples, with
equal networks, batches and optimiser. Training, and idle: nobody trains, so that only the overhead of a round is left.
A rival runs in an environment of its own, which is made in --environments where it is missing (minutes, once); without
network, leave rivals out with --rivals plain.

  small   2,410 weights (perceptron), 60 samples of 8 x 8 per client, batches of 10
  large   1,663,370 weights (the CNN of McMahan et al.), 20 samples of 28 x 28 per client, batches of 10

Seconds are medians over the rounds after the first (Flower: the first two, which start its processes). plain is the
faster one of one thread and as many as there are processors.

    python benchmarks/frameworks.py [--sizes small:100,small:1000,large:100] [--rounds 4] [--environments DIR]
        [--kinds training,idle] [--rivals plain,pfl,flower] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from plain import NETWORKS, Plan, Samples, client_update
from script import finish, machine, parser_of, peak_mb, say, several

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.models import build
from fedge.steps.sgd import Sgd
from fedge.tasks import DeviceData, load_task
from fedge.tensors.layout import Codec, unflatten

SHAPES: Final = {"small": ("digits", "mlp", (1, 8, 8), 60), "large": ("mnist", "cnn_fedavg", (1, 28, 28), 20)}
"""Task, network, input, samples of a client."""
BATCH: Final = 10
RIVALS: Final = {
    "pfl": ("pfl_simulation.py", ("pfl==0.6.0",)),
    "flower": ("flower_simulation.py", ("flwr[simulation]==1.41.0",)),
}
"""Their scripts and packages; torch is of our version."""
Seconds = dict[str, list[float]]
"""Of rounds, "training" and "idle"."""


class Work:
    """Clients, first model and plan of one size."""

    def __init__(self, size: str, n_clients: int, rounds: int, kinds: list[str]) -> None:
        self.kinds = kinds
        task, self.model, shape, self.n_samples = SHAPES[size]
        rng = np.random.default_rng(0)
        self.x = rng.random((n_clients, self.n_samples, *shape), np.float32)
        self.y = rng.integers(10, size=(n_clients, self.n_samples))
        self.task = msgspec.structs.replace(load_task(task), model=self.model, model_options={})
        self.plan = Plan(rounds, self.n_samples // BATCH, BATCH, learning_rate=0.05, momentum=0.9, seed=0)
        self.n_threads = len(os.sched_getaffinity(0))

    @property
    def clients(self) -> list[Samples]:
        return list(zip(self.x, self.y, strict=True))

    def fedge(self, home: Path) -> Seconds:
        """The simulated fleet; devices have no validation samples, as the rivals' clients have none."""
        none = np.zeros(0, np.int64)
        unmarked = np.zeros(self.n_samples, np.bool_)
        workers = {
            f"d{k:05}": Worker(f"d{k:05}", self.task, DeviceData(x, y, unmarked, x[:0], none), home / f"d{k:05}")
            for k, (x, y) in enumerate(self.clients)
        }
        layout, first = build.make_initial_model(self.task, 0)

        def rounds_of(steps: int) -> list[float]:
            fleet = SimulatedFleet(self.task, layout, workers, seed=0)
            sgd = Sgd(steps=steps, batch_size=BATCH)
            method = make_method(
                "fedavg", MethodSettings(rounds=self.plan.rounds, sgd=sgd, codec=Codec.FLOAT32, down="float32")
            )
            state = method.init(layout, fleet.put(unflatten(first, layout)))
            ends: list[float] = []
            asyncio.run(run_rounds(method, state, fleet, lambda _: ends.append(time.perf_counter()), self.plan.rounds))
            return [float(s) for s in np.diff(ends)]

        return {name: rounds_of({"training": self.plan.steps, "idle": 0}[name]) for name in self.kinds}

    def plain(self, home: Path) -> Seconds:
        """For each client copy the weights, train, add the result to a mean; nothing else."""
        del home
        with_threads = [self._plain(n) for n in sorted({1, self.n_threads})]
        return {name: min((each[name] for each in with_threads), key=statistics.median) for name in with_threads[0]}

    def _plain(self, n_threads: int) -> Seconds:
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        module = NETWORKS[self.model](self.x.shape[2:], 10)
        w = {name: tensor.clone() for name, tensor in module.state_dict().items()}

        def round_of(number: int, *, idle: bool) -> float:
            began = time.perf_counter()
            mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in w.items()}
            for k, samples in enumerate(self.clients):
                module.load_state_dict(w)
                if not idle:
                    client_update(module, samples, self.plan, number, k)
                for name, tensor in module.state_dict().items():
                    mean[name].add_(tensor, alpha=1 / len(self.x))
            return time.perf_counter() - began

        found = {
            name: [round_of(number, idle=name == "idle") for number in range(self.plan.rounds)][1:]
            for name in self.kinds
        }
        torch.set_num_threads(before)
        return found

    def rival(self, name: str, environments: Path, home: Path) -> Seconds:
        """In its own process and environment."""
        script, _ = RIVALS[name]
        asked = {"model": self.model, "plan": asdict(self.plan), "threads": self.n_threads, "kinds": self.kinds}
        (home / "asked.json").write_text(json.dumps(asked))
        np.savez(home / "clients.npz", x=self.x, y=self.y)
        command = [environments / name / "bin" / "python", Path(__file__).parent / script, home]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script}: {done.stderr[-2000:]}")
        found: Seconds = json.loads((home / "found.json").read_text())
        return found


def make_environment(folder: Path, packages: tuple[str, ...]) -> None:
    """An environment with these packages and torch; what is there stays."""
    if (folder / "complete").exists():
        return
    venv.create(folder, with_pip=True)
    pinned = f"torch=={torch.__version__.partition('+')[0]}"
    subprocess.run([folder / "bin" / "pip", "install", "-q", pinned, "numpy", *packages], check=True, stdout=sys.stderr)
    (folder / "complete").touch()


def figures_of(size: str, args: argparse.Namespace) -> dict[str, Any]:
    kind, n = size.split(":")
    work = Work(kind, int(n), args.rounds, args.kinds)
    of: dict[str, Callable[[Path], Seconds]] = {"fedge": work.fedge, "plain": work.plain}
    for name in RIVALS:
        of[name] = partial(work.rival, name, args.environments)
    medians: dict[str, dict[str, float]] = {}
    for name in ("fedge", *args.rivals):
        with tempfile.TemporaryDirectory() as home:
            medians[name] = {what: statistics.median(found) for what, found in of[name](Path(home)).items()}
        say(f"  {size} {name}: {medians[name]}")
        if name == "fedge":
            own_peak = peak_mb(os.getpid())
    fastest = {what: min(medians, key=lambda name: medians[name][what]) for what in args.kinds}
    return {
        "fedge_peak_mb": own_peak,
        "seconds_per_round": {name: {what: round(s, 4) for what, s in own.items()} for name, own in medians.items()},
        "ms_per_client": {
            name: {what: round(1000 * s / int(n), 4) for what, s in own.items()} for name, own in medians.items()
        },
        "aims": {f"nobody is faster, {what}": name == "fedge" for what, name in fastest.items()},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=several(), default=["small:100", "small:1000", "large:100"])
    parser.add_argument("--rounds", type=int, default=4, help="of each, the first not counted (at least 4 for Flower)")
    parser.add_argument("--kinds", type=several(), default=["training", "idle"])
    parser.add_argument("--rivals", type=several(), default=["plain", *RIVALS])
    parser.add_argument("--environments", type=Path, default=Path("build/frameworks"), metavar="DIR")
    args = parser.parse_args()
    for name in args.rivals:
        if name in RIVALS:
            make_environment(args.environments.absolute() / name, RIVALS[name][1])
    figures = {"benchmark": "frameworks", **machine(), "torch": torch.__version__, "rounds": args.rounds}
    figures |= {size: figures_of(size, args) for size in args.sizes}
    print(json.dumps(figures, indent=2))
    finish(args, figures)


if __name__ == "__main__":
    main()
