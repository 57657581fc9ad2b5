"""How fast the simulated fleet is: against a plain PyTorch loop, against its own worker one by one, against Flower.

speed   100 devices, the CNN of McMahan et al. (two 5 x 5 convolutions, 1.66 million weights), FedAvg on MNIST (or the
        digits MLP: --model mlp), every device takes part. Rivals, in turn in the same run, on the same batches:
          fleet       coordinator.fleet.simulated as it is
          sequential  the same fleet, each worker by itself
          plain       a bare loop: for each device copy the weights, SGD with momentum on as many batches of that size,
                      add the result to a mean; nothing else (no losses before and after, no accuracies, no encoding).
                      One thread of torch and as many as there are processors; the better one counts
        and with training switched off (no steps, no looks at the data): the overhead of a round and of a client, six
        rounds in a row, of which the first two are not counted, as of Flower's.
        Aims: fleet at or below plain; overhead per client a tenth of Flower's. --flower measures Flower in the same
        run, training (in PyTorch, as many clients at once as there are processors) and idle (clients send back what
        they were sent); flower_simulation.py tells how to install it. Without it the figure is that of a quiet machine
        with two cores and 401,776 weights: 0.317 s for a round of 20 idle clients (0.0159 s a client).
scale   `fedge` for 20 rounds with 1,000 devices on digits: aim 10 minutes and 4 GiB (largest resident set). Digits has
        1,797 samples; each device gets 40 that are drawn with replacement from its own Dirichlet shares of the classes,
        so devices share samples: the figures are about time and memory, not about accuracy.
many    `fedge simulate` with 100,000 devices that are made from their number, 60 samples each, 1 % in each of 20
        rounds, 100 measured: time, and the largest memory of all its processes together (PSS, looked at twice a
        second). Aim: 4 GiB.

    python benchmarks/simulate.py speed --data DIR [--flower] [--json FILE]
    python benchmarks/simulate.py speed --model mlp
    python benchmarks/simulate.py scale [--json FILE]
    python benchmarks/simulate.py many [--method fedavg] [--engine ray] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import contextlib
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from plain import Plan
from torch.nn import functional

from coordinator.fleet import order_for
from coordinator.fleet.simulated import SimulatedFleet
from coordinator.methods import MethodSettings, make
from coordinator.simulation.rounds import run
from edge_agent.batched import one_by_one
from edge_agent.worker import Worker
from fedge import models
from fedge.messages import BlobRef, Codec
from fedge.models.training import batches
from fedge.sgd import Sgd
from fedge.steps.train import Start, Train
from fedge.task import TaskSpec
from fedge.tasks import DeviceData, Pool, partition, pool, share_data
from fedge.tensors import unflatten

FLOWER_S_PER_CLIENT = 0.317 / 20
FLOWER_ROUNDS = 6


def workers_of(task: TaskSpec, data: dict[str, DeviceData], home: Path) -> dict[str, Worker]:
    return {i: Worker(i, task, own, home / i) for i, own in data.items()}


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------ speed


class Speed:
    """One federation and the rivals that can do its rounds."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        samples = pool("digits" if args.model == "mlp" else "mnist", args.data, limit=args.samples)
        task = msgspec.structs.replace(samples.spec, model=args.model, model_options={})
        samples = Pool(samples.x, samples.y, task)
        shares = partition(samples, args.devices, how="dirichlet", alpha=10.0, sensitive=0.0, seed=0)
        self.task = task
        self.data = {f"d{i:03}": share_data(task, share) for i, share in enumerate(shares)}
        self.sgd = Sgd(steps=args.steps, batch_size=args.batch)
        self.layout, self.first = models.initial(task, 0)
        self.workers = workers_of(task, self.data, home)
        blind = {
            i: replace(own, x_val=own.x_val[:0], y_val=own.y_val[:0], sensitive_val=None)
            for i, own in self.data.items()
        }
        self.blind = workers_of(task, blind, home)

    def fedavg(self, workers: dict[str, Worker] | None = None, steps: int | None = None, **how: Any) -> float:
        """Seconds of one round of FedAvg."""
        fleet = SimulatedFleet(self.task, self.layout, workers or self.workers, seed=0, **how)
        sgd = msgspec.structs.replace(self.sgd, steps=self.sgd.steps if steps is None else steps)
        method = make("fedavg", MethodSettings(rounds=1, sgd=sgd, codec=Codec.FLOAT32))
        state = method.init(self.layout, fleet.put(unflatten(self.first, self.layout)))
        fleet.round = 1
        start = time.perf_counter()
        asyncio.run(method.round(state, fleet))
        return time.perf_counter() - start

    def sequential(self) -> float:
        with threads(1):
            return self.fedavg(execute=one_by_one)

    def idle(self) -> float:
        """Seconds of a round in which nobody trains or looks at data."""
        return self.fedavg(self.blind, steps=0)

    def plain(self, n_threads: int) -> float:
        """Seconds of a bare loop over the same batches."""
        with threads(n_threads):
            return self._plain()

    def _plain(self) -> float:
        module = models.build(self.task)
        start = time.perf_counter()
        mean = [torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()]
        n_all = sum(own.n_shared for own in self.data.values())
        for i, own in self.data.items():
            action = Train(starts=(Start(model=BlobRef(digest="0" * 64, size_bytes=1)),), sgd=self.sgd)
            rng = np.random.default_rng(
                order_for("simulation", 0, 1, "train", i, self.task.fingerprint(), action, left_s=60).seed
            )
            models.load(module, self.first, self.layout)
            module.train()
            optimiser = torch.optim.SGD(module.parameters(), lr=self.sgd.learning_rate, momentum=self.sgd.momentum)
            x, y = (torch.from_numpy(part) for part in own.shared)
            for batch in islice(batches(len(y), self.sgd.batch_size, rng), self.sgd.steps):
                optimiser.zero_grad()
                functional.cross_entropy(module(x[batch]), y[batch]).backward()
                optimiser.step()
            for total, p in zip(mean, module.parameters(), strict=True):
                total.add_(p.detach(), alpha=len(y) / n_all)
        return time.perf_counter() - start

    def flower(self, flower: ModuleType, *, idle: bool) -> tuple[list[float], list[float]]:
        """Seconds and processor seconds of Flower's rounds; `idle`: its clients send back what they were sent."""
        plan = Plan(
            rounds=FLOWER_ROUNDS,
            steps=self.sgd.steps,
            batch_size=self.sgd.batch_size,
            learning_rate=self.sgd.learning_rate,
            momentum=self.sgd.momentum,
            seed=0,
        )
        first = {name: torch.tensor(array) for name, array in unflatten(self.first, self.layout).items()}
        clients = [own.shared for own in self.data.values()]
        found = flower.fedavg(self.task.model, first, clients, plan, idle=idle)
        return found.seconds, found.processor_seconds


def flower_or_none() -> ModuleType | None:
    try:
        import flower_simulation
    except ImportError:
        return None
    return flower_simulation


def speed_figures(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    speed = Speed(args, home)
    n_processors = len(os.sched_getaffinity(0))
    rivals: dict[str, Callable[[], float]] = {"fleet": speed.fedavg, "sequential": speed.sequential, "idle": speed.idle}
    flower = flower_or_none() if args.flower else None
    for n in sorted({1, n_processors}):
        rivals[f"plain, {n} threads"] = partial(speed.plain, n)
    seconds: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    for repeat in range(args.repeats + 1):
        for name, once in rivals.items():
            in_a_row = FLOWER_ROUNDS if name == "idle" else 1  # and the first two not counted, as Flower's
            for number in range(in_a_row):
                before = time.process_time()
                taken = once()
                if number >= min(2, in_a_row - 1):
                    seconds.setdefault(name, []).append(taken)
                    processor.setdefault(name, []).append(time.process_time() - before)
            print(f"  {name}: {seconds[name][-1]:.2f} s, {processor[name][-1]:.2f} s of processors", flush=True)
        if not repeat:
            seconds, processor = {}, {}  # the first warms up
        elif flower is not None:  # warms up by itself
            for name, idle in (("flower", False), ("flower, idle", True)):
                for kept, new in zip((seconds, processor), speed.flower(flower, idle=idle), strict=True):
                    kept.setdefault(name, []).extend(new)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain = min(taken for name, taken in medians.items() if name.startswith("plain"))
    n = len(speed.data)
    measured = medians.get("flower, idle")
    flower_each = measured / n if measured else FLOWER_S_PER_CLIENT
    return {
        "devices": n,
        "model": args.model,
        "weights": speed.layout.n_params,
        "steps": args.steps,
        "batch_size": args.batch,
        "samples_per_device": round(statistics.mean(own.n_shared for own in speed.data.values())),
        "seconds_per_round": {name: round(taken, 3) for name, taken in medians.items()},
        "processor_seconds_per_round": {name: round(statistics.median(t), 3) for name, t in processor.items()},
        "fleet_to_plain": round(medians["fleet"] / plain, 3),
        "fleet_to_sequential": round(medians["fleet"] / medians["sequential"], 3),
        "fleet_to_flower": round(medians["fleet"] / medians["flower"], 3) if measured else None,
        "overhead_s_per_client": round(medians["idle"] / n, 6),
        "flower_s_per_client": round(flower_each, 6),
        "flower": "measured here" if measured else "not installed; as measured before",
        "flower_to_overhead": round(flower_each * n / medians["idle"], 1),
        "aims": {
            "at or below plain": medians["fleet"] <= plain,
            "a tenth of Flower's overhead": 10 * medians["idle"] / n <= flower_each,
        },
    }


# ------------------------------------------------------------------------------------------------------------ scale


def resampled(n_devices: int, n_each: int = 40, alpha: float = 0.5) -> tuple[TaskSpec, dict[str, DeviceData]]:
    """Digits for any number of devices: samples drawn with replacement."""
    samples = pool("digits")
    rng = np.random.default_rng(0)
    by_class = [np.flatnonzero(samples.y == label) for label in range(10)]
    data = {}
    for i in range(n_devices):
        labels = rng.choice(10, n_each, p=rng.dirichlet(np.full(10, alpha)))
        own = np.array([rng.choice(by_class[label]) for label in labels])
        # groups: a third of the devices hold their camera turned
        (share,) = partition(
            Pool(np.rot90(samples.x[own], i % 3, axes=(1, 2)), samples.y[own], samples.spec),
            1,
            how="dirichlet",
            alpha=1.0,
            sensitive=0.1,
            seed=i,
        )
        data[f"d{i:05}"] = share_data(samples.spec, share)
    return samples.spec, data


def scale_figures(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    task, data = resampled(args.devices)
    layout, first = models.initial(task, 0)
    fleet = SimulatedFleet(task, layout, workers_of(task, data, home), seed=0)
    method = make("fedge", MethodSettings(rounds=args.rounds, participation=args.participation))
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
    state = asyncio.run(run(method, state, fleet, on_round))
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
        "split": bool(method.summary(state)["split"]),
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
    command = [sys.executable, "-m", "fedge.cli", "simulate", *(f"--{name}={value}" for name, value in flags.items())]
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
    speed = kinds.add_parser("speed", parents=[after])
    speed.add_argument("--data", type=Path, help="where MNIST is")
    speed.add_argument("--devices", type=int, default=100)
    speed.add_argument("--model", default="cnn_fedavg")
    speed.add_argument("--samples", type=int, help="of the whole set; default: all")
    speed.add_argument("--steps", type=int, default=42, help="of each device (default 42, about an epoch)")
    speed.add_argument("--batch", type=int, default=10)
    speed.add_argument("--repeats", type=int, default=3)
    speed.add_argument("--flower", action="store_true", help="measure Flower, too, where it is installed")
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
    figures_of = {"speed": speed_figures, "scale": scale_figures, "many": many_figures}[args.kind]
    with tempfile.TemporaryDirectory() as folder:
        figures = figures_of(args, Path(folder))
    figures = {
        "benchmark": f"simulate {args.kind}",
        "machine": platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    } | figures
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
