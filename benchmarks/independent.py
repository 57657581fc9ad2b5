"""FedAvg and FedPer of fedge against independent implementations of the same setting.

  FedAvg  Flower 1.41's strategy and simulation engine (`flower_simulation`, which tells how to install it), and a loop
          in plain PyTorch
  FedPer  a loop in plain PyTorch, from the paper's pseudocode (`plain`)

Equal: partition, first model, batch size, steps, learning rate, momentum, every device in every round, updates in
float32. Not equal: the order in which a device's samples are drawn. Ours is `fedge simulate` as it is, measured on the
bundles that the devices installed; the rivals' weights are measured by PyTorch. Columns, in per cent: accuracy on the
global test set (FedPer has no global model) and, as a mean over devices, on each device's own test samples.

Aim: within 1 point, as a mean over the seeds. With --batch 1000 every step is on all samples of a device, so nothing
random is left: the figures must be the same.

    python benchmarks/independent.py [--json FILE]
    python benchmarks/independent.py --batch 1000
    python benchmarks/independent.py --task mnist --data DIR --samples 10000 --model cnn
"""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from plain import NETWORKS, Plan, Samples, Weights, accuracy, fedavg, fedper
from script import finish, parser_of, several, show
from torch import nn

from coordinator.simulation.federation import Federation, partition_samples
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from fedge.data import preprocessing
from fedge.tasks import make_device_data
from fedge.tensors.layout import Codec, unflatten

POINT = 1.0
WITHOUT_FLOWER = "Flower is not installed here; benchmarks/flower_simulation.py tells how. The other rivals run."


@dataclass(frozen=True, slots=True)
class Accuracies:
    """In per cent; `overall` on the global test set, None without a global model; `own` of each device."""

    overall: float | None
    own: list[float]


class Seed:
    """One partition and first model, and who learns from them."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.federation: Federation = partition_samples(scenario, seed)
        task = self.federation.task
        self.model = task.model
        self.module: nn.Module = NETWORKS[self.model](task.input_shape, task.n_classes)
        first = unflatten(self.federation.first, self.federation.layout)
        self.first: Weights = {name: torch.tensor(first[name]) for name in self.module.state_dict()}
        shares = self.federation.shares.values()
        self.clients: list[Samples] = [make_device_data(task, share).shared for share in shares]
        self.tests: list[Samples] = [(preprocessing.preprocess(task, share.x_test), share.y_test) for share in shares]
        self.plan = Plan(
            rounds=scenario.rounds,
            steps=scenario.local_steps,
            batch_size=scenario.batch_size,
            learning_rate=scenario.learning_rate,
            momentum=scenario.momentum,
            seed=seed,
        )

    def ours(self, method: str) -> Accuracies:
        with tempfile.TemporaryDirectory() as home:
            done = simulate(self.scenario, method, {}, self.seed, Path(home), lambda _: None, method)
        if done.bundles != len(self.clients) or done.global_accuracy is None:
            raise RuntimeError(f"{method}: only {done.bundles} devices installed a bundle")
        own = [100 * device.score.accuracy for device in done.devices]
        return Accuracies(100 * done.global_accuracy if method == "fedavg" else None, own)

    def flower_fedavg(self, flower: ModuleType) -> Accuracies:
        return self._of_one(flower.fedavg(self.model, self.first, self.clients, self.plan).weights)

    def plain_fedavg(self) -> Accuracies:
        return self._of_one(fedavg(self.module, self.first, self.clients, self.plan))

    def plain_fedper(self) -> Accuracies:
        return Accuracies(None, self._own(fedper(self.module, self.first, self.clients, self.plan)))

    def _of_one(self, weights: Weights) -> Accuracies:
        if self.federation.global_test is None:
            raise RuntimeError("there is no global test set")
        overall = 100 * accuracy(self.module, weights, self.federation.global_test)
        return Accuracies(overall, self._own([weights] * len(self.clients)))

    def _own(self, weights: list[Weights]) -> list[float]:
        return [100 * accuracy(self.module, w, test) for w, test in zip(weights, self.tests, strict=True)]


def flower_or_none() -> ModuleType | None:
    try:
        import flower_simulation
    except ImportError:
        print(WITHOUT_FLOWER, file=sys.stderr)
        return None
    return flower_simulation


def compare(scenario: Scenario, seeds: list[int]) -> dict[str, Any]:
    """Accuracies of each pair and seed, and the mean difference over the seeds (ours - rival)."""
    flower = flower_or_none()
    found: dict[str, list[dict[str, Any]]] = {}
    for number in seeds:
        seed = Seed(scenario, number)
        ours = {method: seed.ours(method) for method in ("fedavg", "fedper")}
        rivals = {"fedavg, plain PyTorch": seed.plain_fedavg(), "fedper, plain PyTorch": seed.plain_fedper()}
        if flower is not None:
            rivals = {"fedavg, Flower 1.41": seed.flower_fedavg(flower)} | rivals
        for name, rival in rivals.items():
            found.setdefault(name, []).append(row(number, ours[name.split(",")[0]], rival))
    return {name: {"seeds": lines, "mean": mean_of(lines)} for name, lines in found.items()}


def row(seed: int, ours: Accuracies, rival: Accuracies) -> dict[str, Any]:
    line: dict[str, Any] = {"seed": seed}
    if ours.overall is not None and rival.overall is not None:
        line["global"] = [ours.overall, rival.overall]
    line["own"] = [float(np.mean(ours.own)), float(np.mean(rival.own))]
    return line


def mean_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean accuracies and differences."""
    kinds = [kind for kind in ("global", "own") if kind in lines[0]]
    line = {kind: np.mean([one[kind] for one in lines], axis=0).tolist() for kind in kinds}
    differences = {kind: line[kind][0] - line[kind][1] for kind in kinds}
    return line | {"differences": differences, "within a point": all(abs(d) <= POINT for d in differences.values())}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--samples", type=int, help="of the whole set; default: all")
    parser.add_argument("--model", choices=NETWORKS, help="default: the task's")
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet partition (default 0.5)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="samples per step (default 32)")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2])
    parser.add_argument("--codec", choices=[codec.value for codec in Codec], default="float32", help="of our updates")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedge").setLevel(logging.ERROR)
    scenario = Scenario(
        task=args.task,
        data=args.data,
        samples=args.samples,
        model=args.model,
        devices=args.devices,
        alpha=args.alpha,
        rounds=args.rounds,
        batch_size=args.batch,
        codec=Codec(args.codec),
        hardware="none",
        global_test=0.2,
        server_data=0.0,
    )
    figures = compare(scenario, args.seeds)
    show(
        {"": name} | line
        for name, rows in figures.items()
        for line in (*rows["seeds"], {"seed": "mean"} | rows["mean"])
    )
    finish(args, {"scenario": msgspec.to_builtins(scenario, enc_hook=str), "results": figures})


if __name__ == "__main__":
    main()
