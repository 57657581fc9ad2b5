"""CFIC's tables: the momentum of the server against the clusters, on digits, MNIST and Fashion-MNIST.

  digits  the setting of cfic.md section 8: 8x8 digits, 40 devices, Dirichlet label skew, perceptron 64-64-10, plain SGD
          with batches of 16, 5 epochs, a quarter of the devices in each of 60 rounds. Difference: a device keeps 40 %
          of its 36 images for testing and validation, so it trains on about 22; each has at least 5
  images  the paper's setting, smaller: 100 devices, 30 % of them in a round, two 5x5 convolutions, but with 8 and 16
          channels, 6,000 images mean-pooled to 14x14, 20 rounds of 10 steps with batches of 32 and learning rate 0.05.
          "CIFAR-10" has images of 3x8x8 (JPEG). --full is the paper's size: all images as they are, 32 and 64
          channels, batch 64, learning rate 0.01, 100 rounds of 5 epochs; some days on two cores, of which we ran one
          round.
          The specification has no figures of the paper's for it, only its order of the methods.

Accuracy is that of the one global model on a global test set (a fifth of all samples): mean of the last five rounds,
± over seeds; [rounds until the target, mean over the seeds that reach it]. In brackets the specification's. The server
momentum of its last row, 0.9 with step 0.2, moves twice as far in the long run as no momentum; so does FedAvgM with
0.5, whose row therefore has the figures.

Runs that are done are kept in --out; the same command goes on where it was.

Examples:
    python benchmarks/papers/cfic.py --quick
    python benchmarks/papers/cfic.py --seeds 0,1,2,3,4 --json cfic.json
    python benchmarks/papers/cfic.py --table images --data DIR --settings "MNIST, 0.05"
    python benchmarks/papers/cfic.py --settings "skew 0.1, lr 0.1" --rows "FedAvg; FedProx 0.01"
    python benchmarks/papers/cfic.py --rows "FedProx 0.01; SCAFFOLD; MOON; FedDyn; FedAdam; FedYogi"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from table import (
    WHOLE,
    Runs,
    add_rows,
    beyond,
    chosen,
    chosen_rows,
    claim,
    measure,
    over_seeds,
    parser_of,
    show,
    write,
)
from torch import nn

from coordinator.aggregation.correction import Vector, compute_mean_direction
from coordinator.methods.papers.cfic import Cfic
from coordinator.simulation.reports.outcome import RunOutcome
from fedge.data.task import TaskSpec
from fedge.tensors.layout import Layout

LAST = 5  # rounds that the final accuracy is the mean of
NOISE = 0.01  # differences below it mean nothing (section 8)
HERE = "benchmarks.papers.cfic"
METHODS = {
    "FedAvg": "fedavg",
    "FedProx 0.01": "fedprox",
    "cluster sampling only": "cfic:correction=false",
    "CFIC 0.9 / 0.2": "cfic",
    "CFIC 0.9 / 0.5": "cfic:beta=0.5",
    "CFIC per tensor 0.9 / 0.2": f"{HERE}:PerTensor",
    "CFIC relative 0.9 / 0.2": f"{HERE}:Relative:beta=0.2",
    "CFIC relative 0.9 / 0.5": f"{HERE}:Relative:beta=0.5",
    "CFIC relative 0.9 / 0.2, no cluster sampling": f"{HERE}:Relative:beta=0.2:selection=uniform",
    "FedAvg + server momentum 0.5": "fedavgm:gamma=0.5",
    "FedAvg + server momentum 0.9": "fedavgm:gamma=0.9",
    "SCAFFOLD": "scaffold",
    "MOON": "moon",
    "FedDyn": "feddyn",
    "FedAdam": "fedadam",
    "FedYogi": "fedyogi",
}
DIGITS = {
    "set": "digits", "model": "networks:mlp64", "devices": 40, "participation": 0.25, "rounds": 60, "local_epochs": 5,
    "min_samples": 5, "batch_size": 16, "momentum": 0.0, "global_test": 0.2, "server_data": 0.0, "evaluate_every": 1,
}  # fmt: skip
IMAGES = {
    "model": "cfic:narrow", "devices": 100, "participation": 0.3, "rounds": 20, "local_steps": 10, "batch_size": 32,
    "learning_rate": 0.05, "momentum": 0.0, "samples": 6000, "global_test": 0.2, "server_data": 0.0,
    "evaluate_every": 1,
}  # fmt: skip
FULL = {
    "model": "cnn_fedavg",
    "samples": None,
    "rounds": 100,
    "local_epochs": 5,
    "batch_size": 64,
    "learning_rate": 0.01,
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {
        "skew 0.1, lr 0.1": DIGITS | {"alpha": 0.1, "learning_rate": 0.1},
        "skew 0.1, lr 0.02": DIGITS | {"alpha": 0.1, "learning_rate": 0.02},
        "skew 0.5, lr 0.1": DIGITS | {"alpha": 0.5, "learning_rate": 0.1},
        "skew 0.05, lr 0.1": DIGITS | {"alpha": 0.05, "learning_rate": 0.1},
    },
    "images": {
        f"{title}, {alpha:g}": IMAGES | {"set": name, "alpha": alpha}
        for title, name in (("MNIST", "mnist"), ("Fashion", "fashion-mnist"), ("CIFAR-10", "cifar10"))
        for alpha in (0.05, 0.1, 0.5)
    },
}
RIVALS = ("SCAFFOLD", "MOON", "FedDyn", "FedAdam", "FedYogi")
IN_IMAGES = (
    *("FedAvg", "FedProx 0.01", "cluster sampling only", "CFIC 0.9 / 0.2", "FedAvg + server momentum 0.5"),
    *RIVALS,
)
TARGETS = {"digits": 0.9, "MNIST": 0.8, "Fashion": 0.65, "CIFAR-10": 0.25}
SPEC: dict[str, tuple[float | None, ...]] = {
    "FedAvg": (0.919, 0.848, 0.954, 0.889),
    "cluster sampling only": (0.925, 0.862, 0.950, 0.891),
    "CFIC 0.9 / 0.2": (0.947, 0.936, 0.961, 0.915),
    "CFIC 0.9 / 0.5": (0.952, 0.940, 0.960, 0.923),
    "CFIC per tensor 0.9 / 0.2": (0.948, 0.931, 0.962, 0.912),
    "CFIC relative 0.9 / 0.2": (0.945, 0.924, 0.956, 0.916),
    "CFIC relative 0.9 / 0.5": (0.950, 0.939, 0.958, 0.924),
    "CFIC relative 0.9 / 0.2, no cluster sampling": (None, None, 0.961, 0.928),
    "FedAvg + server momentum 0.5": (0.947, 0.915, 0.961, 0.931),
}


class PerTensor(Cfic):
    """A norm of each tensor instead of one of the whole vector."""

    def compute_direction(self, changes: Sequence[Vector], sizes: Sequence[float], layout: Layout) -> Vector:
        ends = np.cumsum([info.size for info in layout.select_kind("param")])[:-1]
        parts = zip(*(np.split(change, ends) for change in changes), strict=True)
        return np.concatenate([compute_mean_direction(part, sizes) for part in parts])


class Relative(Cfic):
    """The correction's length is beta times the mean length of the clusters' changes."""

    def compute_direction(self, changes: Sequence[Vector], sizes: Sequence[float], layout: Layout) -> Vector:
        n = sum(sizes)
        length = sum(size / n * float(np.linalg.norm(change)) for change, size in zip(changes, sizes, strict=True))
        return super().compute_direction(changes, sizes, layout) * length


def narrow(task: TaskSpec) -> nn.Module:
    """The paper's network with a quarter of the channels: two 5x5 convolutions with 8 and 16, 64 hidden units."""
    channels, height, width = task.input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, task.n_classes),
    )


def curve(run: RunOutcome) -> list[float]:
    """Global accuracy after 0, 1, 2, ... rounds."""
    return [point.global_accuracy or 0.0 for point in run.curve[:-1]]  # the last point is the bundles


def final(run: RunOutcome) -> float:
    return float(np.mean(curve(run)[-LAST:]))


def rounds_to(run: RunOutcome, target: float) -> int | None:
    return next((k for k, accuracy in enumerate(curve(run)) if accuracy >= target), None)


def cell(runs: list[RunOutcome], target: float, spec: float | None) -> str:
    accuracy = over_seeds(runs, final)
    reached = [r for r in (rounds_to(run, target) for run in runs) if r is not None]
    rounds = f"{np.mean(reached):.0f}" if reached else "never"
    some = "" if len(reached) in (0, len(runs)) else f", {len(reached)}/{len(runs)}"
    return f"{accuracy.mean():.3f} ± {accuracy.std():.3f} [{rounds}{some}] ({'-' if spec is None else f'{spec:.3f}'})"


def differences(found: dict[str, Runs], one: str, other: str) -> np.ndarray:
    """Mean over the seeds of (one - other), for each column."""
    return np.array(
        [(over_seeds(r[METHODS[one]], final) - over_seeds(r[METHODS[other]], final)).mean() for r in found.values()]
    )


def listed(values: np.ndarray) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def judge(found: dict[str, Runs]) -> list[dict[str, Any]]:
    """The claims of section 8, and the paper's that the clusters help."""
    gain = differences(found, "CFIC 0.9 / 0.2", "FedAvg")
    sampling = differences(found, "cluster sampling only", "FedAvg")
    momentum = differences(found, "FedAvg + server momentum 0.5", "CFIC 0.9 / 0.2")
    return [
        claim("CFIC is better than FedAvg in every column (by more than 0.01)", beyond(gain, NOISE), listed(gain)),
        claim(
            "paper: the clusters of the sampling alone help (mean over the columns, by more than 0.01)",
            beyond([sampling.mean()], NOISE),
            listed(sampling),
        ),
        claim(
            "specification: momentum without any cluster is as good as CFIC within 0.01, on average over the columns",
            bool(momentum.mean() > -NOISE),
            listed(momentum),
        ),
    ]


def main() -> None:
    parser = parser_of(__doc__, "cfic")
    parser.add_argument("--table", choices=list(SETTINGS), default="digits")
    parser.add_argument("--full", action="store_true", help="images: the paper's size")
    add_rows(parser)
    arguments = parser.parse_args()
    if arguments.full and arguments.table != "images":
        parser.error("--full is for --table images")
    settings = SETTINGS[arguments.table]
    names = chosen(settings, arguments)
    rows = chosen_rows(METHODS if arguments.table == "digits" else IN_IMAGES, arguments)
    full = FULL if arguments.full else {}
    found, targets = {}, {}
    for name in names:
        targets[name] = TARGETS["digits" if arguments.table == "digits" else name.split(",")[0]]
        size = full | {"set": WHOLE[settings[name]["set"]]} if full else {}
        found[name] = measure(name, [METHODS[row] for row in rows], settings[name] | size, arguments)
    spec = {
        (row, name): SPEC[row][list(settings).index(name)] if arguments.table == "digits" and row in SPEC else None
        for row in rows
        for name in names
    }
    show(
        "Global accuracy, mean of the last 5 rounds ± over seeds [rounds to "
        f"{', '.join(f'{t:g}' for t in dict.fromkeys(targets.values()))}] (specification)",
        names,
        {row: [cell(found[n][METHODS[row]], targets[n], spec[row, n]) for n in names] for row in rows},
    )
    claims = [] if arguments.rows else judge(found)
    figures = [
        {
            "setting": name,
            "method": row,
            "accuracy": over_seeds(found[name][METHODS[row]], final).tolist(),
            "target": targets[name],
            "rounds": [rounds_to(run, targets[name]) for run in found[name][METHODS[row]]],
            "spec": spec[row, name],
        }
        for name in names
        for row in rows
    ]
    write(arguments, figures, claims)


if __name__ == "__main__":
    main()
