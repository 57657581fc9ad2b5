"""FedCoE's warm start: newcomers that train begin with their assembled model (Eq. 13), or with the mean of the experts.

The setting of `fedcoe.py` with MNIST, and the repaired form. The three clients that it holds out join in round 41. They
train on four fifths of their samples, and are scored on the other fifth by the models that they have after Eq. 11 in
their first, second and fifth round. In the second row they withhold their shares, so they begin with the mean.

A cell is the mean over newcomers and seeds, in per cent, and the worst newcomer.

    python benchmarks/papers/fedcoe_newcomers.py --data DIR --quick
    python benchmarks/papers/fedcoe_newcomers.py --data DIR --alphas 0.1 --seeds 0,1,2,3,4
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import argparse
import asyncio
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fedcoe import MNIST, Fleet, Trial
from table import finish, plain_parser, say, show

from coordinator.methods.papers.fedcoe import FedCoEState
from coordinator.simulation.rounds import run_rounds
from fedge.privacy.egress import ALL, Rules
from fedge.steps.contract import Reveals
from fedge.system.hardware import Processor

ROUNDS = 40  # before they join
SCORED = (1, 2, 5)  # rounds of theirs
STARTS = {"assembled model": ALL, "mean of the experts": Rules(ALL.allowed - {Reveals.WEIGHT})}
"""What the newcomers' owners let out, by the model that they begin with."""


@dataclass(frozen=True)
class Newcomers:
    """Newcomers that join a federation after `rounds` rounds."""

    trial: Trial
    rounds: int

    async def follow(self, rules: Rules) -> dict[int, list[float]]:
        """Accuracy of each newcomer, by the number of its rounds so far."""
        trial, workers, held = self.trial, self.trial.make_workers(), {}
        for k, (x, y) in enumerate(trial.split.new):
            apart = len(y) // 5
            held[f"n{k}"] = x[:apart], y[:apart]
            workers[f"n{k}"] = trial.make_worker(f"n{k}", (x[apart:], y[apart:]))
        fleet = Fleet(
            trial.task, trial.layout, workers, seed=trial.seed,
            arrives=dict.fromkeys(held, self.rounds + 1), rules=dict.fromkeys(held, rules),
        )  # fmt: skip
        method, state = trial.begin(MNIST.method(""), trial.first, {}, fleet)
        found = {}

        def score(state: FedCoEState) -> None:
            if (own := state.round - self.rounds) in SCORED:
                models = {i: fleet.get(state.clients[i], trial.layout) for i in held}
                found[own] = [trial.accuracy(models[i], samples) for i, samples in held.items()]

        await run_rounds(method, state, fleet, score, rounds=trial.rounds)
        return found


def measure(data: Path, alpha: float, seed: int, rounds: int) -> dict[str, dict[int, list[float]]]:
    """The figures of one seed, by start."""
    found = {}
    for start, rules in STARTS.items():
        with tempfile.TemporaryDirectory() as home:
            trial = Trial(MNIST, data, alpha, seed, rounds + max(SCORED), Path(home), Processor.CPU)
            found[start] = asyncio.run(Newcomers(trial, rounds).follow(rules))
    return found


def cell(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ({100 * min(values):.0f})"


def parse() -> argparse.Namespace:
    parser = plain_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--alphas", default="0.1,0.5")
    parser.add_argument("--quick", action="store_true", help="one seed, three rounds before they join, alpha 0.1")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    seeds = [0] if flags.quick else [int(seed) for seed in flags.seeds.split(",")]
    alphas = [0.1] if flags.quick else [float(alpha) for alpha in flags.alphas.split(",")]
    torch.set_num_threads(1)
    logging.getLogger("fedge.method").setLevel(logging.ERROR)
    tables = {}
    for alpha in alphas:
        runs = []
        for seed in seeds:
            runs.append(measure(flags.data, alpha, seed, 3 if flags.quick else ROUNDS))
            say(f"alpha {alpha:g}, seed {seed}: {runs[-1]}")
        show(
            f"alpha {alpha:g}: accuracy of the newcomers (the worst)",
            [f"after {r} of their rounds" for r in SCORED],
            {start: [cell([a for run in runs for a in run[start][r]]) for r in SCORED] for start in STARTS},
        )
        tables[f"{alpha:g}"] = runs
    finish(flags, {"seeds": seeds, "starts": list(STARTS), "tables": tables})


if __name__ == "__main__":
    main()
