"""The approximate engines and the shift mode on trained mixtures: what do they save, what do they cost?

    python benchmarks/engines.py [--json FILE] [--seeds 0,1,2,3,4] [--devices 2] [--settings independent,fedavg]

Nine devices hold handwritten digits (8 x 8, drawn as 28 x 28) of unequal classes, Dirichlet(0.3). Their networks,
cnn28, are trained for:

    independent    a start of its own for each device, 40 epochs
    fedavg         one start, 25 rounds of FedAvg with 2 epochs each, then 10 epochs on each device

A device's candidates are its own network and the eight others. They are mixed in three ways:

    formula      raw energies and a gate trained through them, on training and validation samples, without decay;
                 the targets of lazy evaluation are about this one
    scmoe-pfl    the same with the decay of the method's devices (edge_agent/steps/mixture/fit_mixture.py)
    fedge        shrunken weights, bounded energies, gate with more decay, by the validation samples alone

`local`: a device's own test samples; `global`: 100 of all. Processor time of single samples, engines in turn, within
one process. Engines are measured on the devices with the most test samples; the formula is compared with a gate alone
(no energy, trained without it) on all nine.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
import torch
from inference import TASKS, Target
from script import digit_images, finish, parser_of, several

import deploy
from edge_agent.learning.gate import train_gate
from edge_agent.learning.mixture import compute_energy_statistics
from edge_agent.steps.mixture import fit_mixture
from export import Candidate, Mixture, write_bundle
from export.int8 import Int8Limits, quantise_bundle
from export.parity import compute_logits, make_formula
from fedge.bundle.formula import compute_gate_scores, fuse, standardise
from fedge.bundle.manifest import read_bundle
from fedge.data.problems.formulas import fit_em_weights
from fedge.data.problems.maths import log_softmax, logsumexp
from fedge.data.validation import Validation
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

TASK = TASKS["cnn28"]
N_DEVICES = 9
KINDS = ("formula", "scmoe-pfl", "fedge")
ROLES = (Role.PRIVATE, *[Role.EXPERT] * (N_DEVICES - 1))
N_GLOBAL = 100
EPOCHS, ROUNDS, EPOCHS_OF_A_ROUND, EPOCHS_AFTERWARDS = 40, 25, 2, 10
BETA = 0.5
PRIOR = np.full(10, -np.log(10))
SHRINKAGE = 20.0
"""As a device of the method fedge fits the weights of its candidates, in samples."""


def partition(y: np.ndarray, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Indices of the devices' training, validation and test samples: 60, 20, 20 %."""
    hands: list[list[int]] = [[] for _ in range(N_DEVICES)]
    for c in range(10):
        of_class = rng.permutation(np.flatnonzero(y == c))
        shares = rng.dirichlet(np.full(N_DEVICES, 0.3)).cumsum()[:-1]
        for hand, piece in zip(hands, np.split(of_class, (shares * len(of_class)).astype(int)), strict=True):
            hand.extend(piece.tolist())
    devices = []
    for hand in hands:
        mixed = rng.permutation(np.array(hand, np.int64))
        a, b = int(0.6 * len(mixed)), int(0.8 * len(mixed))
        devices.append({"train": mixed[:a], "validation": mixed[a:b], "test": mixed[b:]})
    return devices


# ------------------------------------------------------------------------------------------------- networks


def networks(setting: str, network: Network, data: tuple, hands: list[dict], seed: int) -> list[Model]:
    """Each device's own network."""
    x, y = data

    def learn(start: Model, k: int, epochs: int, stage: int) -> Model:
        train = hands[k]["train"]
        return trained(network, start, x[train], y[train], np.random.default_rng([seed, k, stage]), epochs)

    if setting == "independent":
        return [learn(make_initial_model(TASK, seed * 100 + k)[1], k, EPOCHS, 0) for k in range(N_DEVICES)]
    shared = make_initial_model(TASK, seed)[1]
    sizes = np.array([len(hand["train"]) for hand in hands])
    for t in range(ROUNDS):
        updated = [learn(shared, k, EPOCHS_OF_A_ROUND, t).params for k in range(N_DEVICES)]
        shared = Model(np.average(updated, axis=0, weights=sizes).astype(np.float32), shared.buffers, shared.counters)
    return [learn(shared, k, EPOCHS_AFTERWARDS, ROUNDS) for k in range(N_DEVICES)]


def trained(
    network: Network, start: Model, x: np.ndarray, y: np.ndarray, rng: np.random.Generator, epochs: int
) -> Model:
    network.load(start)
    optimiser = torch.optim.Adam(network.module.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(len(x)), max(1, len(x) // 16)):
            logits = network.module(torch.from_numpy(x[batch]))
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[batch]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return network.dump()


# ------------------------------------------------------------------------------------------------- mixtures


def scmoe_mixture(
    own: list[Model], logits: np.ndarray, x: np.ndarray, y: np.ndarray, *, decay: float, energy: bool = True
) -> Mixture:
    """The formula of SCMoE-PFL, its gate trained as by the step `fit_mixture`; `energy` False: the gate alone."""
    log_p, scores = log_softmax(logits)[:, np.arange(len(y)), y].T, logsumexp(logits).T * energy
    weights = train_gate(x, log_p, scores, seed=0, decay=decay, experts=range(1, len(own)), top=2)
    candidates = tuple(Candidate(role, f"c{k}", own[k], PRIOR) for k, role in enumerate(ROLES))
    return Mixture(candidates, float(energy), weights, energy_clip=np.inf)


def fedge_mixture(own: list[Model], logits: np.ndarray, x: np.ndarray, y: np.ndarray) -> Mixture:
    """Weights, energies and gate as fedge fits them."""
    energies = logsumexp(logits).T
    mean, std = compute_energy_statistics(energies)
    log_p = log_softmax(logits)[:, np.arange(len(y)), y].T
    pooled = np.array([0.5, *[0.5 / (len(own) - 1)] * (len(own) - 1)])
    weights = fit_em_weights(log_p, pooled, SHRINKAGE)
    scores = np.log(weights) + BETA * standardise(energies, mean, std)
    gate = train_gate(x, log_p, scores, seed=0, experts=range(1, len(own)), top=2)
    candidates = tuple(
        Candidate(role, f"c{k}", own[k], PRIOR, energy_mean=mean[k], energy_std=std[k], weight=weights[k])
        for k, role in enumerate(ROLES)
    )
    return Mixture(candidates, BETA, gate)


def own_first(models: list[Model], device: int) -> list[Model]:
    return [models[device], *(model for k, model in enumerate(models) if k != device)]


def formula_and_gate(models: list[Model], layout, data: tuple, hands: list[dict]) -> dict[str, dict[str, float]]:
    """Accuracy and NLL on the devices' own test samples, pooled over the devices: with energy, and the gate alone."""
    x, y = data
    log_p: dict[str, list[float]] = {"formula": [], "gate alone": []}
    right: dict[str, list[bool]] = {"formula": [], "gate alone": []}
    for device, hand in enumerate(hands):
        own, fit, test = own_first(models, device), np.concatenate([hand["train"], hand["validation"]]), hand["test"]
        seen, new = (compute_logits(TASK, layout, own, x[where]).astype(np.float64) for where in (fit, test))
        for name in log_p:
            made = scmoe_mixture(own, seen, x[fit], y[fit], decay=0.0, energy=name == "formula")
            how = make_formula(TASK, made)
            p = fuse(how, list(new), compute_gate_scores(how, x[test].astype(np.float64)))[0]
            log_p[name] += np.log(np.maximum(p[np.arange(len(test)), y[test]], 1e-12)).tolist()
            right[name] += (p.argmax(axis=1) == y[test]).tolist()
    return {name: {"accuracy": float(np.mean(right[name])), "nll": -float(np.mean(log_p[name]))} for name in log_p}


# ------------------------------------------------------------------------------------------------- engines


def single_sample_ms(folder: Path, x: np.ndarray, engines: Sequence[str], rounds: int = 5) -> dict[str, float]:
    """Ratio of each engine's processor time to the fused graph's: the median over the rounds."""
    runtimes = {engine: deploy.load(folder, engine=engine) for engine in engines}
    times = []
    for _ in range(rounds):
        spent = {}
        for engine, runtime in runtimes.items():
            begin = time.thread_time()
            for i in range(len(x)):
                runtime.predict_inputs(x[i : i + 1])
            spent[engine] = time.thread_time() - begin
        times.append(spent)
    return {engine: median(spent[engine] / spent["fused"] for spent in times) for engine in engines}


def measure(
    mixture: Mixture, layout, data: tuple, seen: np.ndarray, where: dict[str, np.ndarray], folder: Path, *, int8: bool
) -> dict[str, object]:
    """What the engines make of a mixture; the bounds of lazy come from the samples `seen` that the gate was fit to."""
    x, y = data
    write_bundle(
        folder / "fp32", task=TASK, layout=layout, mixture=mixture, validation=x[seen], release=1, method="benchmark",
        metrics={},
    )  # fmt: skip
    runs: dict[str, dict[str, str]] = {
        "fused": {}, "lazy": {"engine": "lazy"}, "separate": {"engine": "separate"}, "shift": {"mode": "shift"},
    }  # fmt: skip
    bundle = folder / "fp32"
    if int8:
        bundle = folder / "int8"
        none = Int8Limits(accuracy_drop=1.0, agreement=0.0, latency_ratio=math.inf)
        quantise_bundle(read_bundle(folder / "fp32"), Validation(x[seen], y[seen]), bundle, none)
        runs["int8"] = {"engine": "int8"}
    row: dict[str, object] = {}
    for name, test in where.items():
        found = {run: deploy.load(bundle, **how).predict_inputs(x[test]) for run, how in runs.items()}
        fused = found["fused"]
        row[name] = {
            "n": len(test),
            "run": int(np.isfinite(found["lazy"].energies[:, 1:]).sum()),
            "accuracy": {run: float((p.class_index == y[test]).mean()) for run, p in found.items()},
            "agrees": {run: int((p.class_index == fused.class_index).sum()) for run, p in found.items()},
            "dp": {run: np.abs(p.probabilities - fused.probabilities).max(axis=1).tolist() for run, p in found.items()},
        }
    engines = [run for run in runs if run != "shift"]
    row["ratios"] = single_sample_ms(bundle, x[where["local"]][:40], engines)
    return row


# ------------------------------------------------------------------------------------------------- main


class Rows:
    """What was measured of one kind of mixtures, in one setting or in all."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def n(self, where: str) -> int:
        return sum(row[where]["n"] for row in self.rows)

    def share_run(self, where: str = "local") -> float:
        return sum(row[where]["run"] for row in self.rows) / (N_DEVICES - 1) / self.n(where)

    def agreement(self, engine: str, where: str = "local") -> float:
        return sum(row[where]["agrees"][engine] for row in self.rows) / self.n(where)

    def dp(self, engine: str, percentile: float, where: str = "local") -> float:
        everything = np.concatenate([row[where]["dp"][engine] for row in self.rows])
        return float(np.percentile(everything, percentile))

    def ratio(self, engine: str) -> float:
        return median(row["ratios"][engine] for row in self.rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2, 3, 4])
    parser.add_argument("--devices", type=int, default=2, help="for how many of the nine engines are measured")
    parser.add_argument("--settings", type=several(), default=["independent", "fedavg"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = digit_images(28)
    network = Network(TASK)
    rows: list[dict] = []
    pairs: list[dict] = []
    settings = arguments.settings
    for setting in settings:
        for seed in arguments.seeds:
            hands = partition(data[1], np.random.default_rng(seed))
            models = networks(setting, network, data, hands, seed)
            pairs.append({"setting": setting, "seed": seed} | formula_and_gate(models, network.layout, data, hands))
            print(setting, "seed", seed, {k: pairs[-1][k] for k in ("formula", "gate alone")}, flush=True)
            largest = sorted(range(N_DEVICES), key=lambda k: -len(hands[k]["test"]))[: arguments.devices]
            for device in largest:
                for kind in KINDS:
                    found = measured(kind, device, models, network.layout, data, hands)
                    rows.append({"setting": setting, "seed": seed, "device": device, "kind": kind} | found)
                    one = Rows(rows[-1:])
                    print(
                        f"  {kind} device {device}: lazy runs {one.share_run():.2f} of the experts; {found['ratios']}"
                    )
    reached = targets(rows, pairs, settings)
    print("\nTargets, over all seeds and devices")
    print("\n".join(map(str, reached)))
    print("\nWithout target")
    for kind, verdict in (("scmoe-pfl", "look at your bundle"), ("fedge", "lazy does not pay here")):
        of_kind = Rows([row for row in rows if row["kind"] == kind])
        print(
            f"{kind}: lazy runs {of_kind.share_run():.2f} of the experts (global {of_kind.share_run('global'):.2f}), "
            f"class as fused {of_kind.agreement('lazy'):.4f}, {of_kind.ratio('lazy'):.2f} of fused's time: {verdict}"
        )
    record = {"rows": rows, "pairs": pairs, "targets": [asdict(target) | {"met": target.met} for target in reached]}
    finish(arguments, record)


def measured(kind: str, device: int, models: list[Model], layout, data: tuple, hands: list[dict]) -> dict[str, object]:
    """One device's mixture of a kind, in all engines; in 8 bits fedge's, which is what a device has by default."""
    x, y = data
    hand, own = hands[device], own_first(models, device)
    everybody = np.concatenate([each["test"] for each in hands])
    where = {"local": hand["test"], "global": np.random.default_rng(0).permutation(everybody)[:N_GLOBAL]}
    seen = hand["validation"] if kind == "fedge" else np.concatenate([hand["train"], hand["validation"]])
    logits = compute_logits(TASK, layout, own, x[seen]).astype(np.float64)
    if kind == "fedge":
        mixture = fedge_mixture(own, logits, x[seen], y[seen])
    else:
        decay = 0.0 if kind == "formula" else fit_mixture.DECAY
        mixture = scmoe_mixture(own, logits, x[seen], y[seen], decay=decay)
    with tempfile.TemporaryDirectory() as folder:
        return measure(mixture, layout, data, seen, where, Path(folder), int8=kind == "fedge")


def targets(rows: list[dict], pairs: list[dict], settings: list[str]) -> list[Target]:
    found = []
    for setting in settings:
        raw = Rows([row for row in rows if row["setting"] == setting and row["kind"] == "formula"])
        found += [
            Target(f"lazy, formula, J = 8, local, {setting}: share of experts run", raw.share_run(), 0.40),
            Target(f"lazy, formula, local, {setting}: class as fused", raw.agreement("lazy"), 0.998, at_least=True),
            Target(f"lazy, formula, {setting} / fused, batch 1", raw.ratio("lazy"), 0.45),
        ]
    everything, soft = Rows(rows), Rows([row for row in rows if row["kind"] == "fedge"])
    found += [
        Target("separate: max |dp| to fused", everything.dp("separate", 100), 1e-6),
        Target("int8 / fused, batch 1", soft.ratio("int8"), 0.75),
        Target("int8, local: class as fused", soft.agreement("int8"), 0.995, at_least=True),
        Target("int8, local: p99 of max |dp|", soft.dp("int8", 99), 0.03),
    ]
    for setting in settings:
        of_setting = [pair for pair in pairs if pair["setting"] == setting]
        better = np.mean([p["formula"]["accuracy"] > p["gate alone"]["accuracy"] for p in of_setting])
        likelier = np.mean([p["formula"]["nll"] < p["gate alone"]["nll"] for p in of_setting])
        found += [
            Target(f"formula above gate alone, {setting}: accuracy, share of seeds", float(better), 0.8, at_least=True),
            Target(f"formula below gate alone, {setting}: NLL, share of seeds", float(likelier), 1.0, at_least=True),
        ]
    return found


if __name__ == "__main__":
    main()
