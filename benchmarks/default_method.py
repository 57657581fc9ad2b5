"""The default method against the baselines, setting by setting: the tables of fedge.md sections 15.2 to 15.4 remade.

Networks have one hidden layer of 32, inputs are small (digits 8x8; MNIST and Fashion-MNIST mean-pooled to 14x14;
CIFAR-10 to 3x8x8), 20 devices, SGD 0.05 with momentum 0.9, batch 32, 10 steps per participation. Accuracy is that of
the devices' own bundles on their own test samples, the mean over devices, then over seeds. Differences to the
specification: a device's test set is a quarter of its samples, not 120 further images; "best baseline" is picked by
its mean in hindsight from the columns of this table, which flatters it.

Tables: `everybody` (15.2: 30 rounds, all devices, nothing marked sensitive) and `quarter` (15.3: 80 rounds, a quarter
of the devices, 30 % of the samples kept out of uploads), and two that the specification does not have: `marked`, as
`everybody` with 70 % of the samples kept out of uploads, and `hundreds`, 100 rounds with a tenth of 200 devices of 60
samples each, for those of the settings that have as many samples (MNIST, Fashion-MNIST; others cannot be asked for
there). `--model cnn` takes a small convolutional network instead of the perceptron.

`--table ablation` (15.4: as `everybody`, nine settings) has a row for each part of `fedge` that an option or a class of
this file changes: accuracy and macro F1 minus those of `fedge`, in points, and the specification's differences in
brackets; in the last column means over the settings, with the standard error of the paired differences of accuracy over
settings and seeds.

Below each table: in how many runs of each setting the trial of `fedge` split the devices; below the others before that
`fedge` against the best baseline over all settings, and against each other method the mean difference, with its
standard error over settings and seeds, and in how many settings it is at least equal.

Rivals that no fleet would want are classes in benchmarks/rivals. With --rivals-train-on-validation all methods but
variants of `fedge` train on the devices' validation samples, too, and stop by none; their runs are in --out/on-all.

Runs that are done are kept in --out; the same command goes on where it was.

Examples:
    python benchmarks/default_method.py --data DIR --seeds 40,41,42
    python benchmarks/default_method.py --data DIR --table quarter --settings "digits, alpha 0.5"
    python benchmarks/default_method.py --settings "digits, 4 rotations" --model cnn --json rotations.json
    python benchmarks/default_method.py --data DIR --table hundreds --settings "MNIST, 4 rotations"
    python benchmarks/default_method.py --data DIR --table ablation
    python benchmarks/default_method.py --table ablation --settings "digits, alpha 1" --methods fedge,fedge:rho=0.3
    python benchmarks/default_method.py --data DIR --methods fedge,benchmarks.default_method:Clipped
    python benchmarks/default_method.py --settings "digits, alpha 1" --rivals-train-on-validation \\
        --methods fedge,dbe,benchmarks.rivals.fedpac:FedPac,benchmarks.rivals.fedala:FedAla+ft
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar
from unittest.mock import patch

import msgspec
import numpy as np
from script import finish, parser_of, progress_of, several

from coordinator.aggregation.pooled import ETA_0, wants_split
from coordinator.methods.method import NO_DATA, Server
from coordinator.methods.papers.fedge import Fedge
from coordinator.methods.papers.fedge_state import FedgeState, PooledSettings
from coordinator.methods.settings import MethodSettings
from coordinator.simulation import federation
from coordinator.simulation.compare import compare, compare_runs
from coordinator.simulation.reports.comparison import Comparison, MethodOutcome
from coordinator.simulation.run import Watch
from coordinator.simulation.settings import CompareSettings
from coordinator.store.records import Device
from fedge.data.problems.calibration import Calibration
from fedge.steps.contract import Action
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.mixture.fit_energy import EnergyFitted
from fedge.steps.mixture.fit_gate import FitGate
from fedge.tasks import DeviceData, make_device_data
from fedge.wire.messages import Role

sys.path.insert(0, str(Path(__file__).parents[1]))  # methods are named by path: benchmarks.default_method:NoGuard
from benchmarks.steps.ablated_candidates import FitAblatedCandidates
from benchmarks.steps.ablated_gate import FitAblatedGate

A = TypeVar("A", bound=Action)

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
    "marked": {"rounds": 30, "participation": 1.0, "sensitive": 0.7},
    "ablation": {"rounds": 30, "participation": 1.0, "sensitive": 0.0},
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
    "marked": {},
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
ABLATED = (
    *("digits, alpha 1", "digits, alpha 0.1", "digits, 4 rotations", "digits, own label code", "MNIST, alpha 0.5"),
    *("MNIST, alpha 0.1", "MNIST, 4 rotations", "Fashion, alpha 0.5", "HAR, 60 windows each"),
)
"""The settings of the ablation."""
HERE = "benchmarks.default_method"
ABLATION = {
    "fedge": ("",
        "96.8/93.5 97.6/93.4 94.2/88.8 87.8/76.2 92.5/82.2 96.1/83.3 88.3/80.6 86.6/74.3 93.5/87.4"),
    f"{HERE}:NoFinalFit": ("norefit",
        "-0.10/-0.0 -0.02/-0.3 -0.09/+0.1 -2.25/-3.0 -0.07/-0.1 -0.04/+0.3 -0.06/+0.1 -0.17/-0.6 +0.07/-0.3"),
    f"{HERE}:NoGuard": ("noguard",
        "+0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0"),
    f"{HERE}:NoLocal": ("noU",
        "+0.00/+0.0 +0.00/+0.0 +0.00/+0.0 -1.63/-2.8 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0"),
    f"{HERE}:NoPrior": ("noprior",
        "+0.06/-0.1 -0.30/-1.9 +0.07/-0.8 +0.37/+0.7 -1.32/-6.6 -0.75/-5.1 +0.06/-0.9 -2.26/-5.4 +0.00/+0.0"),
    f"{HERE}:NoTemperature": ("notemp",
        "+0.00/+0.0 +0.10/+0.1 +0.03/+0.2 -0.76/-1.4 -0.21/-0.7 +0.07/-0.1 -0.39/-1.2 -0.56/-1.4 +0.15/+0.3"),
    f"{HERE}:SharedPrior": ("nokv",
        "+0.00/+0.0 -0.05/-0.0 -0.12/-0.3 +0.00/+0.0 -0.00/+0.0 -0.04/-0.9 -0.14/-0.4 -0.01/+0.0 +0.00/+0.0"),
    f"{HERE}:FixedPrior": ("fixedprior",
        "+0.05/+0.0 +0.22/+0.1 -0.08/+0.1 -0.76/-1.4 -0.35/-1.5 -0.15/-2.5 -0.28/-0.9 -0.79/-2.2 -0.17/-0.1"),
    f"{HERE}:NoGlobal": ("noglobal",
        "+0.00/+0.0 +0.00/+0.0 -0.10/-0.0 +0.00/+0.0 +0.00/+0.0 +0.00/+0.0 +0.51/+1.0 +0.00/+0.0 +0.00/+0.0"),
    f"{HERE}:PrivateAlone": ("privonly",
        "-0.56/-0.7 -0.32/-1.2 -0.08/-0.2 -1.19/-2.0 -1.51/-2.5 -0.65/-3.8 +0.06/+0.0 -2.87/-5.3 -0.99/-0.9"),
    f"{HERE}:GlobalAlone": ("globonly",
        "+0.19/+0.8 -0.28/-1.1 -9.17/-15.6 -54.64/-60.3 +0.10/+0.3 -0.31/-2.1 -17.37/-24.3 +0.60/+0.8 -3.20/-3.7"),
    f"{HERE}:ExpertAlone": ("exponly",
        "+0.19/+0.8 -0.28/-1.1 -0.39/-0.6 -54.64/-60.3 +0.10/+0.3 -0.31/-2.1 +0.08/-0.2 +0.60/+0.8 -3.20/-3.7"),
    f"{HERE}:NoShrinkage": ("noshrink",
        "+0.06/+0.0 -0.03/-0.1 -0.31/-0.5 -0.66/-0.8 -0.07/-0.2 -0.07/-1.1 +0.24/+0.3 -0.07/-0.1 -0.67/-0.8"),
    f"{HERE}:UniformWeights": ("uniform",
        "+0.00/+0.0 +0.00/+0.0 +0.13/+0.4 +0.27/+0.8 -0.03/+0.1 +0.01/+0.0 -0.12/-0.2 +0.04/+0.0 -0.03/-0.0"),
    f"{HERE}:PooledWeights": ("pooled",
        "+0.00/+0.0 +0.00/+0.0 +0.08/+0.3 +0.38/+0.8 -0.01/+0.2 +0.01/+0.0 -0.08/-0.1 +0.01/+0.0 +0.03/+0.0"),
    f"{HERE}:NoEnergy": ("noenergy",
        "+0.08/+0.0 +0.00/+0.2 +0.00/+0.0 +0.24/+0.6 +0.00/-0.3 +0.04/+0.3 +0.11/+0.2 -0.08/-0.4 +0.53/+0.4"),
    f"{HERE}:UntrainedGate": ("nogate",
        "-0.01/+0.0 +0.00/+0.0 -0.02/-0.2 +0.46/+0.9 -0.04/-0.1 -0.00/+0.6 +0.14/+0.4 -0.07/-0.4 -0.56/-1.0"),
    f"{HERE}:AlwaysLocal": ("always U",
        "+0.07/+0.0 -0.25/-1.5 +0.23/+0.8 +0.00/+0.0 -0.01/+0.4 +0.15/+2.2 +0.10/+0.3 -0.36/-0.8 -0.38/+0.1"),
    f"{HERE}:Private40": ("FT40 private",
        "+0.08/+0.2 -0.06/-0.2 -0.05/-0.3 +0.43/+0.5 -0.22/-0.3 -0.03/+0.8 +0.04/+0.4 +0.12/-0.2 +0.23/+0.5"),
    f"{HERE}:PrivateFromStart": ("private from w0",
        "+0.13/+0.6 -0.30/-1.6 -0.19/-0.3 -0.83/-2.1 +0.10/+0.5 -0.00/+1.2 +0.14/+0.3 -0.28/-0.7 -1.50/-1.9"),
    "fedge:gamma=0": ("nomom",
        "-0.16/-0.1 -0.37/-0.4 -0.33/+0.1 -0.45/-0.9 -0.44/-0.3 -0.26/-0.1 -0.24/-0.4 -0.68/-1.4 -0.49/-0.5"),
    "fedge:split=never": ("nosplit",
        "+0.23/+0.9 -0.03/-0.1 -2.74/-5.6 -0.16/+0.2 -0.21/+0.2 +0.15/+0.8 -4.10/-8.1 -0.19/-0.3 +0.08/+0.1"),
    "fedge:split=always": ("alwayssplit",
        "-0.78/-1.7 -0.32/-0.1 +0.20/+0.4 -1.23/-2.6 -0.67/-1.4 -0.61/-4.1 -0.08/-0.0 -1.49/-3.1 -1.23/-0.8"),
    f"{HERE}:ByStatistic": ("tsplit",
        "-0.22/-0.1 +0.21/+0.5 +0.44/+0.9 +0.25/-0.3 -0.29/-0.5 -0.00/-0.2 +0.11/+0.5 -0.17/-0.2 -0.33/-0.3"),
    "fedge:gamma=0.7": ("mom7",
        "-0.21/-0.0 -0.52/-1.4 -0.83/-1.4 +0.33/+0.4 -0.07/+0.7 +0.19/+0.3 +0.50/+1.3 -0.01/+0.2 +0.32/+1.2"),
    "fedge:rho=0.2": ("rho2",
        "+0.16/+0.3 -0.03/-0.1 -0.44/-0.2 -0.10/+0.3 +0.07/+0.0 +0.06/+0.4 +0.35/+0.6 -0.13/-1.2 +0.11/+0.2"),
    "fedge:rho=0.6": ("rho6",
        "-0.01/-0.0 +0.31/+0.8 -1.89/-4.8 +0.31/+0.5 -0.10/+0.3 -0.10/-0.1 -0.31/-1.3 -0.21/-0.6 +0.47/+0.9"),
}  # fmt: skip
"""Of each row the specification's name, and its accuracy/F1 minus those of fedge in points, by setting; of fedge itself
accuracy and F1 in %."""


# ----------------------------------------------------------------------------------- the rows that no option makes


def ablated(step: type[A], order: Action, **changes: object) -> A:
    """An order of the benchmark's own step, otherwise the same."""
    return step(**{name: getattr(order, name) for name in order.__struct_fields__} | changes)


class Ablated(Fedge):
    """`fedge` with the steps of the ablations."""

    steps = (FitAblatedCandidates, FitAblatedGate)


class NoFinalFit(Ablated):
    """Nothing learns from the validation samples (section 10)."""

    def make_mixture_order(self, pool: PooledSettings, fitted: CandidatesFitted) -> FitGate:
        return ablated(FitAblatedGate, super().make_mixture_order(pool, fitted), refits=False)


class Clipped(Ablated):
    """With `--average clipped`: what bounds for hostile devices cost where there are none."""

    def __init__(self, settings: MethodSettings, server: Server = NO_DATA) -> None:
        bounded = msgspec.structs.replace(settings.protection, average="clipped")
        super().__init__(msgspec.structs.replace(settings, protection=bounded), server)


class NoGuard(Ablated):
    """The mixture serves, whatever validation says (section 11)."""

    def make_mixture_order(self, pool: PooledSettings, fitted: CandidatesFitted) -> FitGate:
        return ablated(FitAblatedGate, super().make_mixture_order(pool, fitted), guards=False)


class UntrainedGate(Ablated):
    """r = 0 (section 9)."""

    def make_mixture_order(self, pool: PooledSettings, fitted: CandidatesFitted) -> FitGate:
        return ablated(FitAblatedGate, super().make_mixture_order(pool, fitted), trains_gate=False)


class NoLocal(Ablated):
    """Without a local model."""

    LOCAL = False


class AlwaysLocal(Ablated):
    """The local model comes in, whatever the pool says."""

    def takes_local(self, mixed: Collection[Role], piloted: Sequence[EnergyFitted]) -> bool:  # noqa: ARG002
        return Role.LOCAL in mixed


class NoPrior(Ablated):
    """kappa = 0 for all candidates."""

    def calibrate(self, role: Role, fitted: Iterable[CandidatesFitted], *, pooling: bool) -> Calibration:
        found = super().calibrate(role, fitted, pooling=pooling)
        return found if pooling else msgspec.structs.replace(found, kappa=0.0)

    def allows(self, role: Role, point: Calibration) -> bool:  # noqa: ARG002
        return point.kappa == 0


class SharedPrior(Ablated):
    """kappa = 0 for private and local models."""

    def allows(self, role: Role, point: Calibration) -> bool:
        return role.is_shared or point.kappa == 0


class FixedPrior(Ablated):
    """T = 1, and the whole prior for the models that are shared."""

    def calibrate(self, role: Role, fitted: Iterable[CandidatesFitted], *, pooling: bool) -> Calibration:  # noqa: ARG002
        return super().calibrate(role, fitted, pooling=False)


class NoTemperature(Ablated):
    """T = 1."""

    def allows(self, role: Role, point: Calibration) -> bool:  # noqa: ARG002
        return point.temperature == 1


class NoGlobal(Ablated):
    """Without the global model in the mixture, if there are experts."""

    def select_mixed(self, roles: list[Role]) -> list[Role]:
        return [role for role in roles if role is not Role.GLOBAL or Role.EXPERT not in roles]


class PrivateAlone(NoGuard):
    """One model, without guard; where there is none the global one."""

    LOCAL = False
    ROLE: ClassVar[Role] = Role.PRIVATE

    def select_mixed(self, roles: list[Role]) -> list[Role]:
        return [self.ROLE if self.ROLE in roles else Role.GLOBAL]


class GlobalAlone(PrivateAlone):
    """The global model."""

    ROLE = Role.GLOBAL


class ExpertAlone(PrivateAlone):
    """The primary expert."""

    ROLE = Role.EXPERT


class NoShrinkage(Ablated):
    """Each device has its own weights."""

    SHRINKAGE = 0.001


class PooledWeights(Ablated):
    """All devices have the pooled weights."""

    SHRINKAGE = 1e9


class UniformWeights(Ablated):
    """All candidates weigh the same."""

    WEIGHT_TURNS = ()
    SHRINKAGE = 1e12


class NoEnergy(Ablated):
    """beta = 0."""

    def choose_beta(self, losses: Sequence[Sequence[float]]) -> float:  # noqa: ARG002
        return 0.0


class Private40(Ablated):
    """40 steps of the private model, whatever validation says."""

    def make_fit_order(self, state: FedgeState, device: Device, *, local: bool) -> FitCandidates:
        return ablated(FitAblatedCandidates, super().make_fit_order(state, device, local=local), private_steps=40)


class PrivateFromStart(Ablated):
    """The private model learns from the initial model."""

    def make_fit_order(self, state: FedgeState, device: Device, *, local: bool) -> FitCandidates:
        return ablated(
            FitAblatedCandidates, super().make_fit_order(state, device, local=local), private_start="initial"
        )


class ByStatistic(Ablated):
    """Experts where t > 1, however separable the clusters are."""

    def should_split(self, statistic: float | None, separability: float, n_devices: int) -> bool:  # noqa: ARG002
        return wants_split(statistic, ETA_0, n_devices)


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


def parser_of_settings(description: str | None, seeds: list[int]) -> argparse.ArgumentParser:
    """A parser for scripts that run one method in some of `SETTINGS`."""
    parser = parser_of(description)
    parser.add_argument("--data", type=Path, help="folder of the data sets (docs/results/fedge.md)")
    parser.add_argument(
        "--settings",
        type=lambda text: [part.strip() for part in text.split(";")],
        default=["digits, alpha 0.5"],
        help="settings of default_method.py with semicolons between them (default: digits, alpha 0.5)",
    )
    default = ",".join(map(str, seeds))
    parser.add_argument("--seeds", type=several(int), default=seeds, help=f"with commas (default {default})")
    parser.add_argument("--method", default="fedge", help="one whose devices end with a mixture")
    parser.add_argument("--model", help="a network, such as cnn (default: that of the setting)")
    parser.add_argument("--rounds", type=int, default=30)
    return parser


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
    if table == "ablation":
        return list(ABLATED)
    if "samples" not in TABLES[table]:
        return list(SETTINGS)
    return [name for name, fields in SETTINGS.items() if fields["set"] in LARGE and "images" not in name]


def measure(name: str, arguments: argparse.Namespace) -> Comparison:
    """All methods on one setting."""
    fields = dict(SETTINGS[name])
    source = source_of(str(fields.pop("set")), arguments.data, arguments.out)
    methods = ",".join(arguments.methods)
    settings = msgspec.convert(
        {"methods": methods, "seeds": arguments.seeds, "hardware": "none"}
        | {"global_test": 0.0, "model": arguments.model, "evaluate_every": 1000, "jobs": arguments.jobs}
        | fields
        | TABLES[arguments.table]
        | ({"rounds": arguments.rounds} if arguments.rounds else {})
        | source,
        CompareSettings,
        strict=False,
    )

    watch = progress_of(name)
    if arguments.rivals_train_on_validation:
        found = unequal(settings, arguments.methods, arguments.out, watch)
    else:
        found = compare(settings, arguments.out, watch)
    return found


def unequal(settings: CompareSettings, methods: Sequence[str], out: Path, watch: Watch) -> Comparison:
    """As `compare`, but the rivals train on validation samples, too."""
    ours = [method for method in methods if method.startswith((OURS, HERE))]
    rivals = [method for method in methods if method not in ours]

    def part(methods: Sequence[str], out: Path, jobs: int | None) -> Comparison:
        own = {"methods": ",".join(methods), "baseline": methods[0], "jobs": jobs}
        return compare(msgspec.structs.replace(settings, **own), out, watch)

    equal = part(ours, out, settings.jobs)
    with changed(on_all):
        more = part(rivals, out / "on-all", 1)  # in this process
    runs = sorted([*equal.runs, *more.runs], key=lambda run: methods.index(run.method))
    return compare_runs(equal.scenario, runs, methods, equal.seeds, methods[0], settings.target)


def on_all(own: DeviceData) -> DeviceData:
    """The data of a device that trains on its validation samples, and has none."""
    assert own.sensitive_val is not None
    x, y = np.concatenate([own.x_train, own.x_val]), np.concatenate([own.y_train, own.y_val])
    return DeviceData(x, y, np.concatenate([own.sensitive, own.sensitive_val]), own.x_val[:0], own.y_val[:0])


@contextmanager
def changed(change: Callable[[DeviceData], DeviceData]) -> Iterator[None]:
    """Within it the devices of a simulation in this process have other data."""
    with patch.object(federation, "make_device_data", lambda task, share: change(make_device_data(task, share))):
        yield


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


def summarise(comparisons: Mapping[str, Comparison]) -> str:
    """What stands below the table: the default method against the best and against each other method."""
    gains: list[np.ndarray] = []
    over: dict[str, list[np.ndarray]] = {}
    for found in comparisons.values():
        ours = next(m for m in found.methods if m.method == OURS)
        assert ours.to_best_other is not None
        gains.append(100 * np.array(ours.to_best_other.seeds))
        for other in found.methods:
            if other is not ours:
                difference = 100 * (np.array(ours.accuracy.seeds) - np.array(other.accuracy.seeds))
                over.setdefault(other.method, []).append(difference)
    means, runs = np.mean(gains, axis=1), np.ravel(gains)
    each = (f"{m} {paired(np.ravel(d))} [{(np.mean(d, axis=1) >= 0).sum()}]" for m, d in over.items())
    return (
        f"\n{len(means)} settings: mean difference to the best baseline {paired(runs)} points, at least equal in "
        f"{(means >= 0).sum()}, lowest {means.min():+.2f}; {len(runs)} runs: negative in {(runs < 0).mean():.0%}\n"
        f"{OURS} minus each other, mean [settings where at least equal]: {', '.join(each)}"
    )


def paired(differences: np.ndarray, decimals: int = 2) -> str:
    """Mean and, of two or more, standard error over settings and seeds."""
    mean = f"{differences.mean():+.{decimals}f}"
    if len(differences) < 2:
        return mean
    return f"{mean} ± {np.std(differences, ddof=1) / np.sqrt(len(differences)):.{decimals}f}"


def seeds_of(own: MethodOutcome) -> np.ndarray:
    """Accuracy and macro F1 of each seed, in per cent, (2, seeds)."""
    assert own.macro_f1 is not None
    return np.array([own.accuracy.seeds, own.macro_f1.seeds]) * 100


def splits(comparisons: Mapping[str, Comparison]) -> str:
    """In how many of its runs the default method split the devices."""
    of_ours = {name: [run.split for run in found.runs if run.method == OURS] for name, found in comparisons.items()}
    counts = (f"{name}: {sum(split)} of {len(split)}" for name, split in of_ours.items())
    return f"runs of {OURS} that split the devices: {'; '.join(counts)}"


def ablation(comparisons: Mapping[str, Comparison]) -> str:
    """The table of section 15.4: a row for each method, a column for each setting."""
    found = {name: {m.method: m for m in c.methods} for name, c in comparisons.items()}
    published = {
        method: {s: tuple(map(float, pair.split("/"))) for s, pair in zip(ABLATED, text.split(), strict=True)}
        for method, (_, text) in ABLATION.items()
    }
    lines = [f"| change | {' | '.join(found)} | mean |", "|---" * (len(found) + 2) + "|"]
    for method in next(iter(found.values())):
        before = {} if method == OURS else {name: methods[OURS] for name, methods in found.items()}
        cells, pairs, ours, specs = [], [], [], []
        for name, methods in found.items():
            m, o = methods[method], before.get(name)
            pair = seeds_of(m) - (0 if o is None else seeds_of(o))
            spec = published.get(method, {}).get(name)
            cells.append(shown(pair.mean(axis=1), spec, sign="+" if before else ""))
            ours.append(pair.mean(axis=1))
            pairs.extend(pair[0])
            specs.append(spec)
        if not before:
            cells.append("")
        else:
            error = f" ± {np.std(pairs, ddof=1) / np.sqrt(len(pairs)):.2f}" if len(pairs) > 1 else ""
            spec = None if None in specs else tuple(np.mean(specs, axis=0))
            cells.append(shown(np.mean(ours, axis=0), spec, sign="+", error=error))
        label = method.removeprefix(f"{OURS}:").removeprefix(f"{HERE}:")
        named = ABLATION.get(method, ("", ""))[0]
        lines.append(f"| {' | '.join([f'{label} ({named})' if named else f'**{label}**', *cells])} |")
    return "\n".join(lines)


def shown(pair: np.ndarray, spec: tuple[float, ...] | None, *, sign: str, error: str = "") -> str:
    """Accuracy and macro F1, and the specification's in brackets."""
    brackets = f" ({spec[0]:{sign}.2f} / {spec[1]:{sign}.1f})" if spec else ""
    return f"{pair[0]:{sign}.2f}{error} / {pair[1]:{sign}.1f}{brackets}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with mnist, fashion-mnist, cifar10-jpeg.zip, uci-har, fsdd")
    parser.add_argument("--table", choices=list(TABLES), default="everybody")
    parser.add_argument("--settings", help="some of them, with ; between them (default: all)")
    parser.add_argument("--methods", type=several(), help="with commas (default: the table's)")
    parser.add_argument("--seeds", default="40,41,42", help="with commas (default 40,41,42)")
    parser.add_argument("--rounds", type=int, help="fewer than the table's, to see that it runs")
    parser.add_argument("--model", help="such as cnn, for all settings (default: one hidden layer of 32)")
    parser.add_argument(
        "--rivals-train-on-validation", action="store_true", help="all but fedge and its variants, one run at a time"
    )
    parser.add_argument("--out", type=Path, default=Path("default-method"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: a core each)")
    arguments = parser.parse_args()
    known = settings_of(arguments.table)
    names = [s.strip() for s in arguments.settings.split(";")] if arguments.settings else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown settings {unknown}; there are: {'; '.join(known)}")
    arguments.methods = arguments.methods or list(ABLATION if arguments.table == "ablation" else METHODS)
    if OURS not in arguments.methods or len(arguments.methods) < 2:
        parser.error(f"--methods needs {OURS} and something to compare it with")
    arguments.out.mkdir(parents=True, exist_ok=True)
    header = ["setting", *arguments.methods, "fedge - best other [per seed]", "specification"]
    if arguments.table != "ablation":
        print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|", flush=True)
    comparisons = {}
    for name in names:
        comparisons[name] = measure(name, arguments)
        if arguments.table != "ablation":
            print(row(name, comparisons[name], arguments.table), flush=True)
    print(ablation(comparisons) if arguments.table == "ablation" else summarise(comparisons))
    print(splits(comparisons))
    results = {name: msgspec.to_builtins(found.methods, enc_hook=str) for name, found in comparisons.items()}
    document = {"table": arguments.table, "seeds": arguments.seeds, "model": arguments.model, "settings": results}
    finish(arguments, document)


if __name__ == "__main__":
    main()
