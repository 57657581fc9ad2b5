"""FedEPC's tables on real digits: planted groups, accuracy, simulated time to a target.

The settings are those of fedepc.md section 8: 8x8 digits, a fifth for testing, 200 images as the server data (the
paper's proxy set), the rest on the devices, at least 5 each; a 64-64-10 perceptron, plain SGD with batches of 16, 5
epochs a round, 20 % of the devices in a round, 60 rounds. "Personal" is the accuracy on the test images, weighted by
each device's own label shares, mean over devices. Figures in brackets are the specification's; a dash: it has none.

  8.1  adjusted Rand index of the clusters against the planted groups, [mean number of clusters]: profiles by a small
       CNN that was trained on the server data; AIDC with variants, k-means (told the true K), average linkage
  8.2  personal accuracy and models uploaded: FedAvg, FedProx, HACCS, FedEPC with warm-ups of several lengths, CFIC.
       "proxy" rows have the same extractor and unit as 8.1; "no proxy" is the method as it is without a labelled set
  8.3  simulated time to a personal accuracy, as a share of what random selection without a deadline needs; 4 true
       groups of 10 devices with 8 to 70 images, log-normal clocks (sigma 0.6), no warm-up: selection alone differs. A
       round lasts as long as its slowest device (a perceptron takes milliseconds)

--metrics prints of the rows of 8.2 what all methods are measured by instead (worst tenth, macro F1, cost until the
target, ...), of runs of `fedge compare`: there a device keeps 40 % of its images for testing and validation, and trains
on about 22; 180 images are the server data. Those that are done are kept in --out.

    python benchmarks/papers/fedepc.py --quick
    python benchmarks/papers/fedepc.py --seeds 0,1,2,3,4 --json results/fedepc.json
    python benchmarks/papers/fedepc.py --tables 8.2 --rows "fedavg; haccs"
    python benchmarks/papers/fedepc.py --metrics
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from batch_search import greedy_batch
from sklearn.metrics import adjusted_rand_score
from table import add_metrics, add_rows, chosen_rows, compared, finish, measured, plain_parser, say, write

from coordinator.aggregation.protection import Protection
from coordinator.clustering import aidc
from coordinator.clustering.rivals import agglomerative, kmeans
from coordinator.fleet.simulated.devices import Hardware
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.papers.fedepc import FedEpc, FedEpcState
from coordinator.methods.parts.grouping import Description
from coordinator.methods.server.extractor_training import train_network
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import State
from coordinator.selection import ccmab
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from edge_agent.learning.profile import measure_sparsity
from fedge.data.task import TaskSpec
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.steps.sgd import Sgd
from fedge.system.hardware import Processor
from fedge.tasks import DeviceData, Partitioning, load_pool, partition_pool
from fedge.tensors.layout import Codec, unflatten

N_SERVER_DATA, TEST_SHARE, N_DEVICES, CLASSES = 200, 0.2, 40, 10
EPOCHS, BATCH, FEWEST = 5, 16, 5
PI_4_GHZ = 1.8
TARGETS = (0.95, 0.97, 0.98)


# ------------------------------------------------------------------------------------------------------ the images


class Digits:
    """Test, server's and devices' images (n, 1, 8, 8) in [0, 1] with labels, and the server's extractor."""

    def __init__(self, seed: int) -> None:
        whole = load_pool("digits")
        self.spec = msgspec.structs.replace(whole.spec, model="mlp", model_options={"hidden": 64})
        order = np.random.default_rng(seed).permutation(len(whole.y))
        n_test = round(TEST_SHARE * len(order))
        self.test, self.server_data, self.rest = (
            whole.select(part) for part in np.split(order, [n_test, n_test + N_SERVER_DATA])
        )
        task = msgspec.structs.replace(self.spec, model=f"{Path(__file__).stem}:extractor_of_8", model_options={})
        self.extractor = train_network(
            task, np.float32(self.server_data.x[:, None] / 16), self.server_data.y, seed=seed
        ).module
        by_class = [self.profile(self.server_data.x[self.server_data.y == c])[0] for c in range(CLASSES)]
        self.unit = aidc.compute_class_unit(np.stack(by_class))

    def profile(self, x: np.ndarray) -> tuple[np.ndarray, float]:
        found = measure_sparsity(self.extractor, np.float32(x[:, None] / 16))
        return found.shares, found.halves or 0.0


def extractor_of_8(task: TaskSpec) -> torch.nn.Module:
    """Two convolutions of 16 and 32 channels, pooling, 64 units with ReLU, output (section 8)."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, task.n_classes),
    )


# ------------------------------------------------------------------------------------------- 8.1: planted groups

GROUPS = {
    "5x2": [(2 * k, 2 * k + 1) for k in range(5)],
    "4": [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)],
    "2x5": [range(5), range(5, 10)],
    "10x1": [(k,) for k in range(10)],
    "one": [range(10)],
}
SIZES = {  # devices, samples -> the specification's index, of "one" the share of seeds with exactly one cluster
    (20, (20, 40)): (0.96, 0.94, 0.89, 0.93, 0.80),
    (40, (20, 40)): (0.97, 0.98, 0.98, 1.00, 0.80),
    (40, (60, 100)): (0.97, 0.99, 1.00, 1.00, 1.00),
    (100, (20, 40)): (0.97, 0.97, 0.79, 1.00, 0.80),
}
VARIANTS: dict[str, tuple[float | None, ...]] = {  # of 40 devices, 20-40 samples
    "thresholds 0.20/0.23": (0.99, 0.98, 1.00, 1.00, 1.00),
    "thresholds 0.10/0.12": (0.93, 0.90, 0.91, 1.00, 0.40),
    "split_half unit": (0.94, 0.87, 0.95, 1.00, 0.60),
    "average linkage 0.15": (None,) * 5,
    "k-means, true K": (None,) * 5,
}


def clusterings(
    profiles: np.ndarray, halves: list[float], unit: float, k: int
) -> dict[str, Callable[[], aidc.Clusters]]:
    def of_aidc(unit: float, merge: float = 0.15, split: float = 0.18) -> aidc.Clusters:
        return aidc.aidc(profiles, unit=unit, thresholds=(merge, split))

    return {
        "default": lambda: of_aidc(unit),
        "thresholds 0.20/0.23": lambda: of_aidc(unit, 0.20, 0.23),
        "thresholds 0.10/0.12": lambda: of_aidc(unit, 0.10, 0.12),
        "split_half unit": lambda: of_aidc(aidc.compute_halves_unit(halves)),
        "average linkage 0.15": lambda: agglomerative(aidc.compute_divergences(profiles, unit=unit), threshold=0.15),
        "k-means, true K": lambda: kmeans(profiles, n_clusters=k, rng=np.random.default_rng(0)),
    }


def planted(seeds: list[int], *, quick: bool) -> list[dict[str, Any]]:
    scores: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for seed in seeds:
        say(f"8.1 seed {seed}")
        digits = Digits(seed)
        for (n, sizes), column in ((size, c) for size in SIZES for c in GROUPS):
            if quick and n == 100:
                continue
            rng = np.random.default_rng((seed, n, sizes[0]))
            classes = GROUPS[column]
            truth = np.arange(n) % len(classes)
            profiles, halves = [], []
            for group in truth:
                mine = np.flatnonzero(np.isin(digits.rest.y, list(classes[group])))
                chosen = rng.choice(mine, min(len(mine), rng.integers(sizes[0], sizes[1] + 1)), replace=False)
                profile, half = digits.profile(digits.rest.x[chosen])
                profiles.append(profile)
                halves.append(half)
            row = f"{n} devices, {sizes[0]}-{sizes[1]} samples"
            for name, cluster in clusterings(np.stack(profiles), halves, digits.unit, len(classes)).items():
                if name != "default" and (n, sizes) != (40, (20, 40)):
                    continue
                found = cluster()
                labels = np.empty(n, np.int64)
                for k, members in enumerate(found):
                    labels[list(members)] = k
                index = float(len(found) == 1) if column == "one" else adjusted_rand_score(truth, labels)
                scores.setdefault((row if name == "default" else name, column), []).append((index, len(found)))
    spec = {f"{n} devices, {s[0]}-{s[1]} samples": row for (n, s), row in SIZES.items()} | VARIANTS
    return [
        {
            "table": "8.1",
            "row": row,
            "column": column,
            "index": float(np.mean([index for index, _ in found])),
            "clusters": float(np.mean([k for _, k in found])),
            "spec": spec[row][list(GROUPS).index(column)],
        }
        for (row, column), found in scores.items()
    ]


# ------------------------------------------------------------------------------------------------- federations


class Federation:
    """Devices, their true groups, and the test images as each group sees them.

    `between`: sizes of devices; None: as the partition deals them.
    """

    def __init__(
        self,
        digits: Digits,
        seed: int,
        how: dict[str, Any],
        home: Path,
        *,
        between: tuple[int, int] | None = None,
    ) -> None:
        self.digits = digits
        shares = partition_pool(digits.rest, N_DEVICES, Partitioning(min_samples=FEWEST, **how), seed=seed)
        self.ids = [f"d{i:03d}" for i in range(N_DEVICES)]
        self.group = {i: share.group for i, share in zip(self.ids, shares, strict=True)}
        rotated = how["partition"] == "groups" and how.get("groups") != "labels"
        self.turns = self.group if rotated else dict.fromkeys(self.ids, 0)
        self.x, self.y = {}, {}
        for i, share in zip(self.ids, shares, strict=True):
            self.x[i] = np.concatenate([share.x_train, share.x_val, share.x_test])
            self.y[i] = np.concatenate([share.y_train, share.y_val, share.y_test])
        if between is not None:
            self._deal_anew(*between, np.random.default_rng((seed, 3)))
        self.share = {i: np.bincount(self.y[i], minlength=CLASSES) / len(self.y[i]) for i in self.ids}
        clocks = np.random.default_rng((seed, 7)).lognormal(0.7, 0.6, N_DEVICES)
        self.ghz = dict(zip(self.ids, clocks.tolist(), strict=True))
        self.network = Network(digits.spec)
        self.seed, self.home = seed, home

    def _deal_anew(self, fewest: int, most: int, rng: np.random.Generator) -> None:
        """Within each group, sizes log-uniform in [fewest, most], smaller in proportion where samples are too few."""
        for group in sorted(set(self.group.values())):
            ids = [i for i in self.ids if self.group[i] == group]
            x, y = np.concatenate([self.x[i] for i in ids]), np.concatenate([self.y[i] for i in ids])
            sizes = np.exp(rng.uniform(np.log(fewest), np.log(most), len(ids)))
            spare = min(1.0, (len(y) - fewest * len(ids)) / (sizes - fewest).sum())
            ends = np.cumsum(np.floor(fewest + spare * (sizes - fewest)).astype(np.int64))
            order = rng.permutation(len(y))[: ends[-1]]
            for i, part in zip(ids, np.split(order, ends[:-1]), strict=True):
                self.x[i], self.y[i] = x[part], y[part]

    def fleet(self) -> SimulatedFleet:
        layout, _ = make_initial_model(self.digits.spec, self.seed)
        workers = {}
        for i in self.ids:
            x = np.float32(self.x[i][:, None] / 16)
            n = len(x)
            data = DeviceData(x, self.y[i], np.zeros(n, np.bool_), x[:0], self.y[i][:0])
            workers[i] = Worker(i, self.digits.spec, data, self.home / i)
        hardware = {i: Hardware(speed=self.ghz[i] / PI_4_GHZ, cpu_ghz=self.ghz[i]) for i in self.ids}
        return SimulatedFleet(self.digits.spec, layout, workers, seed=self.seed, hardware=hardware)

    def descriptions(self, *, labels: bool = False) -> dict[str, Description]:
        """Profiles by the server's extractor, or the true groups as labels."""
        if labels:
            return {i: Description(n_samples=len(self.y[i]), label=self.group[i]) for i in self.ids}
        profiles = {i: self.digits.profile(self.x[i])[0] for i in self.ids}
        return {i: Description(n_samples=len(self.y[i]), profile=tuple(p.tolist())) for i, p in profiles.items()}

    def personal(self, method: Any, state: State, fleet: SimulatedFleet) -> float:
        """Test accuracy by class, weighted by each device's label shares; mean over devices."""
        known: dict[tuple[str, int], np.ndarray] = {}
        accuracy = []
        for i in self.ids:
            ref = method.get_model(state, i)
            key = (ref.digest, self.turns[i])
            if key not in known:
                x = np.rot90(self.digits.test.x, self.turns[i], axes=(1, 2))
                logits = self.network.compute_logits(fleet.get(ref, state.layout), np.float32(x[:, None] / 16))
                right = logits.argmax(axis=1) == self.digits.test.y
                known[key] = np.array([right[self.digits.test.y == c].mean() for c in range(CLASSES)])
            accuracy.append(self.share[i] @ known[key])
        return float(np.mean(accuracy))


async def learn(
    federation: Federation,
    name: str,
    settings: MethodSettings,
    described: dict[str, Description] | None = None,
    unit: float | None = None,
) -> tuple[list[tuple[float, float]], State]:
    """(simulated seconds, personal accuracy) after each round, and the last state before the installation."""
    fleet = federation.fleet()
    method = make_method(name, settings)
    layout, first = make_initial_model(federation.digits.spec, federation.seed)
    state = method.init(layout, fleet.put(unflatten(first, layout)))
    if described is not None:
        assert isinstance(state, FedEpcState)
        state = msgspec.structs.replace(state, described=described, unit=unit)
    curve: list[tuple[float, float]] = []

    def on_round(state: State) -> None:
        curve.append((fleet.seconds, federation.personal(method, state, fleet)))

    return curve, await run_rounds(method, state, fleet, on_round, settings.rounds)


def settings_of(seed: int, rounds: int, rate: float, **options: Any) -> MethodSettings:
    sgd = Sgd(epochs=EPOCHS, batch_size=BATCH, learning_rate=rate, momentum=0.0)
    return MethodSettings(
        rounds=rounds, participation=0.2, seed=seed, sgd=sgd, codec=Codec.FLOAT32, options=options,
        protection=Protection(average="mean"),  # as the paper has it
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ 8.2: accuracy

SETTINGS: dict[str, tuple[dict[str, Any], float]] = {  # partition, learning rate
    "dirichlet 0.1": ({"partition": "dirichlet", "alpha": 0.1}, 0.1),
    "dirichlet 0.5": ({"partition": "dirichlet", "alpha": 0.5}, 0.1),
    "4 label groups": ({"partition": "groups", "alpha": 100.0, "n_groups": 4, "groups": "labels"}, 0.05),
    "4 rotation groups": ({"partition": "groups", "alpha": 100.0, "n_groups": 4}, 0.05),
}
ACCURACY: dict[str, tuple[float | None, ...]] = {  # the specification's, by setting
    "fedavg": (0.920, 0.951, 0.889, 0.770),
    "fedprox": (0.921, 0.951, None, None),
    "cfic": (0.951, 0.963, 0.929, 0.854),
    "haccs": (None,) * 4,
    "fedepc, proxy, no warm-up": (0.919, 0.939, 0.996, 0.851),
    "fedepc, proxy, warm-up 1/4": (None, None, 0.994, 0.852),
    "fedepc, proxy, warm-up 1/3": (0.947, 0.947, None, None),
    "fedepc, proxy, warm-up 1/2": (0.952, 0.948, None, None),
    "fedepc, no proxy, warm-up 1/3": (None,) * 4,
    "fedepc, no proxy, warm-up 1/3, stop rule": (None,) * 4,
}


def options_of(row: str, rounds: int) -> dict[str, Any]:
    """What FedEPC is told in a row of `ACCURACY`; others have nothing to be told."""
    name, *words = row.split(", ")
    if name != "fedepc":
        return {}
    warm_up = {"no warm-up": 0.0, "warm-up 1/4": 1 / 4, "warm-up 1/3": 1 / 3, "warm-up 1/2": 1 / 2}[words[1]]
    return {"warm_up": round(warm_up * rounds), "stop": "stop rule" in words}


def of_compare(rounds: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of 8.2 as `fedge compare` runs them, in what is nearest to its settings there."""
    figures = []
    for setting, (how, rate) in SETTINGS.items():
        fields = how | {
            "set": "digits", "model": "networks:mlp64", "devices": N_DEVICES, "participation": 0.2,
            "rounds": rounds, "local_epochs": EPOCHS, "min_samples": FEWEST, "batch_size": BATCH, "momentum": 0.0,
            "learning_rate": rate, "global_test": TEST_SHARE, "server_data": 0.5,
        }  # fmt: skip
        methods = []
        for row in chosen_rows(ACCURACY, arguments):
            options = options_of(row, rounds) | ({"extractor": "server"} if ", proxy" in row else {})
            methods.append(":".join([row.split(", ")[0], *(f"{key}={value}" for key, value in options.items())]))
        figures.append(measured(setting, compared(setting, methods, fields, arguments)))
    return figures


async def accuracies(seeds: list[int], rounds: int, chosen: list[str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for seed in seeds:
        digits = Digits(seed)
        for setting, (how, rate) in SETTINGS.items():
            for row in chosen:
                name = row.split(", ")[0]
                has_server_data = ", proxy" in row
                start = time.perf_counter()
                with tempfile.TemporaryDirectory() as home:
                    federation = Federation(digits, seed, how, Path(home))
                    described, unit = (federation.descriptions(), digits.unit) if has_server_data else (None, None)
                    settings = settings_of(seed, rounds, rate, **options_of(row, rounds))
                    curve, state = await learn(federation, name, settings, described, unit)
                uploads = sum(state.participations.values())
                n_clusters = len(getattr(state, "clusters", ())) if name == "fedepc" else 0
                found.setdefault((row, setting), []).append((curve[-1][1], uploads, n_clusters))
                say(f"8.2 seed {seed} {setting}, {row}: {curve[-1][1]:.3f} in {time.perf_counter() - start:.0f} s")
    return [
        {
            "table": "8.2",
            "row": row,
            "column": setting,
            "accuracy": float(np.mean([a for a, _, _ in runs])),
            "std": float(np.std([a for a, _, _ in runs])),
            "uploads": float(np.mean([u for _, u, _ in runs])),
            "clusters": float(np.mean([k for _, _, k in runs])),
            "spec": ACCURACY[row][list(SETTINGS).index(setting)],
        }
        for (row, setting), runs in found.items()
    ]


# ------------------------------------------------------------------------------------------ 8.3: time to a target


class Unfair(FedEpc):
    """Overdue devices are asked only if they are fast enough (5.5)."""

    def make_bandit_settings(self) -> ccmab.Settings:
        return replace(super().make_bandit_settings(), fairness=False)


class Batch(FedEpc):
    """The bandit searches devices one by one (5.4)."""

    def make_bandit_settings(self) -> ccmab.Settings:
        return replace(super().make_bandit_settings(), search=greedy_batch)


class UnfairBatch(Unfair, Batch):
    """Both."""


HERE = "benchmarks.papers.fedepc"
SELECTIONS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {  # method, options, the specification's seconds
    "random, no deadline": (f"{HERE}:Unfair", {"selection": "uniform", "deadline": "none"}, (390, 687, 1063)),
    "random + deadline": (f"{HERE}:Unfair", {"selection": "uniform"}, (278, 371, 493)),
    "random + deadline + no-starvation": ("fedepc", {"selection": "uniform"}, (289, 422, 608)),
    "bandit (set) + deadline": (f"{HERE}:Unfair", {}, (214, 267, 479)),
    "bandit (batch) + deadline": (f"{HERE}:UnfairBatch", {}, (218, 320, 495)),
    "bandit (batch) + deadline + no-starvation": (f"{HERE}:Batch", {}, (235, 429, 599)),
    "fastest devices only": (f"{HERE}:Unfair", {"selection": "fastest", "deadline": "none"}, (285, 457, 615)),
}
GROUPED = {"partition": "groups", "alpha": 100.0, "n_groups": 4, "groups": "labels"}


def time_to(curve: Iterable[tuple[float, float]], target: float) -> float | None:
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


async def times(seeds: list[int], rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[list[float | None], float, float]]] = {}
    for seed in seeds:
        digits = Digits(seed)
        for row, (name, options, _) in SELECTIONS.items():
            with tempfile.TemporaryDirectory() as home:
                federation = Federation(digits, seed, GROUPED, Path(home), between=(8, 70))
                settings = settings_of(seed, rounds, 0.01, warm_up=0, clustering="labels", **options)
                curve, state = await learn(federation, name, settings, federation.descriptions(labels=True))
            never = 1 - len(state.participations) / N_DEVICES
            found.setdefault(row, []).append(([time_to(curve, t) for t in TARGETS], never, curve[-1][0]))
            say(f"8.3 seed {seed} {row}: {curve[-1][1]:.3f} after {1000 * curve[-1][0]:.0f} ms")
    rows = []
    for row, runs in found.items():
        for k, target in enumerate(TARGETS):
            reached = [seconds[k] for seconds, _, _ in runs if seconds[k] is not None]
            rows.append(
                {
                    "table": "8.3",
                    "row": row,
                    "column": str(target),
                    "seconds": float(np.mean(reached)) if reached else None,
                    "reached": len(reached),
                    "seeds": len(runs),
                    "never used": float(np.mean([never for _, never, _ in runs])),
                    "total": float(np.mean([total for _, _, total in runs])),
                    "spec": SELECTIONS[row][2][k],
                }
            )
    return rows


# -------------------------------------------------------------------------------------------------------- tables


def cell(result: dict[str, Any], base: dict[str, dict[str, Any]]) -> str:
    """Ours, and the specification's in brackets; of times relative to random selection without a deadline."""
    spec = result["spec"]
    if result["table"] == "8.1":
        return f"{result['index']:.2f} [{result['clusters']:.1f}] ({'-' if spec is None else f'{spec:.2f}'})"
    if result["table"] == "8.2":
        ours = f"{result['accuracy']:.3f} ± {result['std']:.3f} ({'-' if spec is None else f'{spec:.3f}'})"
        return f"{ours} {result['uploads']:.0f} up"
    slow = base[result["column"]]
    if result["seconds"] is None:
        return f"never ({spec / slow['spec']:.2f})"
    some = "" if result["reached"] == result["seeds"] else f" {result['reached']}/{result['seeds']}"
    relative = "" if slow["seconds"] is None else f" = {result['seconds'] / slow['seconds']:.2f}"
    return f"{1000 * result['seconds']:.0f} ms{relative} ({spec / slow['spec']:.2f}){some}"


def show(results: list[dict[str, Any]]) -> None:
    for table in dict.fromkeys(result["table"] for result in results):
        mine = [result for result in results if result["table"] == table]
        columns = list(dict.fromkeys(result["column"] for result in mine))
        base = {r["column"]: r for r in mine if r["row"] == "random, no deadline"}
        print(f"\nTable {table}\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for row in dict.fromkeys(result["row"] for result in mine):
            cells = {r["column"]: cell(r, base) for r in mine if r["row"] == row}
            last = next(
                (
                    f" {1000 * r['total']:.0f} ms in all, {r['never used']:.0%} never used |"
                    for r in mine
                    if r["row"] == row and "total" in r
                ),
                "",
            )
            print(f"| {row} | {' | '.join(cells.get(column, '') for column in columns)} |{last}")


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument("--tables", default="8.1,8.2,8.3", help="which of them")
    parser.add_argument("--quick", action="store_true", help="one seed, six rounds: to see that it runs")
    add_metrics(parser, "fedepc", "instead of the tables print what METRICS of table.py has, of `fedge compare`")
    add_rows(parser)
    parser.set_defaults(data=None, train_on=Processor.CPU)  # digits come with fedge, and are small
    arguments = parser.parse_args()
    if arguments.metrics:
        write(arguments, of_compare(3 if arguments.quick else 60, arguments), [])
        return
    seeds = [0] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    results: list[dict[str, Any]] = []
    if "8.1" in arguments.tables:
        results += planted(seeds, quick=arguments.quick)
    if "8.2" in arguments.tables:
        results += asyncio.run(accuracies(seeds, 6 if arguments.quick else 60, chosen_rows(ACCURACY, arguments)))
    if "8.3" in arguments.tables:
        results += asyncio.run(times(seeds, 6 if arguments.quick else 50))
    show(results)
    finish(arguments, {"seeds": seeds, "quick": arguments.quick, "results": results})


if __name__ == "__main__":
    main()
