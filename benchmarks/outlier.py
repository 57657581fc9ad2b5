"""What the flag `outlier` catches: devices' own test samples, and samples that no device was made for.

    python benchmarks/outlier.py DATA > outlier.json

DATA holds fashion-mnist/ and uci-har/; digits need none. For each task a small fleet is simulated, and each device's
bundle is asked about its own unseen test samples, and about these inverted (smallest plus largest value minus the
value), as noise of their mean and deviation, and all at their smallest (black) or largest value (white). Told is the
share that is flagged, as the mean over the devices, and beside it the share above the mean plus three deviations of the
free energy, by which fedge 0.1 flagged. Takes three minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import fedge
from coordinator.simulation.federation import partition_samples
from fedge.bundle.energies import compute_free_energy
from fedge.bundle.manifest import Reference

TASKS: Final[Mapping[str, dict[str, Any]]] = {
    "digits": {"devices": 10},
    "fashion-mnist": {"devices": 8, "samples": 4000},
    "uci-har": {"devices": 8},
}
ROUNDS: Final = 15
DEVIATIONS: Final = 3.0
Samples = NDArray[np.float64]


def kinds(x: Samples, rng: np.random.Generator) -> dict[str, Samples]:
    """Samples (n, ...) as they are, and what is made of them."""
    low, high = x.min(), x.max()
    return {
        "own": x,
        "inverted": low + high - x,
        "noise": rng.normal(x.mean(), x.std(), x.shape),
        "black": np.full_like(x, low),
        "white": np.full_like(x, high),
    }


def measured(task: str, data: Path, seed: int) -> dict[str, Any]:
    """Shares that are flagged, by kind, as means over the devices of a task."""
    settings = TASKS[task] | ({} if task == "digits" else {"data": data / task})
    with tempfile.TemporaryDirectory() as folder:
        done = fedge.simulate(task=task, rounds=ROUNDS, seed=seed, out=Path(folder) / "out", **settings)
        now: dict[str, list[float]] = {}
        before: dict[str, list[float]] = {}
        n_validation: list[int] = []
        for device, share in partition_samples(done.scenario, seed).shares.items():
            runtime = fedge.load(done.get_bundle(device))
            yardstick = runtime.manifest.reference
            if not isinstance(yardstick, Reference) or not len(share.x_test):
                continue
            n_validation.append(yardstick.n)
            bound = yardstick.free_energy_mean + DEVIATIONS * yardstick.free_energy_std
            for kind, x in kinds(share.x_test.astype(np.float64), np.random.default_rng(seed)).items():
                said = runtime.predict(x)
                now.setdefault(kind, []).append(float(said.outlier.mean()))
                before.setdefault(kind, []).append(
                    float((compute_free_energy(said.weights, said.energies) > bound).mean())
                )
    return {
        "validation_samples": n_validation,
        "flagged": {kind: round(float(np.mean(found)), 3) for kind, found in now.items()},
        "flagged_before": {kind: round(float(np.mean(found)), 3) for kind, found in before.items()},
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder with fashion-mnist/ and uci-har/")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    json.dump({task: measured(task, arguments.data, arguments.seed) for task in TASKS}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
