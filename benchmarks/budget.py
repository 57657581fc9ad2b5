"""What a mixture is worth if a budget leaves candidates out, and what the rest takes: accuracy against ms and MB.

Each device of a run of a method installs its bundle. Of the bundle's candidates the 1, 2, ... of the largest share run
(`deploy.inference.budget`), or all; a device with fewer runs all that it has. Accuracy in % and mean negative
log-likelihood are those of the device's own test samples and of other devices' samples of its classes (strangers), as
means over devices, then over seeds, with the standard error of the paired difference to all candidates. So are the
share of own test samples that is flagged as an outlier, and that of prediction sets of 0.9 that hold the truth.

Milliseconds and megabytes are of the bundle with most candidates of the first seed, and below of five candidates of a
larger network with random weights: the median wall time of a sample without preprocessing, and what loading and 100
samples add to a process of its own, each the median of three processes. `on the disk` has all candidates by engine
lazy, so many of them in memory and room for one more; its time is that of samples of zeros, all candidates run. `told`
is what the runtime measured when it loaded that, by which it decides.

    python benchmarks/budget.py --settings "digits, alpha 0.5" --seeds 80,81,82
    python benchmarks/budget.py --data DIR --settings "MNIST, alpha 0.5" --model cnn --json budget.json
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from default_method import SETTINGS, paired, parser_of_settings, source_of
from gate import kinds
from inference import Subject, child
from parts import load
from script import finish, say

import fedge
from coordinator.simulation.federation import partition_samples
from deploy.inference.runtime import Runtime
from fedge.bundle.manifest import read_bundle

LARGER: Final = "cnn32"
N_LARGER: Final = 5
KINDS: Final = ("own", "strangers")


def in_processes(*arguments: object) -> dict[str, float]:
    """The medians of what `parts.take` finds in processes of their own."""
    code = f"sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom parts import take\n"
    return child(f"{code}print(json.dumps(take(sys.argv[1], *map(int, sys.argv[2:]))))\n", *map(str, arguments))


def costs_of(folder: Path) -> dict[str, dict[str, float]]:
    """Time and memory of each part of a bundle that may run."""
    m = len(read_bundle(folder).manifest.candidates)
    found = {"fused, all": in_processes(folder, 0)}
    found |= {f"separate, {n} of {m}": in_processes(folder, n) for n in range(m, 0, -1)}
    found[f"told of {m}"] = in_processes(folder)
    return found | {f"on the disk, {n} in memory": in_processes(folder, m, n) for n in range(m - 2, -1, -1)}


def worth_of(runtime: Runtime, asked: dict[str, tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[str, float]]:
    """What the answers to each kind of raw samples are worth, by names."""
    problem, threshold = runtime.task.problem, runtime.make_coverage(0.9, 0.1).threshold
    for kind in KINDS:
        if kind not in asked:
            continue
        x, y = asked[kind]
        found = runtime.predict(x)
        yield f"{kind} accuracy", 100 * float((found.class_index == y).mean())
        yield f"{kind} nll", -float(np.log(np.maximum(found.probabilities[np.arange(len(y)), y], 1e-30)).mean())
        if kind == "own":
            yield "flagged", 100 * float(found.outlier.mean())
            if np.isfinite(threshold):
                yield "covered", 100 * float(problem.find_covered(found.answers, y, threshold).mean())


def measured(run: dict[str, Any], seed: int, costs: dict[str, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Figures by the number of candidates at most, means over devices; fill `costs` if it is empty."""
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        done = fedge.simulate(seed=seed, global_test=0.0, hardware="none", out=out, progress=None, **run)
        federation = partition_samples(done.scenario, seed)
        sizes = {i: len(read_bundle(done.get_bundle(i)).manifest.candidates) for i in federation.shares}
        for number, (device, m) in enumerate(sizes.items()):
            asked = kinds(device, federation.shares, np.random.default_rng((seed, number)))
            for n in range(1, max(sizes.values()) + 1):
                for name, value in worth_of(load(done.get_bundle(device), min(n, m)), asked):
                    found[n][name].append(value)
                found[n]["candidates"].append(min(n, m))
        if not costs:
            costs |= costs_of(done.get_bundle(max(sizes, key=lambda i: sizes[i])))
    return {n: {name: float(np.mean(each)) for name, each in of_n.items()} for n, of_n in found.items()}


def show_worth(runs: list[dict[int, dict[str, float]]]) -> None:
    """Print a row for each number of candidates."""
    every = max(max(run) for run in runs)
    names = [f"{kind} {name}" for kind in KINDS for name in ("accuracy", "nll")]
    print(f"| at most | run | {' | '.join(names)} | flagged | covered |")
    print("|---" * (len(names) + 4) + "|")
    for n in range(every, 0, -1):
        each = [(run[min(n, max(run))], run[max(run)]) for run in runs]
        cells = []
        for name in names:
            ours, whole = (np.array([pair[k][name] for pair in each]) for k in range(2))
            decimals = 2 if name.endswith("accuracy") else 3
            difference = "" if n == every else f" ({paired(ours - whole, decimals)})"
            cells.append(f"{ours.mean():.{decimals}f}{difference}")
        others = [f"{np.mean([pair[0][name] for pair in each]):.1f}" for name in ("flagged", "covered")]
        run = np.mean([pair[0]["candidates"] for pair in each])
        print(f"| {n} | {run:.2f} | {' | '.join([*cells, *others])} |", flush=True)


def show_costs(name: str, costs: dict[str, dict[str, float]]) -> None:
    """Print a row for each part of a bundle."""
    print(f"| {name} | ms | MB |\n|---|---|---|")
    for row, cost in costs.items():
        print(f"| {row} | {cost['ms']:.3f} | {cost['mb']:.1f} |", flush=True)


def main() -> None:
    given = parser_of_settings(__doc__, seeds=[80, 81, 82]).parse_args()
    figures: dict[str, Any] = {}
    for setting in given.settings:
        runs, costs = [], dict[str, dict[str, float]]()
        with tempfile.TemporaryDirectory() as folder:
            how = {**SETTINGS[setting], "method": given.method, "rounds": given.rounds}
            how |= source_of(str(how.pop("set")), given.data, Path(folder)) | (
                {"model": given.model} if given.model else {}
            )
            for seed in given.seeds:
                say(f"{setting}, seed {seed}")
                runs.append(measured(how, seed, costs))
        print(f"{given.method}, {setting}")
        show_worth(runs)
        show_costs("its bundle", costs)
        figures[setting] = {"runs": runs, "costs": costs}
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(LARGER, N_LARGER - 1, Path(folder) / LARGER)
        figures[LARGER] = costs_of(subject.folder)
        show_costs(LARGER, figures[LARGER])
    finish(given, figures)


if __name__ == "__main__":
    main()
