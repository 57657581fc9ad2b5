"""The default method against the baselines, setting by setting: the tables of fedge.md sections 15.2 and 15.3 remade.

Networks have one hidden layer of 32, inputs are small (digits 8x8; MNIST and Fashion-MNIST mean-pooled to 14x14;
CIFAR-10 to 3x8x8), 20 devices, SGD 0.05 with momentum 0.9, batch 32, 10 steps per participation. Accuracy is that of
the devices' own bundles on their own test samples, the mean over devices, then over seeds. Differences to the
specification: a device's test set is a quarter of its samples, not 120 further images; "best baseline" is picked by
its mean in hindsight from the columns of this table, which flatters it.

Tables: `everybody` (15.2: 30 rounds, all devices, nothing marked sensitive) and `quarter` (15.3: 80 rounds, a quarter
of the devices, 30 % of the samples kept out of uploads), and one that the specification does not have, `hundreds`: 100
rounds with a tenth of 200 devices of 60 samples each, for those of the settings that have as many samples (MNIST,
Fashion-MNIST; others cannot be asked for there). `--model cnn` takes a small convolutional network instead of the
perceptron.

Below the table: `fedge` against the best baseline over all settings; against each other method, the mean difference
and in how many settings it is at least equal; and in how many runs of each setting its trial split the devices.

Runs that are done are kept in --out; the same command goes on where it was.

Examples:
    python benchmarks/default_method.py --data ../shared/data --seeds 40,41,42
    python benchmarks/default_method.py --data ../shared/data --table quarter --settings "digits, alpha 0.5"
    python benchmarks/default_method.py --settings "digits, 4 rotations" --model cnn --json rotations.json
    python benchmarks/default_method.py --data ../shared/data --table hundreds --settings "MNIST, 4 rotations"
    python benchmarks/default_method.py --settings "digits, 4 rotations" --methods fedge,fedge:split=never,fedge:gamma=0
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from coordinator.simulation.compare import Comparison, compare
from coordinator.simulation.outcome import RunOutcome
from coordinator.simulation.settings import CompareSettings, Hardware

METHODS = (
    "local",
    "fedavg",
    "fedavg+ft",
    "fedprox+ft:proximal_mu=0.1",
    "ditto",
    "fedavgm",
    "fedavgm+ft",
    "cfic+ft",
    "fedepc",
    "scmoe-pfl",
    "fedge",
)
OURS = "fedge"
TABLES = {
    "everybody": {"rounds": 30, "participation": 1.0, "sensitive": 0.0},
    "quarter": {"rounds": 80, "participation": 0.25, "sensitive": 0.3},
    "hundreds": {"rounds": 100, "participation": 0.1, "sensitive": 0.0, "devices": 200, "samples": 12000},
}
LABELS = {"partition": "groups", "groups": "labels", "n_groups": 4, "alpha": 1.0}
TURNS = {"partition": "groups", "groups": "rotation", "n_groups": 4, "alpha": 1.0}
CODES = {"partition": "groups", "groups": "codes", "n_groups": 1, "alpha": 1.0}
SETTINGS: dict[str, dict[str, object]] = {
    "digits, alpha 1": {"set": "digits", "alpha": 1.0},
    "digits, alpha 0.5": {"set": "digits", "alpha": 0.5},
    "digits, alpha 0.1": {"set": "digits", "alpha": 0.1},
    "digits, 4 rotations": {"set": "digits", **TURNS},
    "digits, 4 label groups": {"set": "digits", **LABELS},
    "digits, own label code": {"set": "digits", **CODES},
    "digits, every fifth own code": {"set": "digits", **CODES, "n_groups": 5},
    "digits, 600 images, alpha 0.5": {"set": "digits", "alpha": 0.5, "samples": 600},
    "MNIST, alpha 1": {"set": "mnist", "alpha": 1.0, "samples": 2000},
    "MNIST, alpha 0.5": {"set": "mnist", "alpha": 0.5, "samples": 2000},
    "MNIST, alpha 0.1": {"set": "mnist", "alpha": 0.1, "samples": 2000},
    "MNIST, 4 rotations": {"set": "mnist", "samples": 3000, **TURNS},
    "MNIST, 4 label groups": {"set": "mnist", "samples": 2000, **LABELS},
    "MNIST, own label code": {"set": "mnist", "samples": 2000, **CODES},
    "MNIST, every fifth own code": {"set": "mnist", "samples": 2000, **CODES, "n_groups": 5},
    "MNIST, 800 images, alpha 0.5": {"set": "mnist", "alpha": 0.5, "samples": 800},
    "Fashion, alpha 0.5": {"set": "fashion-mnist", "alpha": 0.5, "samples": 2000},
    "Fashion, alpha 0.1": {"set": "fashion-mnist", "alpha": 0.1, "samples": 2000},
    "CIFAR-10, alpha 0.5": {"set": "cifar10", "alpha": 0.5, "samples": 4000},
    "CIFAR-10, alpha 0.1": {"set": "cifar10", "alpha": 0.1, "samples": 4000},
    "CIFAR-10, 4 rotations": {"set": "cifar10", "samples": 4000, **TURNS},
    "HAR, 30 people": {"set": "uci-har", "partition": "natural"},
    "HAR, 60 windows each": {"set": "uci-har", "partition": "natural", "samples": 1800},  # on average
    "spoken digits, 6 speakers": {"set": "spoken-digits", "partition": "natural"},
    "spoken digits, 60 each": {"set": "spoken-digits", "partition": "natural", "samples": 360},
}
LARGE = frozenset({"mnist", "fashion-mnist"})
"""Sets with samples enough for hundreds of devices."""
PUBLISHED = {
    "everybody": {
        "digits, alpha 1": (96.7, -0.08), "digits, alpha 0.5": (96.5, -0.09), "digits, alpha 0.1": (97.6, 0.12),
        "digits, 4 rotations": (94.1, 3.93), "digits, 4 label groups": (99.0, -0.29),
        "digits, own label code": (87.8, 0.43),
        "digits, 600 images, alpha 0.5": (94.8, -0.42), "MNIST, alpha 1": (91.7, 0.73),
        "MNIST, alpha 0.5": (92.5, 1.35), "MNIST, alpha 0.1": (95.7, 0.88), "MNIST, 4 rotations": (88.5, 0.73),
        "MNIST, 4 label groups": (97.5, 0.28), "MNIST, own label code": (83.3, 0.21),
        "MNIST, 800 images, alpha 0.5": (90.5, 1.29),
        "Fashion, alpha 0.5": (86.8, 1.73), "Fashion, alpha 0.1": (93.0, 1.01), "CIFAR-10, alpha 0.5": (54.9, 4.06),
        "CIFAR-10, alpha 0.1": (76.3, 2.72), "CIFAR-10, 4 rotations": (43.8, 2.82), "HAR, 30 people": (95.3, -0.07),
        "HAR, 60 windows each": (94.0, 0.21), "spoken digits, 6 speakers": (97.2, 0.28),
        "spoken digits, 60 each": (89.9, -0.53),
    },
    "hundreds": {},
    "quarter": {
        "digits, alpha 1": (96.6, -0.22), "digits, alpha 0.5": (96.4, -0.11), "digits, alpha 0.1": (97.2, -0.61),
        "digits, 4 rotations": (91.9, 0.82), "digits, 4 label groups": (99.2, 0.19),
        "digits, own label code": (86.6, -1.09),
        "digits, 600 images, alpha 0.5": (94.5, -0.50), "MNIST, alpha 1": (91.5, 1.46),
        "MNIST, alpha 0.5": (92.2, 1.21), "MNIST, alpha 0.1": (95.4, 0.28), "MNIST, 4 rotations": (85.6, 1.51),
        "MNIST, 4 label groups": (97.2, 1.04), "MNIST, own label code": (82.3, -0.19),
        "MNIST, 800 images, alpha 0.5": (89.9, 1.12),
        "Fashion, alpha 0.5": (85.3, 1.14), "Fashion, alpha 0.1": (90.7, -0.04), "CIFAR-10, alpha 0.5": (51.9, 1.00),
        "CIFAR-10, alpha 0.1": (75.8, 0.54), "CIFAR-10, 4 rotations": (42.4, 2.12), "HAR, 30 people": (96.6, -0.05),
        "HAR, 60 windows each": (94.2, -0.16),
    },
}  # fmt: skip
"""The specification's accuracy of fedge and its difference to the best baseline, in points."""


# ------------------------------------------------------------------------------------------------------- the data


def idx_images(data: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """MNIST or Fashion-MNIST, mean-pooled to (n, 1, 14, 14) in [0, 1], and labels."""

    def read(kind: str, head: int) -> np.ndarray:
        parts = [gzip.decompress((data / name / f"{p}-{kind}-ubyte.gz").read_bytes())[head:] for p in ("train", "t10k")]
        return np.frombuffer(b"".join(parts), np.uint8)

    x = read("images-idx3", 16).reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32) / 255
    return x[:, None], read("labels-idx1", 8).astype(np.int64)


def cifar(data: Path, _: str = "", *, pooled: int = 4, every: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Every tenth image of CIFAR-10 (JPEG), mean-pooled to (n, 3, 32 / pooled, 32 / pooled) in [0, 1], and labels."""
    from PIL import Image

    with zipfile.ZipFile(data / "cifar10-jpeg.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".jpg"))[::every]
        classes = sorted({n.split("/")[-2] for n in names})
        raw = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n)))) for n in names]).astype(np.float32)
    x = raw.reshape(-1, 32 // pooled, pooled, 32 // pooled, pooled, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2) / 255
    return x, np.array([classes.index(n.split("/")[-2]) for n in names])


SOURCES: dict[str, Callable[[Path, str], tuple[np.ndarray, np.ndarray]]] = {
    "mnist": idx_images,
    "fashion-mnist": idx_images,
    "cifar10": cifar,
}


WHOLE = {  # as they are: task, and where the images are in the folder of the sets
    "mnist-28": ("mnist", ""),
    "fashion-mnist-28": ("fashion-mnist", ""),
    "cifar10-32": ("image-folder", "cifar10-jpeg.zip"),
}


def source_of(name: str, data: Path | None, out: Path) -> dict[str, object]:
    """Task and data of a set; pooled images are written once, beside the runs."""
    if name == "digits":
        return {"task": "digits"}
    if data is None:
        raise SystemExit(f"the setting needs {name}: say where the data sets are, with --data DIR")
    if name in WHOLE:
        task, where = WHOLE[name]
        return {"task": task, "data": data / where}
    if name not in SOURCES:
        folder = {"uci-har": "uci-har", "spoken-digits": "fsdd"}[name]
        return {"task": name, "data": data / folder}
    file = out / f"{name}.npz"
    if not file.exists():
        x, y = SOURCES[name](data, name)
        np.savez(file, x=x.astype(np.float32), y=y)
    return {"task": "arrays", "data": file}


# ------------------------------------------------------------------------------------------------------ the table


def settings_of(table: str) -> list[str]:
    """The settings that a table can have: a number of samples that is the setting's own stands against the table's."""
    if "samples" not in TABLES[table]:
        return list(SETTINGS)
    return [name for name, fields in SETTINGS.items() if fields["set"] in LARGE and "images" not in name]


def measure(name: str, arguments: argparse.Namespace) -> Comparison:
    """All methods on one setting."""
    fields = dict(SETTINGS[name])
    source = source_of(str(fields.pop("set")), arguments.data, arguments.out)
    settings = msgspec.convert(
        {"methods": ",".join(arguments.methods), "seeds": arguments.seeds, "hardware": Hardware.NONE}
        | {"global_test": 0.0, "model": arguments.model, "evaluate_every": 1000, "jobs": arguments.jobs}
        | fields
        | TABLES[arguments.table]
        | source,
        CompareSettings,
        strict=False,
    )

    def watch(done: int, of: int, last: RunOutcome) -> None:
        print(f"\r{name}: {done}/{of}, {last.method} {last.accuracy:.3f}   ", end="", file=sys.stderr, flush=True)

    found = compare(settings, arguments.out, watch)
    print(file=sys.stderr)
    return found


def row(name: str, found: Comparison, table: str) -> str:
    """Mean accuracy of each method in %, the paired difference to the best baseline, the specification's figures."""
    means = {m.method: 100 * m.accuracy.mean for m in found.methods}
    ours = next(m for m in found.methods if m.method == OURS)
    assert ours.to_best_other is not None
    difference = " ".join(f"{100 * d:+.1f}" for d in ours.to_best_other.seeds)
    published = PUBLISHED[table].get(name)
    spec = f"{published[0]:.1f}, {published[1]:+.2f}" if published and found.scenario.model is None else "-"
    cells = [f"**{value:.1f}**" if method == OURS else f"{value:.1f}" for method, value in means.items()]
    gain = f"{100 * ours.to_best_other.mean:+.2f} [{difference}] {ours.best_other}"
    return " | ".join(["", name, *cells, gain, spec, ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist, fashion-mnist, cifar10-jpeg.zip, uci-har, fsdd")
    parser.add_argument("--table", choices=list(TABLES), default="everybody")
    parser.add_argument("--settings", help="some of them, with ; between them (default: all)")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help="with commas")
    parser.add_argument("--seeds", default="40,41,42", help="with commas (default 40,41,42)")
    parser.add_argument("--model", help="such as cnn, for all settings (default: one hidden layer of 32)")
    parser.add_argument("--out", type=Path, default=Path("default-method"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: a core each)")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    known = settings_of(arguments.table)
    names = [s.strip() for s in arguments.settings.split(";")] if arguments.settings else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown settings {unknown}; there are: {'; '.join(known)}")
    if OURS not in arguments.methods or len(arguments.methods) < 2:
        parser.error(f"--methods needs {OURS} and something to compare it with")
    arguments.out.mkdir(parents=True, exist_ok=True)
    header = ["setting", *arguments.methods, "fedge - best other [per seed]", "specification"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|", flush=True)
    gains: dict[str, list[float]] = {}
    over: dict[str, list[float]] = {}
    splits: dict[str, str] = {}
    results = {}
    for name in names:
        found = measure(name, arguments)
        print(row(name, found, arguments.table), flush=True)
        ours = next(m for m in found.methods if m.method == OURS)
        results[name] = msgspec.to_builtins(found.methods, enc_hook=str)
        assert ours.to_best_other is not None
        gains[name] = [100 * d for d in ours.to_best_other.seeds]
        for other in found.methods:
            if other is not ours:
                over.setdefault(other.method, []).append(100 * (ours.accuracy.mean - other.accuracy.mean))
        split = [run.split for run in found.runs if run.method == OURS]
        splits[name] = f"{sum(split)} of {len(split)}"
    means = np.array([np.mean(g) for g in gains.values()])
    runs = np.concatenate([np.array(g) for g in gains.values()])
    print(
        f"\n{len(means)} settings: mean difference to the best baseline {means.mean():+.2f} points, at least equal in "
        f"{(means >= 0).sum()}, lowest {means.min():+.2f}; {len(runs)} runs: negative in {(runs < 0).mean():.0%}"
    )
    each = (f"{m} {np.mean(d):+.2f} [{(np.array(d) >= 0).sum()}]" for m, d in over.items())
    print(f"{OURS} minus each other, mean [settings where at least equal]: {', '.join(each)}")
    print(f"runs of {OURS} that split the devices: {'; '.join(f'{name}: {n}' for name, n in splits.items())}")
    if arguments.json:
        document = {"table": arguments.table, "seeds": arguments.seeds, "model": arguments.model, "settings": results}
        arguments.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
