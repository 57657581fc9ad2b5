"""How often prediction sets hold the truth, and how large they are, on each device's own test samples and under drift.

    python benchmarks/conformal.py --data DIR --out FOLDER [--seeds 0,1] [--tasks digits] [--coverage 0.9] [--student]

DIR holds uci-har/ and flights/; digits need none. For each seed a fleet learns by `fedge` for 10 rounds. Then each
device's bundle is asked about 300 of the device's unseen test samples: as they are; with other shares of the classes;
from elsewhere (digits turned by a quarter, movements of another person, flights of another airport); and of the kinds
of `gate.py`: with noise, faded, with a dead sensor, of strangers, of classes unseen at home (flights have the first
three, with each feature in its own deviations). After each sample comes its label. Told are coverage and mean size over
the second half (classes in a set, minutes of an interval's median width, as an interval may be infinite) of sets at the
asked level and of sets whose level follows the labels, as means over devices, then over seeds, with the standard error
over seeds, the lowest device and the median one's size. FOLDER keeps the figures of each task and seed, so that a run
may go on. A seed of all tasks takes two minutes.

With `--student` each device makes a student of its mixture, and those are told that installed it; the scores are its
mixture's (docs/methods/student.md, section 6).
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from gate import kinds
from numpy.typing import NDArray
from problems import make_flights
from script import finish, parser_of, several

import fedge
from coordinator.simulation.federation import partition_samples
from deploy.inference.runtime import Runtime
from export.student import STUDENT
from fedge.bundle.conformal import adapt_level
from fedge.data.problems.problem import Problem
from fedge.tasks import Share

TASKS: Final = ("digits", "HAR 30 people", "flights, 40")
ROUNDS: Final = 10
ASKED: Final = 300


class Found(NamedTuple):
    """Of one device and stream: coverage and size of fixed sets, of sets that follow labels, and validation samples."""

    fixed: float
    size: float
    followed: float
    followed_size: float
    n: int


def make_run(task: str, data: Path, seed: int) -> dict[str, Any]:
    """The arguments of a simulation."""
    if task == "digits":
        return {"task": "digits", "devices": 10}
    if task == "HAR 30 people":
        return {"task": "uci-har", "data": data / "uci-har", "samples": 3000, "partition": "natural"}
    return {"task": make_flights(data, seed, 110, 40, 0.0), "partition": "natural"}


def ask(
    task: str, shares: dict[str, Share], device: str, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """What a device is asked: a name, samples in the form of its own, and their targets."""
    ids, own = [*shares], shares[device]
    other = shares[ids[(ids.index(device) + 7) % len(ids)]]
    k = rng.integers(len(own.y_test), size=ASKED)
    yield "home", own.x_test[k], own.y_test[k]
    if task != TASKS[2]:
        n_classes = int(own.y_test.max()) + 1
        wanted = rng.dirichlet(np.full(n_classes, 0.5)) / np.maximum(np.bincount(own.y_test, minlength=n_classes), 1)
        p = wanted[own.y_test]
        k = rng.choice(len(p), ASKED, p=p / p.sum())
        yield "other shares", own.x_test[k], own.y_test[k]
    if task == TASKS[0]:
        k = rng.integers(len(own.y_test), size=ASKED)
        yield "elsewhere", np.rot90(own.x_test[k], axes=(-2, -1)).copy(), own.y_test[k]
    elif len(other.y_test):
        k = rng.integers(len(other.y_test), size=ASKED)
        yield "elsewhere", other.x_test[k], other.y_test[k]
    yield from ask_worse(task, shares, device, rng)


def ask_worse(
    task: str, shares: dict[str, Share], device: str, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """The kinds of `gate.py` in the same form, but the device's own."""
    known, mean, scale = shares, 0.0, 1.0
    if task == TASKS[2]:  # its features have units of their own
        own = shares[device].x_train
        mean, scale = own.mean(axis=0), np.where(own.std(axis=0) > 0, own.std(axis=0), 1)
        known = {i: replace(share, x_test=(share.x_test - mean) / scale) for i, share in shares.items()}
    for kind, (x, y) in kinds(device, known, rng).items():
        if kind != "own" and not (task == TASKS[2] and kind in {"strangers", "unseen"}):  # which are of classes
            k = rng.integers(len(y), size=ASKED)
            yield kind, x[k] * scale + mean, y[k]


def find_sizes(problem: Problem, answers: list[NDArray[Any]], threshold: float) -> NDArray[np.float64]:
    """The number of classes in each set, or each interval's width, (n,)."""
    sets = problem.make_sets(answers, threshold)
    return sets["set"].sum(axis=1) if "set" in sets else (sets["high"] - sets["low"]).mean(axis=1)


def measure(runtime: Runtime, x: NDArray[Any], y: NDArray[Any]) -> Found:
    """Ask a bundle, and tell it each target afterwards."""
    assert runtime.coverage is not None
    problem, answers, wanted = runtime.task.problem, runtime.predict(x).answers, runtime.coverage.wanted
    y = problem.convert_targets(y, len(y), runtime.task.input_shape, "y")
    level, thresholds = 1 - wanted, []
    for score in problem.compute_nonconformity(answers, y):
        thresholds.append(runtime.make_coverage(wanted, level).threshold)
        level = adapt_level(level, wanted, missed=score > thresholds[-1])
    late = np.arange(ASKED) >= ASKED // 2
    figures: list[float] = []
    for each in (np.full(ASKED, runtime.coverage.threshold), np.array(thresholds)):
        covered, sizes = np.zeros(ASKED), np.zeros(ASKED)
        for threshold in np.unique(each):
            rows = each == threshold
            some = [one[rows] for one in answers]
            covered[rows] = problem.find_covered(some, y[rows], threshold)
            sizes[rows] = find_sizes(problem, some, threshold)
        middle = np.mean if problem.SHARED else np.median
        figures += [float(covered[late].mean()), float(middle(sizes[late]))]
    return Found._make((*figures, runtime.coverage.n))


def run(task: str, data: Path, seed: int, coverage: float, *, student: bool) -> dict[str, list[Found]]:
    """The figures of all devices, or of those with a student, by what is asked."""
    found: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory() as folder:
        how = make_run(task, data, seed)
        done = fedge.simulate(rounds=ROUNDS, seed=seed, out=Path(folder) / "out", progress=None, student=student, **how)
        shares = partition_samples(done.scenario, seed).shares
        there = {device.id for device in done.devices if device.bundle}
        for i, device in enumerate(shares):
            if device not in there or not len(shares[device].y_test) or not len(shares[device].y_val):
                continue
            runtime = fedge.load(done.get_bundle(device), coverage=coverage)
            if student and runtime.manifest.candidates[0].name != STUDENT:
                continue
            for kind, x, y in ask(task, shares, device, np.random.default_rng((seed, i))):
                found.setdefault(kind, []).append(measure(runtime, x, y))
    return found


def summarise(seeds: list[dict[str, list[Found]]]) -> dict[str, dict[str, float]]:
    """Means over devices, then over seeds."""
    told = {}
    for kind in dict.fromkeys(kind for found in seeds for kind in found):
        each = [np.array(found[kind]) for found in seeds if kind in found]  # devices may know every class
        means = np.array([rows.mean(axis=0) for rows in each])
        errors = means.std(axis=0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.zeros(5)
        lowest = np.mean([rows.min(axis=0) for rows in each], axis=0)
        told[kind] = {
            "seeds": len(each),
            "devices": float(np.mean([len(rows) for rows in each])),
            "validation samples": float(np.median(np.concatenate(each)[:, 4])),
        } | {
            f"{way}, {what}": round(float(figure), 3)
            for k, way in ((0, "fixed"), (2, "labels"))
            for what, figure in (
                ("coverage", means[:, k].mean()),
                ("error", errors[k]),
                ("lowest device", lowest[k]),
                ("size", means[:, k + 1].mean()),
                ("size, median device", np.median(np.concatenate(each)[:, k + 1])),
            )
            if np.isfinite(figure)
        }
    return told


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="keeps each seed's figures")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", type=lambda text: text.split(";"), default=[*TASKS], help="; between them")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--student", action="store_true", help="see above")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, list[Found]]]] = {task: [] for task in arguments.tasks}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            how = f"{arguments.coverage}{'-student' if arguments.student else ''}"
            file = arguments.out / f"{task}-{seed}-{how}.json".replace(" ", "-")
            if not file.exists():
                found_now = run(task, arguments.data, seed, arguments.coverage, student=arguments.student)
                file.write_text(json.dumps(found_now))
            found[task].append(json.loads(file.read_text()))
    told = {task: summarise(seeds) for task, seeds in found.items()}
    print(json.dumps(told, indent=1))
    finish(arguments, told)


if __name__ == "__main__":
    main()
