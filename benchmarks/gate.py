"""What gate, energy and weights are worth where inputs are not those of home: accuracy, calibration, and the warning.

Each device's installed bundle of `fedge` (30 rounds, everybody) predicts samples of six kinds, as it is and with parts
of its mixture taken out: `no gate` r = 0, `no energy` beta = 0, `neither`, `equal` neither, and equal weights. The gate
is the one that was trained with the pooled beta, which is told, too. `shift` is the mode of `fedge infer` for samples
unlike the device's own: neither gate nor class shares nor weights, energies alone. `tempered` is no part of fedge: what
the bundle says at the temperature 1 plus what the free energy is above the bound of outliers.

  own          the device's own test samples
  noise        with noise as large as half their deviation
  faded        drawn half-way to their mean, as in fog or with a weak signal
  sensor dead  a third of the inputs at their smallest value: the upper rows of an image, the first of the features
  strangers    test samples of other devices, of the device's classes
  unseen       test samples of other devices, of classes that it has no sample of

Rows are means over the devices, then over the seeds, of accuracy in %, mean negative log-likelihood in nats, and
expected calibration error in points (ten bins of equal width over all devices' samples). Then the paired differences of
`as it is` to `neither`, with the standard error over the seeds, and how well samples of this kind are told from the
device's own: the area under the curve (0.5: not at all) by the free energy, and by the largest probability.

`--augmented` fits all that learns from validation samples (T, kappa, beta, weights, gate, guard) to copies of them,
too: faint, with noise, and with a square or stretch of them missing, none of them as above.

    python benchmarks/gate.py
    python benchmarks/gate.py --data DIR --tasks digits,mnist,uci-har,spoken-digits --seeds 60,61 --json gate.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from default_method import SETTINGS, changed, paired, source_of
from script import finish, parser_of, say, several
from sklearn.metrics import roc_auc_score

import fedge
from coordinator.simulation.federation import partition_samples
from deploy.inference.engines import SeparateEngine
from deploy.inference.runtime import Runtime
from fedge.bundle.energies import compute_free_energy
from fedge.bundle.formula import Formula, compute_gate_scores, fuse
from fedge.bundle.manifest import Reference
from fedge.data import preprocessing
from fedge.tasks import DeviceData, Share

TASKS: Final[Mapping[str, str]] = {
    "digits": "digits, alpha 0.5",
    "mnist": "MNIST, alpha 0.5",
    "fashion-mnist": "Fashion, alpha 0.5",
    "uci-har": "HAR, 60 windows each",
    "spoken-digits": "spoken digits, 6 speakers",
}
"""Settings of `default_method.py`."""
VARIANTS: Final = ("as it is", "no gate", "no energy", "neither", "equal", "shift", "tempered")
MEASURES: Final = ("accuracy", "nll", "ece")
WARNINGS: Final = ("energy", "probability")
STRANGERS: Final = 200
"""Samples of others that a device is asked about, at most, of each kind."""
BINS: Final = 10
Samples = tuple[np.ndarray, np.ndarray]


def kinds(device: str, shares: Mapping[str, Share], rng: np.random.Generator) -> dict[str, Samples]:
    """What a device is asked about, raw samples with labels."""
    own = shares[device]
    x, y = own.x_test.astype(np.float64), own.y_test
    dead = x.copy()
    rows = np.moveaxis(dead, -2 if x.ndim > 2 else 1, 1)  # of an image, whatever the order of its axes
    rows[:, : max(1, rows.shape[1] // 3)] = x.min()
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


def parts_of(runtime: Runtime) -> SeparateEngine:
    """Nothing else has a bundle's parts."""
    engine = runtime._engine  # noqa: SLF001
    assert isinstance(engine, SeparateEngine)
    return engine


def variants(runtime: Runtime, shifted: Runtime, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Probabilities (n, C) of model inputs, with all of the mixture and with parts taken out; free energies (n,)."""
    engine = parts_of(runtime)
    how, n = engine._how, len(runtime.manifest.candidates)  # noqa: SLF001
    logits = [engine._compute_logits(k, x) for k in range(n)]  # noqa: SLF001
    share = np.array([c.weight for c in runtime.manifest.candidates])
    omega = np.log(np.maximum(share, 1e-38)).astype(np.float32)

    def with_weights(log_weights: np.ndarray) -> Formula:
        return replace(how, out=np.zeros_like(how.out), out_bias=log_weights)

    def with_beta(formula: Formula, beta: float) -> Formula:
        return replace(formula, beta=np.float32(beta))

    ungated = with_weights(omega)
    equal = with_weights(np.where(share > 0, np.float32(0), omega))
    in_shift = parts_of(shifted)._how  # noqa: SLF001
    formulas = (how, ungated, with_beta(how, 0), with_beta(ungated, 0), with_beta(equal, 0), in_shift)
    found = [fuse(formula, logits, compute_gate_scores(formula, x)) for formula in formulas]
    p, weights, energies = found[0]
    free = compute_free_energy(weights, energies)
    yardstick = runtime.manifest.reference
    bound = yardstick.outlier_above if isinstance(yardstick, Reference) else np.inf
    powers = p ** (1 / (1 + np.maximum(free - bound, 0)))[:, np.newaxis]
    tempered = powers / powers.sum(axis=1, keepdims=True)
    return dict(zip(VARIANTS, [*(p for p, _, _ in found), tempered], strict=True)), free


def augmented(own: DeviceData) -> DeviceData:
    """The data of a device with worse copies of its validation samples, too."""
    rng, x = np.random.default_rng(len(own.y_val)), own.x_val
    holes = x.copy()
    for sample in holes:
        hole = tuple(slice(at, at + max(1, size // 2)) for size in sample.shape for at in [rng.integers(size)])
        sample[hole if sample.ndim == 1 else (slice(None), *hole[1:])] = x.min(initial=0)
    noisy = x + rng.normal(0, rng.uniform(0.1, 0.9, (len(x), *(1,) * (x.ndim - 1))), x.shape)
    copies = np.concatenate([x, x * 0.7, noisy, holes]).astype(np.float32)
    marks = None if own.sensitive_val is None else np.tile(own.sensitive_val, 4)
    return DeviceData(own.x_train, own.y_train, own.sensitive, copies, np.tile(own.y_val, 4), marks)


def measured(task: str, given: argparse.Namespace, seed: int) -> dict[tuple[str, str, str], float]:
    """Each measure of each kind and variant, the warnings; beta under ("pooled", "beta", "")."""
    settings: dict[str, Any] = {**SETTINGS[TASKS[task]], "method": given.method, "rounds": given.rounds}
    probabilities: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    told: dict[tuple[str, str], list[float]] = defaultdict(list)
    found: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(str(settings.pop("set")), given.data, Path(folder))
        with changed(augmented) if given.augmented else nullcontext():
            done = fedge.simulate(
                seed=seed,
                global_test=0.0,
                hardware="none",
                out=Path(folder) / "out",
                progress=None,
                **settings,
                **source,
            )
        federation = partition_samples(done.scenario, seed)
        for number, device in enumerate(federation.shares):
            runtime = fedge.load(done.get_bundle(device), engine="separate")
            shifted = fedge.load(done.get_bundle(device), engine="separate", mode="shift")
            found["pooled", "beta", ""] = float(runtime.manifest.fusion.beta)
            own: dict[str, np.ndarray] = {}
            for kind, (x, y) in kinds(device, federation.shares, np.random.default_rng((seed, number))).items():
                by_variant, free = variants(runtime, shifted, preprocessing.preprocess(federation.task, x))
                for variant, p in by_variant.items():
                    probabilities[kind, variant].append((p, y))
                strange = {"energy": free, "probability": -by_variant["as it is"].max(axis=1)}
                own = own or strange
                for warning, scores in strange.items():
                    others = np.repeat([0, 1], [len(own[warning]), len(scores)])
                    told[kind, warning].append(roc_auc_score(others, np.concatenate([own[warning], scores])))
    return found | figures_of(probabilities, told)


def figures_of(
    probabilities: Mapping[tuple[str, str], Sequence[tuple[np.ndarray, np.ndarray]]],
    told: Mapping[tuple[str, str], Sequence[float]],
) -> dict[tuple[str, str, str], float]:
    """Each measure of each kind and variant, of each device's probabilities and labels; means of areas as "auc"."""
    found = {(kind, warning, "auc"): float(np.mean(areas)) for (kind, warning), areas in told.items()}
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
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the data sets (docs/results/fedge.md)")
    parser.add_argument(
        "--tasks", type=several(), default=["digits"], help=f"some of {','.join(TASKS)} (default digits)"
    )
    parser.add_argument("--seeds", type=several(int), default=[60, 61, 62], help="with commas (default 60,61,62)")
    parser.add_argument("--method", default="fedge", help="such as benchmarks.default_method:PooledWeights")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--augmented", action="store_true", help="see above")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for task in given.tasks:
        runs = []
        for seed in given.seeds:
            say(f"{task}, seed {seed}")
            runs.append(measured(task, given, seed))
        print(f"{task}: beta {' '.join(str(run['pooled', 'beta', '']) for run in runs)}; accuracy / nll / ece")
        print(f"| inputs | {' | '.join(VARIANTS)} | as it is - neither | told by {', '.join(WARNINGS)} |")
        print("|---" * (len(VARIANTS) + 3) + "|")
        for kind in dict.fromkeys(kind for run in runs for kind, _, measure in run if measure):
            there = [run for run in runs if (kind, VARIANTS[0], MEASURES[0]) in run]  # devices may know every class
            every = {m: np.array([[run[kind, v, m] for v in VARIANTS] for run in there]) for m in MEASURES}
            means = [every[m].mean(axis=0) for m in MEASURES]
            cells = [f"{a:.1f} / {nll:.3f} / {e:.1f}" for a, nll, e in zip(*means, strict=True)]
            pairs = {m: every[m][:, 0] - every[m][:, VARIANTS.index("neither")] for m in MEASURES}
            gains = [paired(p, 3) for p in pairs.values()]
            areas = {w: [run[kind, w, "auc"] for run in there] for w in WARNINGS}
            told = ", ".join(f"{np.mean(area):.2f}" for area in areas.values())
            print(f"| {kind} | {' | '.join(cells)} | {' / '.join(gains)} | {told} |", flush=True)
            figures.setdefault(task, {})[kind] = {m: every[m].tolist() for m in MEASURES} | areas
    finish(given, figures)


if __name__ == "__main__":
    main()
