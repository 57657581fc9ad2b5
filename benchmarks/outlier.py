"""What the flag `outlier` catches: devices' own test samples, and samples that no device was made for.

    python benchmarks/outlier.py DATA > outlier.json

DATA holds fashion-mnist/ and uci-har/; digits need none. For each task a small fleet is simulated, and each device's
bundle is asked about its own unseen test samples, and about these inverted (smallest plus largest value minus the
value), as noise of their mean and deviation, and all at their smallest (black) or largest value (white). Told is the
share that is flagged, as the mean over the devices, and beside it the share above the mean plus three deviations of the
free energy, by which fedge 0.1 flagged. Takes three minutes.

    python benchmarks/outlier.py DATA --adapt --seeds 0,1,2 [--runs FOLDER]

With --adapt it measures `fedge serve --adapt-prior` instead: the accuracy of devices' bundles that follow what is
asked, minus that of the same bundles as they are, in points, over the second half of 600 samples asked eight at a time.
The samples are unseen ones: like those at home; with other class shares; from elsewhere (turned as in another group, or
another person's); both; and turned as nobody's. Told are means over devices, then over seeds, with the standard error
over the seeds and the lowest device. Takes an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from script import several

import fedge
from coordinator.simulation.compare import make_scenario
from coordinator.simulation.federation import partition_samples
from coordinator.simulation.settings import SimulationSettings
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots
from fedge.bundle.energies import compute_free_energy
from fedge.bundle.manifest import MANIFEST, Reference
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.tasks import Share

TASKS: Final[Mapping[str, dict[str, Any]]] = {
    "digits": {"devices": 10},
    "fashion-mnist": {"devices": 8, "samples": 4000},
    "uci-har": {"devices": 8},
}
ADAPTED: Final[Mapping[str, dict[str, Any]]] = {
    "digits 4 rotations": {"task": "digits", "devices": 12, "partition": "groups", "n_groups": 4},
    "digits 2 rotations": {"task": "digits", "devices": 10, "partition": "groups", "n_groups": 2},
    "digits alpha 1": {"task": "digits", "devices": 10, "alpha": 1.0},
    "HAR 30 people": {"task": "uci-har", "samples": 3000, "partition": "natural"},
}
ROUNDS: Final = 15
ADAPTED_ROUNDS: Final = 25
ASKED: Final = 600
TOGETHER: Final = 8
"""Most samples in a call of `fedge serve`."""
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


def drawn(rng: np.random.Generator, y: NDArray[np.int64], shares: Samples) -> NDArray[np.intp]:
    """Indices of samples whose classes have these shares."""
    each = (shares / np.maximum(np.bincount(y, minlength=len(shares)), 1))[y]
    return rng.choice(len(y), ASKED, p=each / each.sum())


def asked(
    setting: Mapping[str, Any], shares: Mapping[str, Share], device: str, n_classes: int, seed: int
) -> Iterator[tuple[str, NDArray[Any], NDArray[np.int64]]]:
    """What a device is asked: a name, samples in the form of its own, and their classes."""
    rng, own, ids = np.random.default_rng((seed, [*shares].index(device))), shares[device], [*shares]
    home = np.bincount(np.concatenate([own.y_train, own.y_val]), minlength=n_classes) + 0.5
    other = rng.dirichlet(np.full(n_classes, 0.5))
    if setting["task"] == "uci-har":
        stranger = shares[ids[(ids.index(device) + 7) % len(ids)]]
        for name, share, wanted in (("home", own, home), ("shares", own, other), ("elsewhere", stranger, home)):
            k = drawn(rng, share.y_test, wanted)
            yield name, share.x_test[k], share.y_test[k]
        return
    turns = {i: share.group if setting.get("n_groups") else 0 for i, share in shares.items()}
    x = np.concatenate([np.rot90(share.x_test, -turns[i], axes=(-2, -1)) for i, share in shares.items()])
    y = np.concatenate([share.y_test for share in shares.values()])
    here = turns[device]
    groups = setting.get("n_groups", 1)
    told = {"home": (home, here), "shares": (other, here), "nobody's": (home, -1)}
    if groups > 1:
        there = (here + 1) % groups
        told |= {"elsewhere": (home, there), "elsewhere, shares": (other, there)}
    for name, (wanted, turn) in told.items():
        if turn >= 0 or groups < 4:  # with four groups somebody hangs like that
            k = drawn(rng, y, wanted)
            yield name, np.rot90(x[k], turn, axes=(-2, -1)).copy(), y[k]


def accuracies(bundle: Path, share: Share, x: NDArray[Any], y: NDArray[np.int64]) -> tuple[float, float]:
    """Of a device's bundle as it is, and of one that follows what it is asked; over the second half."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        slots = Slots(home)
        slots.stage((bundle / MANIFEST).read_bytes(), bundle)
        slots.switch()
        slots.confirm()
        following = ActiveBundle(slots, Limits(), adapts_prior=True)
        Validation(preprocess(following.runtime.task, share.x_val), share.y_val).save(home)
        following.learn_home(home)
        plain = following.runtime.predict(x).class_index
        answers = [following.answer(x[i : i + TOGETHER])[1].class_index for i in range(0, len(x), TOGETHER)]
    late = slice(len(x) // 2, None)
    return float((plain == y)[late].mean()), float((np.concatenate(answers) == y)[late].mean())


def followed(name: str, data: Path, seed: int, runs: Path) -> dict[str, list[tuple[float, float]]]:
    """Accuracies of all devices of a setting by what is asked: of the bundle as it is, and of the one that follows."""
    setting = ADAPTED[name] | ({} if ADAPTED[name]["task"] == "digits" else {"data": data / "uci-har"})
    out = runs / f"{name}-{seed}".replace(" ", "-")
    if not (out / "figures.json").exists():
        fedge.simulate(rounds=ADAPTED_ROUNDS, seed=seed, out=out, progress=None, **setting)
    federation = partition_samples(make_scenario(msgspec.convert(setting, SimulationSettings)), seed)
    found: dict[str, list[tuple[float, float]]] = {}
    for device, share in federation.shares.items():
        bundles = sorted((out / device / "bundles").glob("*"))
        if not bundles or not len(share.x_val) or not len(share.y_test):
            continue
        for kind, x, y in asked(setting, federation.shares, device, federation.task.n_classes, seed):
            found.setdefault(kind, []).append(accuracies(bundles[-1], share, x, y))
    return found


def summary(seeds: list[dict[str, list[tuple[float, float]]]]) -> dict[str, dict[str, float]]:
    """Means over devices, then over seeds, in per cent and points."""
    told = {}
    for kind in seeds[0]:
        each = [100 * np.array(found[kind]) for found in seeds]
        gains = [float((pairs[:, 1] - pairs[:, 0]).mean()) for pairs in each]
        told[kind] = {
            "as it is": round(float(np.mean([pairs[:, 0].mean() for pairs in each])), 1),
            "gain": round(float(np.mean(gains)), 2),
            "error": round(float(np.std(gains, ddof=1) / np.sqrt(len(gains))), 2) if len(gains) > 1 else 0.0,
            "lowest device": round(float(min((pairs[:, 1] - pairs[:, 0]).min() for pairs in each)), 1),
        }
    return told


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder with fashion-mnist/ and uci-har/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapt", action="store_true", help="measure `fedge serve --adapt-prior`")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="with --adapt")
    parser.add_argument("--settings", type=several(), default=[*ADAPTED], help=f"with --adapt: {', '.join(ADAPTED)}")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keeps the simulations of --adapt")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as held:
        told: dict[str, Any]
        if arguments.adapt:
            logging.disable(logging.WARNING)
            runs = arguments.runs or Path(held.enter_context(tempfile.TemporaryDirectory()))
            told = {
                name: summary([followed(name, arguments.data, seed, runs) for seed in arguments.seeds])
                for name in arguments.settings
            }
        else:
            told = {task: measured(task, arguments.data, arguments.seed) for task in TASKS}
    json.dump(told, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
