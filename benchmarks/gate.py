"""What the gate and the energy are worth where inputs are not those of home: accuracy and calibration.

Each device's installed bundle of `fedge` (30 rounds, everybody) predicts samples of six kinds, as it is and with parts
of its mixture taken out: `no gate` r = 0, `no energy` beta = 0, `neither`, and `energy` beta = 1 without the gate. The
gate is the one that was trained with the pooled beta, which is told, too.

  own          the device's own test samples
  noise        with noise as large as half their deviation
  faded        drawn half-way to their mean, as in fog or with a weak signal
  sensor dead  a third of the inputs at their smallest value: the upper rows of an image, the first of the features
  strangers    test samples of other devices, of the device's classes
  unseen       test samples of other devices, of classes that it has no sample of

Rows are means over the devices, then over the seeds, of accuracy in %, mean negative log-likelihood in nats, and
expected calibration error in points (ten bins of equal width over all devices' samples). The last column has the
paired differences of `as it is` to `neither`, with the standard error over the seeds.

    python benchmarks/gate.py
    python benchmarks/gate.py --data DIR --tasks digits,uci-har --seeds 60,61,62 --json gate.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import fedge
from coordinator.simulation.federation import deal
from deploy.engines import Separate
from deploy.fusion import Formula, fuse, gate_scores
from deploy.runtime import Runtime
from fedge import preprocess
from fedge.tasks import Share

TASKS: Final[Mapping[str, dict[str, Any]]] = {
    "digits": {"alpha": 0.5},
    "uci-har": {"partition": "natural"},
}
VARIANTS: Final = ("as it is", "no gate", "no energy", "neither", "energy")
MEASURES: Final = ("accuracy", "nll", "ece")
STRANGERS: Final = 200
"""Samples of others that a device is asked about, at most, of each kind."""
BINS: Final = 10
Samples = tuple[np.ndarray, np.ndarray]


def kinds(device: str, shares: Mapping[str, Share], rng: np.random.Generator) -> dict[str, Samples]:
    """What a device is asked about, raw samples with labels."""
    own = shares[device]
    x, y = own.x_test.astype(np.float64), own.y_test
    dead = x.copy()
    dead[:, : max(1, x.shape[1] // 3)] = x.min()
    others = [share for i, share in shares.items() if i != device]
    far_x, far_y = (np.concatenate([getattr(share, name) for share in others]) for name in ("x_test", "y_test"))
    known = np.isin(far_y, np.concatenate([own.y_train, own.y_val]))

    def some(mask: np.ndarray) -> Samples:
        chosen = rng.permutation(np.flatnonzero(mask))[:STRANGERS]
        return far_x[chosen].astype(np.float64), far_y[chosen]

    found = {
        "own": (x, y),
        "noise": (x + rng.normal(0, 0.5 * x.std(), x.shape), y),
        "faded": ((x + x.mean()) / 2, y),
        "sensor dead": (dead, y),
        "strangers": some(known),
        "unseen": some(~known),
    }
    return {kind: samples for kind, samples in found.items() if len(samples[1])}


def variants(runtime: Runtime, x: np.ndarray) -> dict[str, np.ndarray]:
    """Probabilities (n, C) of model inputs, with all of the mixture and with parts taken out."""
    engine = runtime._engine  # noqa: SLF001 - nothing else has a bundle's parts
    assert isinstance(engine, Separate)
    how, n = engine._how, len(runtime.manifest.candidates)  # noqa: SLF001
    logits = [engine._logits(k, x) for k in range(n)]  # noqa: SLF001
    omega = np.log(np.maximum([c.weight for c in runtime.manifest.candidates], 1e-38)).astype(np.float32)
    plain = replace(how.gate, out=np.zeros_like(how.gate.out), out_bias=omega)

    def said(formula: Formula) -> np.ndarray:
        return fuse(formula, logits, gate_scores(formula, x))[0]

    def with_beta(formula: Formula, beta: float) -> Formula:
        return replace(formula, energies=replace(formula.energies, beta=np.float32(beta)))

    ungated = replace(how, gate=plain)
    formulas = (how, ungated, with_beta(how, 0), with_beta(ungated, 0), with_beta(ungated, 1))
    return {name: said(formula) for name, formula in zip(VARIANTS, formulas, strict=True)}


def measured(task: str, data: Path | None, seed: int) -> dict[tuple[str, str, str], float]:
    """Each measure of each kind and variant; beta under ("pooled", "beta", "")."""
    source = {} if task == "digits" else {"data": (data or Path()) / task}
    probabilities: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    found: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        done = fedge.simulate(task=task, seed=seed, global_test=0.0, out=Path(folder) / "out", **TASKS[task], **source)
        federation = deal(done.scenario, seed)
        for number, device in enumerate(federation.shares):
            runtime = fedge.load(done.bundle(device), engine="separate")
            found["pooled", "beta", ""] = float(runtime.manifest.fusion.beta)
            for kind, (x, y) in kinds(device, federation.shares, np.random.default_rng((seed, number))).items():
                for variant, p in variants(runtime, preprocess.apply(federation.task, x)).items():
                    probabilities[kind, variant].append((p, y))
    for (kind, variant), each in probabilities.items():
        found[kind, variant, "accuracy"] = 100 * float(np.mean([(p.argmax(axis=1) == y).mean() for p, y in each]))
        losses = [-np.log(np.maximum(p[np.arange(len(y)), y], 1e-30)).mean() for p, y in each]
        found[kind, variant, "nll"] = float(np.mean(losses))
        found[kind, variant, "ece"] = 100 * calibration_error(each)
    return found


def calibration_error(each: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Expected calibration error of the most probable class."""
    sure = np.concatenate([p.max(axis=1) for p, _ in each])
    right = np.concatenate([p.argmax(axis=1) == y for p, y in each])
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(np.sum(sure[bins == b]) - np.sum(right[bins == b])) for b in range(BINS)]
    return float(np.sum(gaps) / len(sure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with uci-har")
    parser.add_argument("--tasks", default="digits", help=f"some of {','.join(TASKS)} (default digits)")
    parser.add_argument("--seeds", default="60,61,62", help="with commas (default 60,61,62)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    figures: dict[str, Any] = {}
    for task in arguments.tasks.split(","):
        runs = []
        for seed in seeds:
            print(f"\r{task}, seed {seed} ", end="", file=sys.stderr, flush=True)
            runs.append(measured(task, arguments.data, seed))
        print(file=sys.stderr)
        print(f"{task}: beta {' '.join(str(run['pooled', 'beta', '']) for run in runs)}; accuracy / nll / ece")
        print(f"| inputs | {' | '.join(VARIANTS)} | as it is - neither |\n{'|---' * (len(VARIANTS) + 2)}|")
        for kind in dict.fromkeys(kind for kind, _, measure in runs[0] if measure):
            every = {m: np.array([[run[kind, v, m] for v in VARIANTS] for run in runs]) for m in MEASURES}
            means = [every[m].mean(axis=0) for m in MEASURES]
            cells = [f"{a:.1f} / {nll:.3f} / {e:.1f}" for a, nll, e in zip(*means, strict=True)]
            pairs = {m: every[m][:, 0] - every[m][:, VARIANTS.index("neither")] for m in MEASURES}
            errors = [np.std(p, ddof=1) / np.sqrt(len(p)) if len(p) > 1 else 0.0 for p in pairs.values()]
            gains = [f"{p.mean():+.3f} ± {e:.3f}" for p, e in zip(pairs.values(), errors, strict=True)]
            print(f"| {kind} | {' | '.join(cells)} | {' / '.join(gains)} |", flush=True)
            figures.setdefault(task, {})[kind] = {m: every[m].tolist() for m in MEASURES}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
