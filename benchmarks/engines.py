"""The approximate engines and the shift mode on trained mixtures: what do they save, what do they cost?

    python benchmarks/engines.py [--json FILE] [--devices 3] [--seed 0] [--epochs 6] [--raw]

Nine devices hold handwritten digits (8 x 8, drawn as 28 x 28) of unequal classes, Dirichlet(0.3). Each trains a network
of its own (cnn28, independent starts). A device's mixture is its own network and those of the eight others, weights
and gate fitted to its validation samples as in fedge, beta 0.5; --raw: energies neither standardised nor bounded, as in
SCMoE-PFL. `local`: its own test samples; `global`: all.
Processor time of single samples, engines in turn, within one process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
import torch
from inference import TASKS, Target

import deploy
from edge_agent.gate import train_gate
from edge_agent.mixture import em_weights, energy_statistics, raw_energies, standardised
from export import Candidate, Mixture, write_bundle
from export.int8 import Int8Limits, quantise
from export.mixture import ENERGY_CLIP
from export.parity import logits_of
from fedge.bundle import read
from fedge.messages import Role
from fedge.models import initial
from fedge.models.training import Network
from fedge.validation import Validation

TASK = TASKS["cnn28"]
N_DEVICES = 9
BETA = 0.5
SHRINKAGE = 20.0
"""As a device of the method fedge fits the weights of its candidates, in samples."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))
    return np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].astype(np.float32), y.astype(np.int64)


def dealt(y: np.ndarray, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
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


def trained(network: Network, x: np.ndarray, y: np.ndarray, seed: int, epochs: int) -> object:
    network.load(initial(TASK, seed)[1])
    optimiser = torch.optim.Adam(network.module.parameters(), 1e-3)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(len(x)), max(1, len(x) // 16)):
            logits = network.module(torch.from_numpy(x[batch]))
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[batch]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return network.dump()


def mixture_for(device: int, models: list, layout, x: np.ndarray, y: np.ndarray, *, raw: bool) -> Mixture:
    """Private first, then the others; calibrated and gated on the device's validation samples."""
    own = [models[device], *(model for k, model in enumerate(models) if k != device)]
    logits = logits_of(TASK, layout, own, x).astype(np.float64)
    mean, std = energy_statistics(raw_energies(logits))
    log_q = logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)
    log_p = log_q[:, np.arange(len(y)), y].T
    pooled = np.array([0.5, *[0.5 / (len(own) - 1)] * (len(own) - 1)])
    weights = em_weights(log_p, pooled, SHRINKAGE)
    beta, clip = (1.0, np.inf) if raw else (BETA, ENERGY_CLIP)
    if raw:
        mean, std = np.zeros(len(own)), np.ones(len(own))
    scores = np.log(weights) + beta * standardised(raw_energies(logits), mean, std, clip)
    gate = train_gate(x, log_p, scores, seed=0, experts=range(1, len(own)), top=2)
    roles = [Role.PRIVATE, *[Role.EXPERT] * (len(own) - 1)]
    candidates = tuple(
        Candidate(roles[k], f"c{k}", own[k], energy_mean=mean[k], energy_std=std[k], weight=weights[k])
        for k in range(len(own))
    )
    return Mixture(candidates, np.full(10, -np.log(10)), beta, gate, energy_clip=clip)


def outputs(folder: Path, x: np.ndarray, **how) -> deploy.Prediction:
    return deploy.load(folder, **how).predict_inputs(x)


def single_sample_ms(folder: Path, x: np.ndarray, engines: tuple[str, ...], rounds: int = 5) -> dict[str, float]:
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
    device: int, models: list, layout, data: tuple, hand: dict, everybody: np.ndarray, folder: Path, *, raw: bool
) -> dict:
    x, y = data
    val, test = hand["validation"], hand["test"]
    mixture = mixture_for(device, models, layout, x[val], y[val], raw=raw)
    write_bundle(
        folder / "fp32", task=TASK, layout=layout, mixture=mixture, validation=x[val], release=1, method="benchmark",
        metrics={},
    )  # fmt: skip
    small = folder / "int8"
    report = quantise(
        read(folder / "fp32"), Validation(x[val], y[val]), small, Int8Limits(accuracy_drop=1.0, agreement=0.0)
    )
    row: dict[str, object] = {"device": device, "n_validation": len(val), "n_test": len(test)}
    for name, where in (("local", test), ("global", everybody)):
        fused, lazy, int8, shift, separate = (
            outputs(small, x[where], **how)
            for how in ({}, {"engine": "lazy"}, {"engine": "int8"}, {"mode": "shift"}, {"engine": "separate"})
        )
        row[name] = {
            "accuracy": float((fused.class_index == y[where]).mean()),
            "accuracy_lazy": float((lazy.class_index == y[where]).mean()),
            "accuracy_int8": float((int8.class_index == y[where]).mean()),
            "accuracy_shift": float((shift.class_index == y[where]).mean()),
            "separate_max_dp": float(np.abs(separate.probabilities - fused.probabilities).max()),
            "lazy_run": float(np.isfinite(lazy.energies[:, 1:]).mean()),
            "lazy_agrees": int((lazy.class_index == fused.class_index).sum()),
            "int8_agrees": int((int8.class_index == fused.class_index).sum()),
            "int8_dp": np.abs(int8.probabilities - fused.probabilities).max(axis=1).tolist(),
            "n": len(where),
        }
    row["int8_share_of_bytes"] = report.size_bytes / sum(c.part.size_bytes for c in read(small).manifest.candidates)
    row["ratios"] = single_sample_ms(small, x[test][:40], ("fused", "separate", "lazy", "int8"))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--devices", type=int, default=3, help="for how many of the nine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--raw", action="store_true", help="raw energies, as in SCMoE-PFL")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = digits()
    hands = dealt(y, np.random.default_rng(arguments.seed))
    network = Network(TASK)
    models = [
        trained(network, x[h["train"]], y[h["train"]], arguments.seed * 100 + k, arguments.epochs)
        for k, h in enumerate(hands)
    ]
    everybody = np.concatenate([hand["test"] for hand in hands])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for device in sorted(range(N_DEVICES), key=lambda k: -len(hands[k]["test"]))[: arguments.devices]:
            where = Path(folder) / str(device)
            rows.append(
                measure(device, models, network.layout, (x, y), hands[device], everybody, where, raw=arguments.raw)
            )
            for name in ("local", "global"):
                found = rows[-1][name]
                print(
                    f"device {device} {name:<6} accuracy {found['accuracy']:.3f}, lazy {found['accuracy_lazy']:.3f} "
                    f"(runs {found['lazy_run']:.2f} of the experts), int8 {found['accuracy_int8']:.3f}, "
                    f"shift {found['accuracy_shift']:.3f}", flush=True,
                )  # fmt: skip
            print("  time of a sample / fused:", {k: round(v, 2) for k, v in rows[-1]["ratios"].items()}, flush=True)
    local = [row["local"] for row in rows]
    n = sum(found["n"] for found in local)
    p99 = float(np.percentile(np.concatenate([found["int8_dp"] for found in local]), 99))
    reached = [
        Target("separate: max |dp| to fused", max(row["separate_max_dp"] for row in local), 1e-6),
        Target("lazy, J = 8, local: share of experts run", float(np.mean([f["lazy_run"] for f in local])), 0.40),
        Target("lazy, local: class as fused", sum(f["lazy_agrees"] for f in local) / n, 0.998, at_least=True),
        Target("lazy / fused, batch 1", median(row["ratios"]["lazy"] for row in rows), 0.45),
        Target("int8 / fused, batch 1", median(row["ratios"]["int8"] for row in rows), 0.75),
        Target("int8, local: class as fused", sum(f["int8_agrees"] for f in local) / n, 0.995, at_least=True),
        Target("int8, local: p99 of max |dp|", p99, 0.03),
    ]
    print("\n".join(map(str, reached)))
    if arguments.json:
        record = {"rows": rows, "targets": [asdict(target) | {"met": target.met} for target in reached]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
