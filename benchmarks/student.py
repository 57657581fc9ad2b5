"""What a student is worth beside the mixture that it was distilled from, and beside fine-tuning alone.

Each device of a run of `fedge` (30 rounds, everybody) installs its mixture and, in the same run once more, its student
(docs/methods/student.md). Both answer the kinds of inputs of `gate.py`, and so does the private model alone, which is
the shared model fine-tuned on the device, with its own temperature and class shares.

Rows are means over the devices, then over the seeds, of accuracy in %, mean negative log-likelihood in nats and
expected calibration error in points. Then the paired differences of the student to the two others, with the standard
error over the seeds, and how well samples of this kind are told from the device's own by the free energy of mixture and
student (the area under the curve, 0.5: not at all).

`--smaller "NETWORK:NAME=VALUE,...; ..."` also trains students of other networks. They begin at random weights, take
2,000 steps in place of 200, and have the temperature 1 and no class shares. Their columns are accuracy, then accuracy
and likelihood minus the mixture's.

Below: candidates of a mixture, and which share of the devices installed the student. At the end, as `inference.py`
measures it: processor time of an answer by bundles of M candidates with random weights, batch 1, one thread, without
preprocessing, all in turn in each of 7 rounds. A student is a bundle of one; ratios are medians over the rounds.

    python benchmarks/student.py
    python benchmarks/student.py --data DIR --settings "digits, alpha 0.5; MNIST, alpha 0.5" --seeds 70,71 --json s.json
    python benchmarks/student.py --settings "digits, alpha 0.5" --model cnn
    python benchmarks/student.py --smaller "mlp:hidden=16; mlp:hidden=8"
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from default_method import SETTINGS, paired, parser_of_settings, source_of
from gate import figures_of, kinds, parts_of
from inference import Subject, time_rounds
from msgspec import structs
from script import finish, say
from sklearn.metrics import roc_auc_score

import fedge
from coordinator.simulation.federation import partition_samples
from deploy.inference.runtime import Runtime
from export import Candidate, student
from export.student import STUDENT, Teach, train_student
from fedge.bundle.energies import compute_free_energy
from fedge.bundle.formula import compute_gate_scores, fuse
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.system.stopping import never
from fedge.wire.messages import Role

VARIANTS: Final = ("mixture", "fine-tuned", STUDENT)
MEASURES: Final = ("accuracy", "nll", "ece")
ROUNDS: Final = 7
CANDIDATES: Final = (1, 2, 3, 4)
NETWORKS: Final = ("mlp", "cnn28", "cnn32")
SMALLER_STEPS: Final = 2000


def answers(runtime: Runtime, x: np.ndarray, *, alone: Role | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, C) of model inputs, of all candidates or of one alone, and free energies (n,)."""
    engine = parts_of(runtime)
    how, candidates = engine._how, runtime.manifest.candidates  # noqa: SLF001
    if alone is not None:
        chosen = np.array([candidate.role is alone for candidate in candidates])
        omega = np.log(np.where(chosen, 1, 1e-38)).astype(np.float32)
        how = replace(how, out=np.zeros_like(how.out), out_bias=omega, beta=np.float32(0), guard=np.float32(0))
    logits = [engine._compute_logits(k, x) for k in range(len(candidates))]  # noqa: SLF001
    p, weights, energies = fuse(how, logits, compute_gate_scores(how, x))
    return p, compute_free_energy(weights, energies)


def parse_network(text: str) -> tuple[str, dict[str, int]]:
    """A network's name and options, as in mlp:hidden=16."""
    name, _, options = text.strip().partition(":")
    return name, {key: int(value) for key, value in (each.split("=") for each in options.split(",") if each)}


def make_teacher(runtime: Runtime) -> Teach:
    """A runtime's answers, as a function from model inputs to probabilities."""
    return lambda x: answers(runtime, x)[0]


def train_smaller(task: TaskSpec, teach: Teach, x: np.ndarray, rng: np.random.Generator) -> Teach:
    """A student of a network that nobody has weights of, as a function from model inputs to probabilities."""
    flat = np.zeros(len(task.classes))
    begin = Candidate(Role.PRIVATE, STUDENT, make_initial_model(task, int(rng.integers(2**31)))[1], flat)
    with patch.object(student, "STEPS", SMALLER_STEPS):
        learned = train_student(network := Network(task), teach, begin, x, rng, never)
    return lambda inputs: np.exp(
        task.problem.calibrate(network.compute_logits(learned.model, inputs), learned.calibration, flat).values
    )


def times_of(network: str, folder: Path) -> dict[int, tuple[float, float]]:
    """Processor time of an answer in ms by the number of candidates, and its ratio to that of one."""
    subjects = {m: Subject(network, m - 1, folder / f"{network}-{m}") for m in CANDIDATES}
    x = np.random.default_rng(0).random((1, *subjects[1].task.input_shape), np.float32)
    runs = {m: fedge.load(subject.folder)._engine.run for m, subject in subjects.items()}  # noqa: SLF001
    calls = {"floor" if m == 1 else str(m): partial(run, x) for m, run in runs.items()}
    rounds = [[median(each) for each in times.values()] for times in time_rounds(calls, ROUNDS)]
    return {
        m: (median(times[k] for times in rounds), median(times[k] / times[0] for times in rounds))
        for k, m in enumerate(CANDIDATES)
    }


def measured(setting: str, given: argparse.Namespace, seed: int) -> dict[tuple[str, str, str], float]:
    """Each measure of each kind and variant, with "auc" for areas; what concerns all devices under ("", "", NAME)."""
    settings: dict[str, Any] = {**SETTINGS[setting], "method": given.method, "rounds": given.rounds}
    if given.model:
        settings["model"] = given.model
    probabilities: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    told: dict[tuple[str, str], list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(str(settings.pop("set")), given.data, Path(folder))
        both = {
            name: fedge.simulate(
                seed=seed,
                global_test=0.0,
                hardware="none",
                out=Path(folder) / name,
                progress=None,
                student=name == STUDENT,
                **settings,
                **source,
            )
            for name in ("mixture", STUDENT)
        }
        federation = partition_samples(both[STUDENT].scenario, seed)
        for number, device in enumerate(federation.shares):
            runtimes = {name: fedge.load(done.get_bundle(device), engine="separate") for name, done in both.items()}
            candidates = {name: runtime.manifest.candidates for name, runtime in runtimes.items()}
            whole["candidates"].append(len(candidates["mixture"]))
            whole["installed"].append(candidates[STUDENT][0].name == STUDENT)
            rng, own = np.random.default_rng((seed, number, 1)), dict[str, np.ndarray]()
            teach = make_teacher(runtimes["mixture"])
            others = {
                text: train_smaller(
                    structs.replace(federation.task, model=name, model_options=options),
                    teach,
                    preprocessing.preprocess(federation.task, federation.shares[device].x_train),
                    rng,
                )
                for text in given.smaller
                for name, options in [parse_network(text)]
            }
            for kind, (raw, y) in kinds(device, federation.shares, np.random.default_rng((seed, number))).items():
                x = preprocessing.preprocess(federation.task, raw)
                found_of = {name: answers(runtime, x) for name, runtime in runtimes.items()}
                role = Role.PRIVATE if any(c.role is Role.PRIVATE for c in candidates["mixture"]) else None
                alone, _ = answers(runtimes["mixture"], x, alone=role)
                every = {name: found[0] for name, found in found_of.items()} | {"fine-tuned": alone}
                for name, p in (every | {name: other(x) for name, other in others.items()}).items():
                    probabilities[kind, name].append((p, y))
                strange = {name: free for name, (_, free) in found_of.items()}
                own = own or strange
                for name, scores in strange.items():
                    strangers = np.repeat([0, 1], [len(own[name]), len(scores)])
                    told[kind, name].append(roc_auc_score(strangers, np.concatenate([own[name], scores])))
    found = {("", "", name): float(np.mean(each)) for name, each in whole.items()}
    return found | figures_of(probabilities, told)


def main() -> None:
    parser = parser_of_settings(__doc__, seeds=[70, 71, 72, 73, 74])
    parser.add_argument("--smaller", type=lambda text: text.split(";"), default=[], help="see above")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for setting in given.settings:
        runs = []
        for seed in given.seeds:
            say(f"{setting}, seed {seed}")
            runs.append(measured(setting, given, seed))
        print(f"{setting}: accuracy / nll / ece")
        others = VARIANTS[:2]
        heads = [*VARIANTS, *(f"student - {o}" for o in others), *given.smaller, "told"]
        print(f"| inputs | {' | '.join(heads)} |")
        print("|---" * (1 + len(heads)) + "|")
        for kind in dict.fromkeys(kind for run in runs for kind, _, _ in run if kind):
            there = [run for run in runs if (kind, STUDENT, MEASURES[0]) in run]  # devices may know every class
            every = {m: np.array([[run[kind, v, m] for v in VARIANTS] for run in there]) for m in MEASURES}
            means = [every[m].mean(axis=0) for m in MEASURES]
            cells = [f"{a:.1f} / {nll:.3f} / {e:.1f}" for a, nll, e in zip(*means, strict=True)]
            gains = [
                f"{paired(every['accuracy'][:, 2] - every['accuracy'][:, k])} / "
                f"{paired(every['nll'][:, 2] - every['nll'][:, k], 3)}"
                for k in range(2)
            ]
            for name in given.smaller:
                apart = {m: np.array([run[kind, name, m] - run[kind, "mixture", m] for run in there]) for m in MEASURES}
                accuracy = np.mean([run[kind, name, "accuracy"] for run in there])
                gains.append(f"{accuracy:.1f}; {paired(apart['accuracy'])} / {paired(apart['nll'], 3)}")
            areas = [f"{np.mean([run[kind, v, 'auc'] for run in there]):.2f}" for v in ("mixture", STUDENT)]
            print(f"| {kind} | {' | '.join(cells)} | {' | '.join(gains)} | {', '.join(areas)} |", flush=True)
            figures.setdefault(setting, {})[kind] = {m: every[m].tolist() for m in MEASURES}
        whole = {name: float(np.mean([run["", "", name] for run in runs])) for name in ("candidates", "installed")}
        print(", ".join(f"{name} {value:.2f}" for name, value in whole.items()), flush=True)
        figures[setting]["all"] = whole
    with tempfile.TemporaryDirectory() as folder:
        for network in NETWORKS:
            found = times_of(network, Path(folder))
            print(f"{network}: " + ", ".join(f"M = {m}: {ms:.3f} ms, {r:.2f} x" for m, (ms, r) in found.items()))
            figures[network] = {str(m): {"ms": ms, "ratio": ratio} for m, (ms, ratio) in found.items()}
    finish(given, figures)


if __name__ == "__main__":
    main()
