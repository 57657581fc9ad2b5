"""Accuracy against epsilon: fedavg+ft with differential privacy for each sample, on three tasks.

    python benchmarks/dp.py DATA --json dp.json

DATA holds mnist/ and uci-har/; digits need none. Told are, as means over the seeds, the accuracy of the global model on
samples of all devices, and the mean accuracy of the devices' bundles, the global model fine-tuned on their own samples,
on their own unseen ones. Fine-tuning is not noisy: its model stays on the device. Takes
some three minutes of one core a seed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from script import finish, markdown, parser_of

import fedge

TASKS: Final[Mapping[str, dict[str, Any]]] = {
    "digits": {"devices": 10},
    "mnist": {"devices": 10, "samples": 10_000, "model": "mlp"},
    "uci-har": {"devices": 10},
}
EPSILONS: Final = (None, 8.0, 4.0, 2.0, 1.0)
LEARNING: Final = {"average": "mean", "local_steps": 10, "batch_size": 64, "learning_rate": 0.05, "dp_clip": 1.0}


def measured(task: str, epsilon: float | None, seed: int, rounds: int, data: Path | None) -> tuple[float, float]:
    """Accuracy of the global model and of the devices' bundles."""
    settings = LEARNING | TASKS[task] | ({} if task == "digits" or data is None else {"data": data / task})
    if epsilon is None:
        settings = {name: value for name, value in settings.items() if name != "dp_clip"}
    done = fedge.simulate(
        task=task, method="fedavg+ft", rounds=rounds, seed=seed, dp_epsilon=epsilon, progress=None, **settings
    )
    assert done.global_accuracy is not None
    return done.global_accuracy, done.accuracy


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The figures as Markdown: a row for each epsilon, global / own for each task."""
    tasks = list(found)
    rows = [
        [epsilon, *(f"{found[task][epsilon]['global']:.1%} / {found[task][epsilon]['own']:.1%}" for task in tasks)]
        for epsilon in found[tasks[0]]
    ]
    return markdown(["epsilon", *tasks], rows)


def main() -> None:
    """Run all tasks at all epsilons."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, nargs="?", help="folder with mnist/ and uci-har/")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task in given.tasks:
        found[task] = {}
        for epsilon in EPSILONS:
            runs = [measured(task, epsilon, seed, given.rounds, given.data) for seed in given.seeds]
            shared, own = np.mean(runs, axis=0)
            found[task]["inf" if epsilon is None else f"{epsilon:g}"] = {"global": float(shared), "own": float(own)}
            print(task, epsilon, found[task]["inf" if epsilon is None else f"{epsilon:g}"], file=sys.stderr, flush=True)
    print(table(found))
    finish(given, {"seeds": given.seeds, "rounds": given.rounds, "tasks": found})


if __name__ == "__main__":
    main()
