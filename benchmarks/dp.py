"""Accuracy against epsilon: methods with differential privacy for each sample, by default fedavg+ft on three tasks.

    python benchmarks/dp.py DATA --json dp.json
    python benchmarks/dp.py --tasks digits turned --methods fedavg+ft fedge --epsilons inf 8 2

DATA holds mnist/ and uci-har/; digits need none, also where the cameras of half of the devices are turned. Told are,
as means over the seeds, the accuracy of the global model on samples of all devices, and the mean accuracy of the
devices' bundles, the global model fine-tuned on their own samples, on their own unseen ones, each with its standard
error. What a method makes of its models on the device is not noisy, since it stays there. Takes some three minutes of
one core a seed for fedavg+ft.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from script import finish, markdown, parser_of

import fedge

TASKS: Final[Mapping[str, dict[str, Any]]] = {
    "digits": {"devices": 10},
    "turned": {"task": "digits", "devices": 10, "partition": "groups", "n_groups": 2},
    "mnist": {"devices": 10, "samples": 10_000, "model": "mlp"},
    "uci-har": {"devices": 10},
}
EPSILONS: Final = (math.inf, 8.0, 4.0, 2.0, 1.0)
LEARNING: Final = {"average": "mean", "local_steps": 10, "batch_size": 64, "learning_rate": 0.05, "dp_clip": 1.0}


def measured(
    method: str, task: str, epsilon: float | None, seed: int, rounds: int, data: Path | None
) -> tuple[float, float]:
    """Accuracy of the global model and of the devices' bundles."""
    own = {"task": task} | TASKS[task]
    settings = LEARNING | own | ({} if own["task"] == "digits" or data is None else {"data": data / task})
    if epsilon is None:
        settings = {name: value for name, value in settings.items() if name != "dp_clip"}
    done = fedge.simulate(method=method, rounds=rounds, seed=seed, dp_epsilon=epsilon, progress=None, **settings)
    assert done.global_accuracy is not None
    return done.global_accuracy, done.accuracy


def spread(values: list[float]) -> str:
    """Mean and standard error of shares, in percent."""
    error = f" ± {100 * np.std(values, ddof=1) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{error}"


def table(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, list[float]]]]]) -> str:
    """The figures of each seed as Markdown: a row for each method and epsilon, global / own for each task."""
    tasks = list(found)
    rows = [
        [
            method,
            epsilon,
            *(" / ".join(spread(found[t][method][epsilon][which]) for which in ("global", "own")) for t in tasks),
        ]
        for method, epsilons in found[tasks[0]].items()
        for epsilon in epsilons
    ]
    return markdown(["method", "epsilon", *tasks], rows)


def main() -> None:
    """Run all tasks and methods at all epsilons."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, nargs="?", help="folder with mnist/ and uci-har/")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["digits", "mnist", "uci-har"])
    parser.add_argument("--methods", nargs="+", default=["fedavg+ft"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    for task, method, epsilon in product(given.tasks, given.methods, given.epsilons):
        noise = None if math.isinf(epsilon) else epsilon
        runs = [measured(method, task, noise, seed, given.rounds, given.data) for seed in given.seeds]
        figures = {"global": [shared for shared, _ in runs], "own": [own for _, own in runs]}
        found.setdefault(task, {}).setdefault(method, {})[f"{epsilon:g}"] = figures
        print(task, method, epsilon, figures, file=sys.stderr, flush=True)
    print(table(found))
    finish(given, {"seeds": given.seeds, "rounds": given.rounds, "tasks": found})


if __name__ == "__main__":
    main()
