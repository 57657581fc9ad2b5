"""SCMoE-PFL's tables: overlapping clusters and an energy-aware gate against the baselines and its own ablations.

The settings are those of scmoe_pfl.md section 17.1: digits (8x8) on 10 devices with one hidden layer of 32, MNIST
(3,000 images mean-pooled to 14x14) on 12 with 24; Dirichlet label skew, or four groups of turned cameras; 60 % of a
device's samples for training, 15 % for validation, 25 % for testing; 30 % of the training samples are sensitive; 15
rounds of 20 steps, batch 32, SGD 0.05 with momentum 0.9. "CIFAR-10" (JPEG images, 4,000 mean-pooled to 3x8x8, 12
devices, hidden 32) is ours: no figures to compare with. --full has the paper's budget instead (section 12: 140 rounds
of 50 steps, batch 32, SGD 0.01 with momentum 0.9) and all 60,000 images of CIFAR-10 (JPEG) at 32x32; 12 devices and
`cnn_fedavg` are ours, for the specification has neither of the paper's. It wants a GPU; we ran one round on a CPU. In
the column "classes" a third of each device's classes is sensitive as a whole.

A cell is accuracy / macro F1 / standard deviation over the devices, in per cent, means over the seeds; in brackets the
specification's accuracy. Differences below about 1 point mean nothing (section 17.1). The second table has the mean
silhouette of the clusters that were last made: round 3 of `default`, the last round of `paper` and k-means. The
specification's are of round 1, the paper's 0.65 for overlapping clusters against 0.43 for k-means.

`--table clustering` is that of section 17.2: what the clusters alone are worth. MNIST as above, 16 devices, 12 rounds;
label skew, or four groups of turned cameras with alpha = 1. A cell is the accuracy of a device's best expert, by
validation samples, without gate and private model, and the mean number of clusters. Rows with k-means differ from the
default in nothing but the clustering.

`--table gate` is that of section 17.3: what the private model learns from, where it starts, what the gate over it and
the experts learns from, and whether energies count ("energy": with offsets only where a gate is untrained for want of
samples); settings as in the first table. A cell is the accuracy and the mean weight of the private model, over the
devices and seeds; in brackets the specification's. Its rows whose prior starts from validation losses are missing.

`--table tau` is over the threshold of the printed rule (Fig. 6 of the paper): preset `paper` with other values than its
0.2. A cell is accuracy and the mean number of clusters.

Rows with "all data" have no sensitive samples; "local, also on validation samples" is missing: no option does that.

Runs that are done are kept in --out; the same command goes on where it was.

Examples:
    python benchmarks/papers/scmoe_pfl.py --quick --settings "digits 1.0"
    python benchmarks/papers/scmoe_pfl.py --settings "digits 1.0; digits 0.5; digits 0.1; digits turned"
    python benchmarks/papers/scmoe_pfl.py --data DIR --seeds 0,1,2,3,4 --json scmoe-pfl.json
    python benchmarks/papers/scmoe_pfl.py --data DIR --table clustering --seeds 0,1,2,3,4
    python benchmarks/papers/scmoe_pfl.py --table gate --settings "digits 1.0; digits turned"
    python benchmarks/papers/scmoe_pfl.py --table tau --settings "digits turned"
    python benchmarks/papers/scmoe_pfl.py --settings "digits 0.5" --rows "FedProx 0.1; PM-MoE"
    python benchmarks/papers/scmoe_pfl.py --data DIR --full --train-on cuda --out scmoe-pfl-full
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from table import Runs, add_rows, chosen, chosen_rows, claim, measure, over_seeds, parser_of, show, write
from torch import nn

from benchmarks.default_method import ablated
from benchmarks.steps.ablated_mixture import FitAblatedMixture
from coordinator.clustering import geometry
from coordinator.methods.papers.scmoe_pfl import Parameters, ScmoePfl, ScmoeState
from coordinator.simulation.reports.outcome import RunOutcome
from fedge.data.task import TaskSpec
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.tensors.layout import Floats

PRINTED = "scmoe-pfl:preset=paper"


class Variant(ScmoePfl):
    """A row that no option makes: other parameters of section 12, another order for the last round."""

    PARAMETERS: ClassVar[dict[str, Any]] = {}
    ORDER: ClassVar[dict[str, Any]] = {}
    steps = (FitAblatedMixture,)

    def make_parameters(self) -> Parameters:
        return msgspec.structs.replace(super().make_parameters(), **self.PARAMETERS)

    def make_mixture_order(self, state: ScmoeState, device_id: str) -> FitMixture:
        order = super().make_mixture_order(state, device_id)
        return ablated(FitAblatedMixture, order, **{"learns": order.gate, "offset": order.energy_offset} | self.ORDER)


def variant(name: str, parameters: Mapping[str, Any] = {}, **order: Any) -> str:
    """The path of a class of this module that is made now; every process makes the same ones."""
    globals()[name] = type(name, (Variant,), {"PARAMETERS": parameters, "ORDER": order})
    return f"benchmarks.papers.scmoe_pfl:{name}"


NO_ENERGY = variant("NoEnergy", energy=False)
BEST = variant("BestExpert", alone="best")
AVERAGE = variant("MeanOfExperts", alone="average")
PRINTED_GATE = variant("PrintedGate", private_start="initial", learns="training", offset="never")
PRIVATE_ALONE = variant("PrivateFromStart", private_start="initial", alone="private")
SENSITIVE = "private_data=sensitive:private_steps=300"
METHODS = {
    "local": "local",
    "FedAvg": "fedavg",
    "FedAvg + FT": "fedavg+ft",
    "FedProx 0.1": "fedprox:proximal_mu=0.1",
    "Ditto 0.1": "ditto",
    "PM-MoE": "pm-moe",
    "PFMoE-style": f"{NO_ENERGY}:preset=paper:n_clusters=1",
    "private model alone, sensitive samples": f"{PRIVATE_ALONE}:{SENSITIVE}",
    "best expert, paper clusters": f"{BEST}:preset=paper",
    "best expert, default clusters": BEST,
    "SCMoE paper": PRINTED,
    "default clusters, paper private and gate": f"{PRINTED_GATE}:{SENSITIVE}",
    "**SCMoE default**": "scmoe-pfl",
    "k-means each round, paper": f"{PRINTED}:clustering=k-means",
    "mean of experts, paper": f"{AVERAGE}:preset=paper",
    "mean of experts, default": AVERAGE,
    "uniform mean of outputs, default": variant("UniformMean", learns="uniform"),
    "no energy, default": NO_ENERGY,
    "one expert for a sample, default": "scmoe-pfl:top=1",
    "all experts for a sample, default": "scmoe-pfl:top=8",
}
ON_ALL_DATA = {"FedAvg, all data": "fedavg", "FedAvg + FT, all data": "fedavg+ft"}
"""Section 14: baselines whose uploads may learn from every training sample."""
ALL_DATA = {"sensitive": 0.0, "marks": "samples"}
OURS = "**SCMoE default**"
BUDGET = {"rounds": 15, "local_steps": 20, "sensitive": 0.3}
DIGITS = BUDGET | {"set": "digits", "devices": 10}
MNIST = BUDGET | {"set": "mnist", "devices": 12, "samples": 3000, "model": "scmoe_pfl:hidden_24"}
TURNS = {"partition": "groups", "groups": "rotation", "n_groups": 4, "alpha": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits 1.0": DIGITS | {"alpha": 1.0},
    "digits 0.5": DIGITS | {"alpha": 0.5},
    "digits 0.1": DIGITS | {"alpha": 0.1},
    "digits turned": DIGITS | TURNS,
    "MNIST 0.5": MNIST | {"alpha": 0.5},
    "MNIST 0.1": MNIST | {"alpha": 0.1},
    "digits 0.5, classes": DIGITS | {"alpha": 0.5, "sensitive": 1 / 3, "marks": "classes"},
    "CIFAR-10 0.5": BUDGET | {"set": "cifar10", "devices": 12, "samples": 4000, "alpha": 0.5},
}
CIFAR_FULL = {
    "set": "cifar10-32", "model": "cnn_fedavg", "devices": 12, "rounds": 140, "local_steps": 50, "batch_size": 32,
    "learning_rate": 0.01, "momentum": 0.9, "sensitive": 0.3,
}  # fmt: skip
FULL = {f"CIFAR-10 {alpha:g}": CIFAR_FULL | {"alpha": alpha} for alpha in (0.5, 0.1)}
SPEC: dict[str, tuple[float, ...]] = {
    "local": (88.7, 91.5, 97.0, 88.6, 86.4, 91.8, 91.5),
    "FedAvg": (95.1, 95.3, 94.0, 78.6, 89.4, 84.8, 95.1),
    "FedAvg + FT": (93.7, 96.1, 97.6, 90.0, 90.7, 93.8, 95.6),
    "FedProx 0.1": (94.8, 95.4, 93.7, 78.0, 89.5, 85.2, 94.9),
    "Ditto 0.1": (95.0, 96.2, 97.4, 89.1, 92.5, 94.2, 96.2),
    "PFMoE-style": (93.6, 93.9, 96.3, 83.5, 89.0, 91.5, 94.8),
    "private model alone, sensitive samples": (78.6, 82.8, 93.7, 78.3, 75.9, 88.1, 28.3),
    "best expert, paper clusters": (94.8, 95.2, 93.1, 79.9, 89.2, 86.9, 92.6),
    "best expert, default clusters": (94.2, 94.4, 95.1, 88.0, 88.9, 87.4, 92.7),
    "SCMoE paper": (94.2, 96.0, 96.7, 87.2, 89.5, 91.6, 93.1),
    "default clusters, paper private and gate": (93.6, 94.8, 96.9, 91.5, 90.1, 91.8, 94.8),
    "**SCMoE default**": (93.9, 95.6, 97.6, 91.8, 90.8, 94.3, 95.6),
    "k-means each round, paper": (93.4, 95.7, 96.8, 86.0, 90.1, 91.8, 92.0),
    "mean of experts, paper": (94.8, 95.3, 93.3, 79.7, 89.2, 86.9, 92.5),
    "mean of experts, default": (94.2, 94.5, 95.1, 88.0, 88.9, 87.4, 92.7),
    "uniform mean of outputs, default": (94.5, 95.9, 97.3, 92.0, 91.3, 93.1, 95.5),
    "no energy, default": (93.6, 95.2, 97.7, 91.6, 90.8, 94.4, 95.4),
    "FedAvg, all data": (95.6, 96.2, 95.0, 81.6, 90.3, 86.0, 96.2),
    "FedAvg + FT, all data": (94.4, 96.5, 98.1, 90.3, 91.5, 94.4, 96.5),
}
CLUSTERED = {"**SCMoE default**": "0.14-0.20", "SCMoE paper": "0.00-0.09", "k-means each round, paper": "0.14-0.34"}
"""Whose silhouette is told, and the specification's on digits."""
NOISE = 1.0  # point, section 17.1


class Centred(Variant):
    """Updates less their mean (section 5)."""

    ORDER: ClassVar[dict[str, Any]] = {"alone": "best"}

    def compute_embedding(self, directions: Floats) -> NDArray[np.float64]:
        centring = np.eye(len(directions)) - 1 / len(directions)
        return geometry.embed_gram(centring @ geometry.compute_gram(directions) @ centring)


CLUSTERINGS = {
    "one cluster (FedAvg)": "fedavg",
    "printed rule, tau 0.2, updates of each round": f"{BEST}:preset=paper",
    "k-means, 4, first round only": f"{BEST}:clustering=k-means:n_clusters=4:freeze_after=1",
    "printed rule, Otsu, from the initial model, 3 rounds, at most 4": (
        variant("PrintedRule", {"distinct": False, "centres_join": False}, alone="best") + ":n_clusters=4"
    ),
    "**default** (distinct, Otsu, from the initial model, 3 rounds, at most 8)": BEST,
    "default without centres_join": variant("NoJoin", {"centres_join": False}, alone="best"),
    "default, centred": "benchmarks.papers.scmoe_pfl:Centred",
    "k-means, 4, from the initial model, 3 rounds": f"{BEST}:clustering=k-means:n_clusters=4",
    "k-means, as many as MCTC finds, 3 rounds": f"{BEST}:clustering=k-means",
    "agglomerative, as many as MCTC finds, 3 rounds": f"{BEST}:clustering=agglomerative",
}
"""Section 17.2; the last three rows are ours."""
CLUSTERED_MNIST = MNIST | {"devices": 16, "rounds": 12}
CLUSTERING_SETTINGS: dict[str, dict[str, Any]] = {
    "label 0.1": CLUSTERED_MNIST | {"alpha": 0.1},
    "label 0.5": CLUSTERED_MNIST | {"alpha": 0.5},
    "rotation": CLUSTERED_MNIST | TURNS,
}
CLUSTERING_SPEC = (
    (86.5, 87.2, 61.9),
    (85.0, 86.4, 70.5),
    (87.9, 83.4, 85.4),
    (89.6, 85.9, 72.8),
    (91.0, 86.2, 83.3),
    (90.0, 86.2, 83.3),
    (87.3, 84.7, 83.6),
)

TAUS = {tau: variant(f"Tau{k}", {"tau": tau}) + ":preset=paper" for k, tau in enumerate((0.0, 0.1, 0.2, 0.3, 0.4, 0.6))}
"""Of the printed rule, whose tau is 0.2."""

PRIVATE: dict[str, tuple[dict[str, str], str]] = {
    "D_H, from w0": ({"private_start": "initial"}, f":{SENSITIVE}"),
    "D_H, from best expert": ({}, ":private_data=sensitive"),
    "all train, from w0": ({"private_start": "initial"}, ":private_steps=300"),
    "all train, from best expert": ({}, ""),
}
"""Section 17.3: the samples that the private model learns from (D_H: the sensitive ones), and its start."""
GATE: dict[str, dict[str, Any]] = {
    "private alone": {"alone": "private"},
    "uniform mean": {"learns": "uniform"},
    "gate on train, energy": {"learns": "training"},
    "gate on train, no energy": {"learns": "training", "energy": False},
    "gate on train, offset": {"learns": "training", "offset": "always"},
    "gate on val, energy": {},
    "gate on val, no energy": {"energy": False},
    "gate on val, offset": {"offset": "always"},
    "gate on train+val, offset": {"learns": "training+validation", "offset": "always"},
    "untrained gate, energy": {"learns": "untrained", "offset": "never"},
    "untrained gate, offset": {"learns": "untrained"},
}
GATE_SPEC = {
    "D_H, from w0": {
        "uniform mean": "91.8 94.0 95.5 90.0 87.8 91.0 76.2",
        "gate on train, energy": "93.6/0.34 94.8/0.38 96.9/0.73 91.5/0.44 90.1/0.39 91.8/0.66 94.8/0.07",
        "gate on train, no energy": "93.6/0.22 94.2/0.28 97.4/0.64 89.8/0.42 88.6/0.37 91.3/0.63 94.1/0.10",
        "gate on train, offset": "93.9/0.32 95.1/0.35 96.7/0.69 91.3/0.44 90.2/0.38 92.9/0.68 95.1/0.19",
        "gate on val, energy": "92.6/0.35 94.8/0.38 96.3/0.77 90.2/0.46 89.5/0.44 91.0/0.77 94.5/0.06",
        "gate on val, no energy": "92.3/0.26 93.8/0.33 96.3/0.75 87.9/0.42 88.5/0.34 91.5/0.73 93.2/0.11",
        "gate on val, offset": "92.9/0.33 95.1/0.40 96.5/0.73 89.8/0.46 89.9/0.42 91.3/0.63 94.4/0.20",
        "gate on train+val, offset": "94.1/0.34 95.4/0.36 97.0/0.67 91.7/0.41 90.6/0.39 91.9/0.62 95.3/0.19",
        "untrained gate, energy": "90.3/0.62 90.8/0.72 93.6/0.95 87.8/0.68 85.5/0.73 89.6/0.94 44.7/0.84",
        "untrained gate, offset": "91.7/0.49 94.4/0.46 95.6/0.51 88.8/0.51 88.5/0.49 90.0/0.48 78.6/0.45",
    },
    "D_H, from best expert": {
        "private alone": "90.8 92.8 95.7 89.0 84.3 93.2 50.9",
        "uniform mean": "93.8 95.3 96.7 91.2 89.8 93.4 83.8",
        "gate on train, energy": "94.5/0.57 95.2/0.63 96.9/0.84 91.3/0.63 90.6/0.51 93.9/0.78 94.9/0.15",
        "gate on val, energy": "93.4/0.59 95.2/0.59 97.3/0.78 91.6/0.68 90.3/0.52 94.2/0.77 93.6/0.18",
        "gate on val, no energy": "93.0/0.58 94.9/0.54 96.8/0.79 91.1/0.61 89.9/0.50 94.3/0.76 92.8/0.15",
        "gate on val, offset": "93.5/0.58 95.1/0.58 97.3/0.76 91.6/0.64 90.1/0.53 93.8/0.74 94.2/0.24",
    },
    "all train, from w0": {
        "uniform mean": "93.2 95.1 97.0 92.0 90.6 92.7 95.5",
        "gate on train, energy": "90.6/0.93 93.0/0.96 97.3/0.98 89.9/0.96 87.9/0.95 92.5/0.99 93.3/0.96",
        "gate on val, offset": "93.9/0.59 94.4/0.62 97.2/0.85 91.4/0.73 90.7/0.63 93.4/0.73 94.8/0.75",
    },
    "all train, from best expert": {
        "private alone": "93.3 94.7 97.3 91.9 89.6 94.1 95.2",
        "uniform mean": "94.5 95.9 97.3 92.0 91.3 93.1 95.5",
        "gate on train, energy": "93.5/0.93 95.2/0.94 97.3/0.98 92.0/0.97 90.1/0.92 94.1/0.95 95.4/0.93",
        "gate on val, energy": "93.9/0.65 95.6/0.67 97.6/0.88 91.8/0.72 90.8/0.68 94.3/0.83 95.6/0.78",
        "gate on val, no energy": "93.6/0.64 95.2/0.67 97.7/0.88 91.6/0.70 90.8/0.66 94.4/0.84 95.4/0.77",
        "gate on val, offset": "93.9/0.64 95.9/0.67 97.7/0.86 91.7/0.70 90.7/0.66 93.8/0.81 95.8/0.78",
    },
}
"""Rows of the table: the specification's accuracy / mean weight of the private model, by column."""
GATE_METHODS = {
    (private, gate): variant(f"Gate{n}{k}", **start, **GATE[gate]) + options
    for n, (private, (start, options)) in enumerate(PRIVATE.items())
    for k, gate in enumerate(GATE_SPEC[private])
}
GATE_SETTINGS = {column: SETTINGS[column] for column in list(SETTINGS)[:7]}
GateFigures = dict[tuple[tuple[str, str], str], NDArray[np.float64]]
"""Of each row and column a figure for each seed."""


def hidden_24(task: TaskSpec) -> nn.Module:
    """The perceptron of the MNIST columns."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(task.input_shape)), 24), nn.ReLU(), nn.Linear(24, task.n_classes)
    )


def points(run: RunOutcome) -> float:
    return 100 * run.accuracy


def n_clusters(run: RunOutcome) -> float:
    return len(run.clusters)


def cell(runs: list[RunOutcome], spec: float | None) -> str:
    figures = [
        over_seeds(runs, points),
        over_seeds(runs, lambda run: 100 * run.macro_f1),
        over_seeds(runs, lambda run: 100 * run.std),
    ]
    ours = " / ".join(f"{figure.mean():.1f}" for figure in figures)
    return f"{ours} ({'-' if spec is None else f'{spec:.1f}'})"


def silhouette(runs: list[RunOutcome]) -> str:
    """Mean over the seeds, lowest to highest."""
    seen = over_seeds(runs, lambda run: run.details["silhouette"])
    return f"{seen.mean():.2f} ({seen.min():.2f} to {seen.max():.2f})"


def rows_of(column: str, fields: dict[str, Any], rows: list[str], arguments: argparse.Namespace) -> Runs:
    """The runs of the first table, by row."""
    found: Runs = {}
    for label, methods, own in (
        (column, METHODS, fields),
        (f"{column}, all data", ON_ALL_DATA, fields | ALL_DATA),
    ):
        if wanted := [row for row in methods if row in rows]:
            runs = measure(label, [methods[row] for row in wanted], own, arguments)
            found |= {row: runs[methods[row]] for row in wanted}
    return found


def judge(found: dict[str, Runs]) -> list[dict[str, Any]]:
    """The claims of section 17 that these columns can show, and the paper's."""
    gain = {  # (column, row) -> points by which the default preset is ahead
        (column, row): float((over_seeds(runs[OURS], points) - over_seeds(own, points)).mean())
        for column, runs in found.items()
        for row, own in runs.items()
    }

    def seen(row: str, columns: list[str]) -> str:
        return ", ".join(f"{column} {gain[column, row]:+.1f}" for column in columns)

    columns, claims = list(found), []
    if "digits turned" in found:
        ahead = gain["digits turned", "FedAvg"], gain["digits turned", "SCMoE paper"]
        claims.append(
            claim(
                "turned cameras: default at least 5 points above FedAvg and no more than 0.5 below paper",
                ahead[0] >= 5 and ahead[1] >= -0.5,
                f"{ahead[0]:+.1f} to FedAvg, {ahead[1]:+.1f} to paper",
            )
        )
    strong = [column for column in columns if column.endswith(" 0.1")]
    if strong:
        held = all(gain[column, "FedAvg"] >= 1 for column in strong)
        claims.append(claim("skew 0.1: default at least 1 point above FedAvg", held, seen("FedAvg", strong)))
    skewed = [column for column in columns if column != "digits turned"]
    if skewed:
        most = max(gain[column, "FedAvg"] for column in skewed)
        claims.append(
            claim("paper: 20 points and more over FedAvg under label skew", most >= 20, seen("FedAvg", skewed))
        )
        tuned = float(np.mean([gain[column, "FedAvg + FT"] for column in skewed]))
        claims.append(
            claim(
                "specification: under label skew alone it is one of several equal methods (FedAvg + FT within 1 point)",
                abs(tuned) <= NOISE,
                seen("FedAvg + FT", skewed),
            )
        )
    gate = float(np.mean([gain[column, "uniform mean of outputs, default"] for column in columns]))
    claims.append(
        claim(
            "specification: the uniform mean of all outputs is as good as the trained gate within 1 point, on average",
            gate <= NOISE,
            seen("uniform mean of outputs, default", columns),
        )
    )
    energy = float(np.mean([gain[column, "no energy, default"] for column in columns]))
    claims.append(
        claim("paper: the energies help (by more than 1 point, on average)", energy > NOISE, f"{energy:+.2f}")
    )
    overlapping, kmeans = (
        np.mean([over_seeds(runs[row], lambda run: run.details["silhouette"]).mean() for runs in found.values()])
        for row in ("SCMoE paper", "k-means each round, paper")
    )
    claims.append(
        claim(
            "paper: overlapping clusters have the higher silhouette (0.65 against 0.43)",
            bool(overlapping > kmeans),
            f"{overlapping:.2f} against {kmeans:.2f}",
        )
    )
    return claims


def clustering_table(arguments: argparse.Namespace) -> None:
    """Section 17.2, and by how much the default is ahead of each row, seed by seed."""
    columns = chosen(CLUSTERING_SETTINGS, arguments)
    methods = list(CLUSTERINGS.values())
    found = {column: measure(column, methods, CLUSTERING_SETTINGS[column], arguments) for column in columns}
    spec = {
        (row, column): of_row[k]
        for row, of_row in zip(CLUSTERINGS, CLUSTERING_SPEC, strict=False)
        for k, column in enumerate(CLUSTERING_SETTINGS)
    }
    ahead = {
        (row, column): over_seeds(runs[BEST], points) - over_seeds(runs[method], points)
        for column, runs in found.items()
        for row, method in CLUSTERINGS.items()
    }

    def accuracy(row: str, column: str) -> str:
        runs = found[column][CLUSTERINGS[row]]
        told = f"{spec[row, column]:.1f}" if (row, column) in spec else "-"
        many = f", {over_seeds(runs, n_clusters).mean():.1f}" if row != next(iter(CLUSTERINGS)) else ""
        return f"{over_seeds(runs, points).mean():.1f} ({told}){many}"

    def difference(row: str, column: str) -> str:
        gains = ahead[row, column]
        spread = gains.std(ddof=1) if len(gains) > 1 else 0.0
        return f"{gains.mean():+.1f} ± {spread:.1f}"

    show(
        "Accuracy of a device's best expert (the specification's), number of clusters",
        columns,
        {row: [accuracy(row, column) for column in columns] for row in CLUSTERINGS},
    )
    show(
        "By how many points the default is ahead (mean and standard deviation over the seeds)",
        columns,
        {row: [difference(row, c) for c in columns] for row, method in CLUSTERINGS.items() if method != BEST},
    )
    claims = []
    for row in (row for row in CLUSTERINGS if row.startswith("k-means")):
        for column in columns:
            gains, seen = ahead[row, column], f"{difference(row, column)}, seed by seed {ahead[row, column].round(1)}"
            if column == "rotation":
                text = f"rotation: {row}, is as good within {NOISE:.0f} point (specification: with the right K)"
                claims.append(claim(text, bool(abs(gains.mean()) <= NOISE), seen))
            else:
                text = f"{column}: MCTC's experts are more than {NOISE:.0f} point better than those of {row}"
                claims.append(claim(text, bool(gains.mean() > NOISE), seen))
    figures = [
        {
            "setting": column,
            "clustering": row,
            "accuracy": over_seeds(found[column][method], points).tolist(),
            "silhouette": [run.details.get("silhouette") for run in found[column][method]],
            "spec": spec.get((row, column)),
        }
        for column in columns
        for row, method in CLUSTERINGS.items()
    ]
    write(arguments, figures, claims)


def private_weight(run: RunOutcome) -> float:
    """Of the private model, mean over the devices; NaN of a run from before outcomes had it."""
    return float(
        np.mean([np.nan if device.private_weight is None else device.private_weight for device in run.devices])
    )


def gate_table(arguments: argparse.Namespace) -> None:
    """Section 17.3, and what it says about its rows."""
    columns = chosen(GATE_SETTINGS, arguments)
    rows, methods = list(GATE_METHODS), GATE_METHODS
    found = {column: measure(column, list(methods.values()), GATE_SETTINGS[column], arguments) for column in columns}
    accuracy = {(row, c): over_seeds(found[c][methods[row]], points) for row in rows for c in columns}
    weight = {(row, c): over_seeds(found[c][methods[row]], private_weight) for row in rows for c in columns}
    spec = {
        ((private, gate), column): figures
        for private, gates in GATE_SPEC.items()
        for gate, told in gates.items()
        for column, figures in zip(GATE_SETTINGS, told.split(), strict=True)
    }

    def gate_cell(row: tuple[str, str], column: str) -> str:
        told = spec[row, column].replace("/", " / ")
        return f"{accuracy[row, column].mean():.1f} / {weight[row, column].mean():.2f} ({told})"

    show(
        "Accuracy / mean weight of the private model (the specification's)",
        columns,
        {": ".join(row): [gate_cell(row, column) for column in columns] for row in rows},
    )
    figures = [
        {
            "setting": column,
            "private": row[0],
            "gate": row[1],
            "accuracy": accuracy[row, column].tolist(),
            "private_weight": weight[row, column].tolist(),
            "spec": spec[row, column],
        }
        for column in columns
        for row in rows
    ]
    write(arguments, figures, judge_gates(columns, accuracy, weight))


def judge_gates(columns: list[str], accuracy: GateFigures, weight: GateFigures) -> list[dict[str, Any]]:
    """What section 17.3 reads from its table."""
    sensitive, warm, own, ours = PRIVATE  # D_H from w0, D_H from the best expert, all from w0, all from the best expert

    def gains(row: tuple[str, str], other: tuple[str, str]) -> NDArray[np.float64]:
        """By how many points a row is ahead of another, by column."""
        return np.array([(accuracy[row, c] - accuracy[other, c]).mean() for c in columns])

    def told(figures: NDArray[np.float64]) -> str:
        return ", ".join(f"{column} {figure:+.1f}" for column, figure in zip(columns, figures, strict=True))

    def mostly(text: str, figures: NDArray[np.float64]) -> dict[str, Any]:
        """A claim that a difference is positive in six columns of seven."""
        held = np.count_nonzero(figures > 0) >= len(columns) * 6 / 7
        return claim(f"in six of seven: {text}", bool(held), told(figures))

    seen_all = np.array(
        [weight[(private, "gate on train, energy"), c].mean() for private in (own, ours) for c in columns]
    )
    split = [column for column in columns if column.endswith("classes")]
    claims = [
        mostly(
            "default private model and gate are better than the printed ones",
            gains((ours, "gate on val, energy"), (sensitive, "gate on train, energy")),
        ),
        claim(
            "a gate that learns from what the private model has seen whole gives it 0.9 and more",
            bool(seen_all.min() >= 0.9),
            f"{seen_all.min():.2f} to {seen_all.max():.2f}",
        ),
        mostly(
            "so that validation samples serve it better (all train, from w0)",
            gains((own, "gate on val, offset"), (own, "gate on train, energy")),
        ),
        mostly(
            "training samples serve it better than validation samples, if the private model has seen D_H alone",
            gains((sensitive, "gate on train, offset"), (sensitive, "gate on val, offset")),
        ),
        mostly(
            "and both together better than either",
            np.minimum(
                gains((sensitive, "gate on train+val, offset"), (sensitive, "gate on train, offset")),
                gains((sensitive, "gate on train+val, offset"), (sensitive, "gate on val, offset")),
            ),
        ),
    ]
    for private, gate, expected, near in (
        (sensitive, "gate on train", "+0.65", False),
        (sensitive, "gate on val", "+0.65", False),
        (warm, "gate on val", "-0.1 to +0.3", True),
        (ours, "gate on val", "-0.1 to +0.3", True),
    ):
        energy = gains((private, f"{gate}, energy"), (private, f"{gate}, no energy"))
        text = f"the energies {'change little' if near else 'help'} on average ({private}, {gate}; there {expected})"
        held = abs(energy.mean()) <= 0.5 if near else energy.mean() > 0
        claims.append(claim(text, bool(held), f"{energy.mean():+.2f}: {told(energy)}"))
    offsets = gains((sensitive, "untrained gate, offset"), (sensitive, "untrained gate, energy"))
    claims.append(mostly("offsets help an untrained gate (there +0.4 to +3.5, classes +34)", offsets))
    trained = gains((ours, "gate on val, offset"), (ours, "gate on val, energy"))
    text = f"offsets change a trained gate by less than {NOISE:.0f} point (all train, from best expert)"
    claims.append(claim(text, bool(np.abs(trained).max() < NOISE), told(trained)))
    for column in split:
        row = (sensitive, "untrained gate, energy")
        lost = (accuracy[row, column] - accuracy[(sensitive, "uniform mean"), column]).mean()
        text = f"{column}: energies alone trust a private model that knows other classes (weight 0.84, 31 points lost)"
        claims.append(
            claim(
                text, bool(lost < -NOISE), f"weight {weight[row, column].mean():.2f}, {lost:+.1f} to the uniform mean"
            )
        )
    return claims


def tau_table(arguments: argparse.Namespace) -> None:
    """What the threshold of the printed rule does."""
    columns = chosen(GATE_SETTINGS, arguments)
    found = {column: measure(column, list(TAUS.values()), GATE_SETTINGS[column], arguments) for column in columns}

    def tau_cell(runs: list[RunOutcome]) -> str:
        return f"{over_seeds(runs, points).mean():.1f}, {over_seeds(runs, n_clusters).mean():.1f}"

    show(
        "Accuracy, number of clusters",
        columns,
        {f"tau {tau:g}": [tau_cell(found[c][method]) for c in columns] for tau, method in TAUS.items()},
    )
    figures = [
        {"setting": column, "tau": tau, "accuracy": over_seeds(found[column][method], points).tolist()}
        for column in columns
        for tau, method in TAUS.items()
    ]
    write(arguments, figures, [])


TABLES = {"clustering": clustering_table, "gate": gate_table, "tau": tau_table}


def main() -> None:
    parser = parser_of(__doc__, "scmoe-pfl")
    parser.add_argument(
        "--table", choices=["methods", *TABLES], default="methods", help="17.1 (default), 17.2, 17.3 or tau"
    )
    parser.add_argument("--full", action="store_true", help="17.1: CIFAR-10 in the paper's size")
    add_rows(parser)
    arguments = parser.parse_args()
    if (arguments.full or arguments.rows) and arguments.table in TABLES:
        parser.error("--full and --rows are for --table methods: the others have one size, and all of their rows")
    if arguments.table in TABLES:
        TABLES[arguments.table](arguments)
        return
    settings = FULL if arguments.full else SETTINGS
    columns = chosen(settings, arguments)
    rows = chosen_rows([*METHODS, *ON_ALL_DATA], arguments)
    found = {column: rows_of(column, settings[column], rows, arguments) for column in columns}
    spec = {(row, column): figure for row in rows for column, figure in zip(SETTINGS, SPEC.get(row, ()), strict=False)}
    show(
        "Accuracy / macro F1 / standard deviation over the devices (the specification's accuracy)",
        columns,
        {row: [cell(found[c][row], spec.get((row, c))) for c in columns] for row in rows},
    )
    if clustered := {row: told for row, told in CLUSTERED.items() if row in rows}:
        show(
            "Silhouette of the clusters (range over the seeds)",
            [*columns, "specification, digits"],
            {row: [*(silhouette(found[c][row]) for c in columns), told] for row, told in clustered.items()},
        )
    claims = [] if arguments.rows else judge(found)
    figures = [
        {
            "setting": column,
            "method": row,
            "accuracy": over_seeds(found[column][row], points).tolist(),
            "macro_f1": over_seeds(found[column][row], lambda run: 100 * run.macro_f1).tolist(),
            "std": over_seeds(found[column][row], lambda run: 100 * run.std).tolist(),
            "silhouette": [run.details.get("silhouette") for run in found[column][row]],
            "spec": spec.get((row, column)),
        }
        for column in columns
        for row in rows
    ]
    write(arguments, figures, claims)


if __name__ == "__main__":
    main()
