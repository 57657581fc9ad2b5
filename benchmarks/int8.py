"""What 8 bits bring on this machine, for every built-in network: `fedge export --int8` asks the same of one bundle.

    python benchmarks/int8.py [--networks cnn,resnet-18] [--json FILE]

A network learns scikit-learn's digits, drawn as its images, for a few steps; a bundle mixes it as the private model
with a later state as an expert. Latencies are medians of single samples on one thread, both graphs in turns. Agreement
and accuracy are on 100 samples that neither trained nor calibrated.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from script import DIGITS, digit_images, finish, parser_of, several
from torch import nn

from export import Candidate, GateWeights, Mixture, write_bundle
from export.int8 import Int8Limits, Int8Report, quantise_bundle
from fedge.bundle.formula import count_gate_features
from fedge.bundle.manifest import read_bundle
from fedge.data.problems.calibration import PLAIN
from fedge.data.task import TaskSpec
from fedge.data.validation import Validation
from fedge.models.build import make_network
from fedge.models.network import dump_model, make_layout
from fedge.models.networks import NETWORKS
from fedge.wire.messages import Role

SHAPES = {"resnet_moe": (3, 32, 32), "mobilenet-v3-small": (3, 32, 32), "resnet-18": (3, 32, 32)}
"""Of the networks' images; the others see (1, 28, 28)."""
N_TRAIN, BATCH, STEPS, MORE_STEPS = 1400, 32, 60, 10
LOOSE = Int8Limits(accuracy_drop=1.0, agreement=0.0, latency_ratio=1e9)


@dataclass(frozen=True)
class Row:
    """A network with `n_params` numbers."""

    network: str
    n_params: int
    report: Int8Report

    def __str__(self) -> str:
        r = self.report
        return (
            f"| {self.network} | {self.n_params:,} | {r.latency_ms:.3f} | {r.latency_int8_ms:.3f} | "
            f"{r.latency_int8_ms / r.latency_ms:.2f} | {r.agreement:.2f} | {r.accuracy:.2f} | {r.accuracy_int8:.2f} |"
        )


def train(network: nn.Module, x: NDArray[np.float32], y: NDArray[np.int64], steps: int) -> None:
    """Some steps of Adam."""
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    rng = np.random.default_rng(steps)
    for module in network.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # torchvision's MobileNetV3 has 0.01, too slow for so few steps
    for _ in range(steps):
        chosen = rng.integers(N_TRAIN, size=BATCH)
        loss = nn.functional.cross_entropy(network(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def measure(name: str, folder: Path) -> Row:
    """Train a network, write its bundle in float32 and in 8 bits, and compare them."""
    shape = SHAPES.get(name, (1, 28, 28))
    task = TaskSpec(name="digits", classes=DIGITS, input_shape=shape, model=name)
    x, y = digit_images(shape[1])
    order = np.random.default_rng(0).permutation(len(x))
    x, y = np.repeat(x[order], shape[0], axis=1), y[order]
    torch.manual_seed(0)
    network = make_network(task)
    layout, states = make_layout(network), []
    for steps in (STEPS, MORE_STEPS):
        train(network, x, y, steps)
        states.append(dump_model(network, layout))
    prior = np.full(10, -np.log(10))
    candidates = tuple(
        Candidate(role, f"c{k}", state, prior, PLAIN, 2.3, 1.0, 0.5)
        for k, (role, state) in enumerate(zip((Role.PRIVATE, Role.EXPERT), states, strict=True))
    )
    rng = np.random.default_rng(0)
    sizes = ((16, count_gate_features(shape)), (16,), (2, 16), (2,))
    gate = GateWeights(*(rng.normal(size=size) * 0.1 for size in sizes))
    mixture = Mixture(candidates, 0.5, gate)
    unseen = slice(N_TRAIN, N_TRAIN + 200)
    write_bundle(
        folder / "float32", task=task, layout=layout, mixture=mixture,
        validation=x[unseen], release=1, method="benchmark", metrics={},
    )  # fmt: skip
    report = quantise_bundle(read_bundle(folder / "float32"), Validation(x[unseen], y[unseen]), folder / "int8", LOOSE)
    return Row(name, layout.n_params, report)


def main() -> None:
    """Print a line for each network."""
    parser = parser_of(__doc__)
    parser.add_argument("--networks", type=several(), default=list(NETWORKS), metavar="A,B")
    given = parser.parse_args()
    if unknown := set(given.networks) - set(NETWORKS):
        parser.error(f"no network {sorted(unknown)}; there are {', '.join(NETWORKS)}")
    torch.set_num_threads(1)
    print("| network | weights | float32, ms | int8, ms | ratio | same class | accuracy | accuracy, int8 |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in given.networks:
        with tempfile.TemporaryDirectory(prefix="fedge-int8-") as folder:
            rows.append(measure(name, Path(folder)))
        print(rows[-1], flush=True)
    lines = [asdict(row) | {"report": msgspec.structs.asdict(row.report)} for row in rows]
    finish(given, lines)


if __name__ == "__main__":
    main()
