"""FedCoE's table: global, personal and cold-start accuracy against FedAvg and a server-only model.

  mnist    the setting of fedcoe.md section 12: the 10,000 test images at 14 x 14, 8,000 dealt to 13 clients by
           Dirichlet(alpha), 3 of them held out as new clients; 400 of the other 2,000 are the server data D_s, 1,600
           the global test. A perceptron 196-64-32-10, the gate on the flat input
  cifar10  the paper's data, smaller: 6,000 images of CIFAR-10 at 8 x 8, 4,800 dealt, 400 in D_s, 800 to test; `cnn`,
           the gate with its convolutions, SGD 0.05. --full: all 60,000 at 32 x 32, `resnet_moe` of section 8, 2,000 in
           D_s, 8,000 to test, 1,000 rounds: days on two cores; we ran one round (the paper's network is larger)

K = 5, N_top = 5 of 10, 100 rounds of 10 steps, batch 32, SGD 0.1/0.9 with weight decay 5e-4, for every row. Columns, in
per cent, mean over seeds:

  global     the global model (of FedCoE: gate and its best two experts) on the global test, [range over seeds]
  personal   mean over clients on their held-out fifth. FedCoE: after local training / after Eq. 11; the others: the
             model itself / after 50 local steps ("+ft")
  cold       mean over new clients without any training of theirs, (the worst one)
  unasked    the same where a new client tells no profile: FedCoE's global model / the mean of its experts

The specification's figures follow in the lines marked "spec"; those have other random streams: differences below 2
points in "cold" mean nothing. "printed, one expert": here all ten clients feed it (section 11), in the
specification's run the five best.

--rows runs some of the rows alone ("repaired, profile prior" is of the run of "repaired"). The late joiners that tell
their profile stand in the column "cold" of the second, those that tell none in "unasked".

--metrics prints what all methods are measured by instead (worst tenth, macro F1, cost until the target, ...), of runs
of `fedge compare`: its devices keep 40 % for testing and validation, weight decay is FedCoE's alone, and there is no
start from a D_s model. Those that are done are kept in --out.

    python benchmarks/papers/fedcoe.py --data DIR --quick
    python benchmarks/papers/fedcoe.py --data DIR --seeds 0,1,2 --json results/fedcoe.json
    python benchmarks/papers/fedcoe.py --data DIR --rows "repaired; repaired, profile prior"
    python benchmarks/papers/fedcoe.py --data DIR --set cifar10
    python benchmarks/papers/fedcoe.py --data DIR --alphas 0.1 --metrics
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

import deploy
from coordinator.aggregation import correlation
from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Answer
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.papers import fedcoe_newcomers as newcomers
from coordinator.methods.papers.fedcoe import FedCoE, FedCoEState, Preset
from coordinator.methods.server.learning import ServerData
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.data.task import Preprocessing, TaskSpec
from fedge.models.build import make_initial_model
from fedge.models.training import Network, Trainer, get_torch_device
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train, Trained
from fedge.system.hardware import Processor
from fedge.tasks import DeviceData, load_pool
from fedge.tensors.layout import Codec, Layout, Model, Tensors, unflatten

sys.path.append(str(Path(__file__).parent.parent))
from default_method import cifar
from table import add_metrics, add_rows, chosen_rows, compared, finish, measured, plain_parser, say, write

N_CLIENTS, N_NEW = 10, 3
LOCAL_STEPS = 50  # of "+ft"
RIVALS: dict[str, tuple[bool, float] | None] = {  # whether it starts from a D_s model, proximal_mu
    "D_s alone": None,
    "FedAvg, random start": (False, 0.0),
    "FedAvg, start from a D_s model": (True, 0.0),
    "FedProx 0.1, start from a D_s model": (True, 0.1),
}


class NoGate(FedCoE):
    """A gate that says 1 / K of every input, W_g = 0 in Eq. 3; all experts have their say."""

    TOP = 5

    def train_gate(self, experts: list[Model], start: Tensors | None, *, epochs: int, seed: int) -> Tensors:  # noqa: ARG002
        gate = super().train_gate(experts, None, epochs=0, seed=seed)
        return {name: np.zeros_like(value) for name, value in gate.items()}


class Refreshed(FedCoE):
    """The gate is trained again every ten rounds."""

    def make_parameters(self) -> Preset:
        return msgspec.structs.replace(super().make_parameters(), refresh_every=10)


class NoPrior(FedCoE):
    """Without the profile prior."""

    def make_parameters(self) -> Preset:
        return msgspec.structs.replace(super().make_parameters(), profile_prior=False)


class Vector(FedCoE):
    """The gate sees flat inputs, images, too."""

    TRUNK = "vector"


class VectorNoGate(Vector, NoGate):
    """Both."""


class VectorRefreshed(Vector, Refreshed):
    """Both."""


class VectorNoPrior(Vector, NoPrior):
    """Both."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # class without Vector, options
    "FedCoE printed": ("", {"preset": "printed"}),
    "FedCoE printed, no gate": ("NoGate", {"preset": "printed"}),
    "FedCoE printed, one expert": ("", {"preset": "printed", "n_experts": 1}),
    "repaired, gate refresh every 10": ("Refreshed", {}),
    "repaired": ("", {}),
    "repaired, one expert, N_top = 10": ("", {"n_experts": 1}),
}
PRIOR = "repaired, profile prior"
ROWS = [*RIVALS, *(row for name in VARIANTS for row in ((name, PRIOR) if name == "repaired" else (name,)))]
MEASURED = ("fedavg", "fedprox:proximal_mu=0.1")  # with --metrics, beside VARIANTS
SPEC: dict[float, dict[str, tuple[float | None, float | None, float | None, float, int]]] = {
    0.1: {
        "D_s alone": (87.4, 85.8, None, 85.4, 81),
        "FedAvg, random start": (92.9, 92.0, 93.0, 89.6, 72),
        "FedAvg, start from a D_s model": (92.9, 92.1, 95.6, 89.2, 80),
        "FedProx 0.1, start from a D_s model": (93.1, 92.1, 95.4, 89.8, 85),
        "FedCoE printed": (81.8, 94.0, 93.9, 79.1, 30),
        "FedCoE printed, no gate": (82.2, 93.3, 93.3, 79.8, 30),
        "FedCoE printed, one expert": (84.4, 93.2, 92.1, 86.3, 74),
        "repaired, gate refresh every 10": (90.3, 95.2, 93.1, 89.1, 81),
        "repaired": (92.0, 95.4, 92.9, 90.4, 81),
        PRIOR: (92.0, 95.4, 92.9, 92.7, 87),
        "repaired, one expert, N_top = 10": (92.3, 96.3, 93.3, 89.2, 84),
    },
    0.5: {
        "D_s alone": (87.4, 85.7, None, 86.4, 84),
        "FedAvg, random start": (94.7, 93.7, 89.1, 94.3, 91),
        "FedAvg, start from a D_s model": (93.4, 93.1, 90.9, 93.1, 91),
        "FedCoE printed": (91.6, 90.4, 92.2, 91.7, 89),
        "FedCoE printed, no gate": (91.4, 88.8, 92.2, 91.1, 88),
        "FedCoE printed, one expert": (91.8, 91.0, 92.2, 91.0, 88),
        "repaired, gate refresh every 10": (93.1, 93.2, 93.8, 93.6, 91),
        "repaired": (93.9, 93.2, 93.7, 93.8, 91),
        PRIOR: (93.9, 93.2, 93.7, 94.7, 92),
        "repaired, one expert, N_top = 10": (93.5, 93.9, 93.4, 92.9, 90),
    },
}


Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Setting:
    """A data set at a size: how many images are dealt out and how many the server has; the others are the test."""

    name: str
    images: str  # among the sets of `fedge compare`
    n_images: int
    input_shape: tuple[int, ...]
    model: str
    n_on_devices: int
    n_server_data: int
    learning_rate: float
    trunk: str  # of the gate
    scale: float  # of the pixels of the images

    @property
    def task(self) -> TaskSpec:
        return TaskSpec(
            name=self.name,
            classes=tuple("0123456789"),
            input_shape=self.input_shape,
            model=self.model,
            preprocessing=Preprocessing(scale=self.scale),
        )

    def method(self, variant: str) -> str:
        """The path of a class of this module, or fedcoe."""
        name = ("Vector" if self.trunk == "vector" else "") + variant
        return f"benchmarks.papers.fedcoe:{name}" if name else "fedcoe"

    @property
    def sgd(self) -> Sgd:
        return Sgd(steps=10, batch_size=32, learning_rate=self.learning_rate, momentum=0.9, weight_decay=5e-4)


MNIST = Setting("mnist14", "mnist", 10_000, (1, 14, 14), "networks:mlp64_32", 8000, 400, 0.1, "vector", 255.0)
CIFAR = Setting("cifar8", "cifar10", 6000, (3, 8, 8), "cnn", 4800, 400, 0.05, "auto", 1.0)
CIFAR_FULL = Setting("cifar32", "cifar10-32", 60_000, (3, 32, 32), "resnet_moe", 50_000, 2000, 0.1, "auto", 1.0)


@dataclass(frozen=True)
class Split:
    """Model inputs and labels of one seed: clients (training, held-out fifth), new clients, server data, test."""

    clients: list[tuple[Samples, Samples]]
    new: list[Samples]
    server_data: Samples
    test: Samples


def images(setting: Setting, data: Path) -> Samples:
    if setting is MNIST:
        whole = load_pool("mnist", data)
        x = whole.x[-10_000:].reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32)[:, None] / 255
        return x, whole.y[-10_000:]
    return cifar(data, pooled=32 // setting.input_shape[1], every=10 if setting is CIFAR else 1)


def split(setting: Setting, data: Path, alpha: float, seed: int) -> Split:
    (x, y), rng = images(setting, data), np.random.default_rng(seed)
    order = rng.permutation(len(y))
    on_devices, server_data, test = np.split(
        order, [setting.n_on_devices, setting.n_on_devices + setting.n_server_data]
    )
    owner = dirichlet(y[on_devices], alpha, rng)
    own = [on_devices[owner == k] for k in range(N_CLIENTS + N_NEW)]
    clients = []
    for chosen in own[:N_CLIENTS]:
        held = len(chosen) // 5
        clients.append(((x[chosen[held:]], y[chosen[held:]]), (x[chosen[:held]], y[chosen[:held]])))
    new = [(x[chosen], y[chosen]) for chosen in own[N_CLIENTS:]]
    return Split(clients, new, (x[server_data], y[server_data]), (x[test], y[test]))


def dirichlet(y: NDArray[np.int64], alpha: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """The client of each sample; drawn anew until each has 50."""
    n = N_CLIENTS + N_NEW
    while True:
        owner = np.empty(len(y), np.int64)
        for label in range(10):
            of_label = rng.permutation(np.flatnonzero(y == label))
            cuts = np.round(np.cumsum(rng.dirichlet([alpha] * n))[:-1] * len(of_label)).astype(int)
            for k, part in enumerate(np.split(of_label, cuts)):
                owner[part] = k
        if np.bincount(owner, minlength=n).min() >= 50:
            return owner


class Fleet(SimulatedFleet):
    """Remembers what each client had after its last local training, before the server changed it."""

    def __init__(self, task: TaskSpec, layout: Layout, workers: dict[str, Worker], **more: Any) -> None:
        super().__init__(task, layout, workers, **more)
        self.after_training: dict[str, Model] = {}

    async def run(self, step: str, actions: dict[str, Any]) -> dict[str, Answer]:
        answers = await super().run(step, actions)
        for i, answer in answers.items():
            if isinstance(answer.result, Trained) and isinstance(actions[i], Train):
                start = self.get(actions[i].starts[0].model, self._layout)
                change = self.get(answer.result.update, self._layout)
                self.after_training[i] = Model(start.params + change.params, change.buffers, change.counters)
        return answers


class Figures(msgspec.Struct, kw_only=True):
    """Shares of correct answers; `personal`: two values, see the columns above; `cold`: one for each new client.

    `unasked`: of new clients that tell no profile, with FedCoE's global model and with the mean of its experts.
    """

    overall: float
    personal: tuple[float, float | None]
    cold: list[float]
    unasked: tuple[list[float], list[float]] | None = None
    overlap: float | None = None
    spread: float | None = None
    gate_maximum: float | None = None


class Trial:
    """All methods on one split."""

    def __init__(
        self, setting: Setting, data: Path, alpha: float, seed: int, rounds: int, home: Path, train_on: Processor
    ) -> None:
        self.setting, self.task, self.sgd = setting, setting.task, setting.sgd
        self.train_on, self.processor = train_on, get_torch_device(train_on)
        self.split, self.seed, self.rounds, self.home = split(setting, data, alpha, seed), seed, rounds, home
        self.layout, self.first = make_initial_model(self.task, seed)
        self.server = ServerData(self.task, *self.split.server_data, self.processor)
        self.network = Network(self.task, self.processor)

    def accuracy(self, model: Model, samples: Samples, log_prior: NDArray[np.float64] | float = 0.0) -> float:
        logits = self.network.compute_logits(model, samples[0]) + log_prior
        return float((logits.argmax(axis=1) == samples[1]).mean())

    def mean_personal(self, models: list[Model]) -> float:
        pairs = zip(models, self.split.clients, strict=True)
        return float(np.mean([self.accuracy(model, held) for model, (_, held) in pairs]))

    def tuned(self, model: Model, training: Samples, k: int) -> Model:
        self.network.load(model)
        Trainer(self.network, *training, self.sgd, np.random.default_rng((self.seed, k))).run(LOCAL_STEPS)
        return self.network.dump()

    def of_one_model(self, model: Model, *, tune: bool = True) -> Figures:
        """Where all clients have the same model."""
        own = [self.tuned(model, training, k) for k, (training, _) in enumerate(self.split.clients)] if tune else None
        return Figures(
            overall=self.accuracy(model, self.split.test),
            personal=(self.mean_personal([model] * N_CLIENTS), self.mean_personal(own) if own else None),
            cold=[self.accuracy(model, samples) for samples in self.split.new],
        )

    def server_model(self) -> Model:
        """D_s alone: 30 epochs on the server data."""
        return self.server.pretrain(self.first, [0] * 10, 1, epochs=30, sgd=self.sgd, seed=self.seed)[0]

    def make_worker(self, name: str, training: Samples) -> Worker:
        """A client that trains on all samples it is given."""
        x, y = training
        none = np.zeros((0, *self.task.input_shape), np.float32), np.zeros(0, np.int64)
        own = DeviceData(x, y, np.zeros(len(y), np.bool_), *none)
        return Worker(name, self.task, own, self.home, processor=self.processor)

    def make_workers(self) -> dict[str, Worker]:
        """The clients."""
        named = {f"c{k:02d}": training for k, (training, _) in enumerate(self.split.clients)}
        return {name: self.make_worker(name, training) for name, training in named.items()}

    def begin(self, name: str, start: Model, options: dict[str, Any], fleet: Fleet) -> tuple[Any, Any]:
        """A method, and its state before round 1."""
        sgd, codec = self.sgd, Codec.FLOAT32
        settings = MethodSettings(
            rounds=self.rounds, sgd=sgd, codec=codec, protection=Protection(average="mean"), seed=self.seed,
            train_on=self.train_on, options=options,
        )  # fmt: skip
        method = make_method(name, settings, Server(self.task, self.split.server_data))
        return method, method.init(self.layout, fleet.put(unflatten(start, self.layout)))

    async def run(self, name: str, start: Model, options: dict[str, Any]) -> tuple[Any, Any, Fleet]:
        """All rounds of training, without the installation at the end."""
        fleet = Fleet(self.task, self.layout, self.make_workers(), seed=self.seed)
        method, state = self.begin(name, start, options, fleet)
        return method, await run_rounds(method, state, fleet, rounds=self.rounds), fleet

    async def fedavg(self, start: Model, proximal_mu: float = 0.0) -> Figures:
        name, options = ("fedprox", {"proximal_mu": proximal_mu}) if proximal_mu else ("fedavg", {})
        _, state, fleet = await self.run(name, start, options)
        return self.of_one_model(fleet.get(state.model, self.layout))

    async def fedcoe(self, variant: str, options: dict[str, Any]) -> tuple[Figures, Figures]:
        """Without and with the profile prior, of the same run."""
        method, state, fleet = await self.run(self.setting.method(variant), self.first, options)
        overall, *by_global = self.judge_global(method, state, fleet)
        ids = sorted(fleet.workers)
        last = state.diagnostics[-1]
        plain = Figures(
            overall=overall,
            personal=(
                self.mean_personal([fleet.after_training[i] for i in ids]),
                self.mean_personal([fleet.get(state.clients[i], self.layout) for i in ids]),
            ),
            cold=self.cold(method, state, fleet, prior=False),
            unasked=(by_global, [self.accuracy(fleet.get(state.common, self.layout), own) for own in self.split.new]),
            overlap=last.overlap,
            spread=last.spread,
            gate_maximum=last.gate_maximum,
        )
        return plain, msgspec.structs.replace(plain, cold=self.cold(method, state, fleet, prior=True))

    def judge_global(self, method: FedCoE, state: FedCoEState, fleet: Fleet) -> list[float]:
        """Accuracy of the global model as a bundle in ONNX Runtime, on the global test and for each new client."""
        mixture = newcomers.make_global_mixture(method, state, fleet)
        files = method.server_data.make_bundle(mixture, layout=self.layout, release=1, method="fedcoe")
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            runtime = deploy.load(folder)
            tests = (self.split.test, *self.split.new)
            return [float((runtime.predict_inputs(x).class_index == y).mean()) for x, y in tests]

    def cold(self, method: FedCoE, state: FedCoEState, fleet: Fleet, *, prior: bool) -> list[float]:
        """Section 7 for each new client: profile, assembled model, labels for scoring alone."""
        experts = [fleet.get(ref, self.layout) for ref in state.experts]
        gate, found = fleet.get_tensors(state.gate), []
        groups = correlation.assign_classes(10, len(experts))
        for samples in self.split.new:
            rho = method.server_data.compute_routing(gate, samples[0]).mean(axis=0)
            typical = method.server_data.compute_routing(gate).mean(axis=0)
            t = correlation.compute_profile_prior(rho, typical, groups, 0.02) if prior else 0.0
            found.append(self.accuracy(method.assemble(experts, rho / rho.sum()), samples, t))
        return found

    async def everything(self, rows: list[str]) -> dict[str, Figures]:
        """The figures of some of `ROWS`."""
        server, found = self.server_model(), dict[str, Figures]()
        for name in (row for row in rows if row in RIVALS):
            match RIVALS[name]:
                case None:
                    found[name] = self.of_one_model(server, tune=False)
                case (starts_from_server, proximal_mu):
                    found[name] = await self.fedavg(server if starts_from_server else self.first, proximal_mu)
        for name, (variant, options) in VARIANTS.items():
            both = (name, PRIOR) if name == "repaired" else (name,)
            if any(row in rows for row in both):
                found |= zip(both, await self.fedcoe(variant, options), strict=False)
        return {row: found[row] for row in rows}


# ----------------------------------------------------------------------------------------------------------- the table


def lines(setting: Setting, alpha: float, runs: list[dict[str, Figures]]) -> list[str]:
    table = [
        f"alpha = {alpha}",
        f"{'':34}{'global':>20}{'personal':>14}{'cold':>12}{'unasked':>24}  overlap  spread   gate",
    ]
    for name in runs[0]:
        own = [run[name] for run in runs]
        overall = [100 * f.overall for f in own]
        cold = [100 * value for f in own for value in f.cold]
        first, second = ([f.personal[k] for f in own] for k in (0, 1))
        text = f"{np.mean(overall):.1f} [{min(overall):.1f}-{max(overall):.1f}]"
        inside = ""
        if own[0].overlap is not None:
            both = [[100 * value for f in own for value in f.unasked[k]] for k in (0, 1)]
            unasked = " / ".join(f"{np.mean(values):.1f} ({min(values):.0f})" for values in both)
            inside = (
                f"{unasked:>24}{mean(own, 'overlap'):9.2f}{mean(own, 'spread'):9.1g}{mean(own, 'gate_maximum'):7.3f}"
            )
        table.append(
            f"{name:34}{text:>20}{pair(first, second):>14}{f'{np.mean(cold):.1f} ({min(cold):.0f})':>12}{inside}"
        )
        spec = SPEC.get(alpha, {}).get(name) if setting is MNIST else None
        if spec:
            one, two = (None if value is None else value / 100 for value in spec[1:3])
            table.append(f"{'  spec':34}{spec[0]:>20}{pair([one], [two]):>14}{f'{spec[3]} ({spec[4]})':>12}")
    return table


def mean(own: list[Figures], field: str) -> float:
    return float(np.mean([getattr(f, field) for f in own]))


def pair(first: list[float | None], second: list[float | None]) -> str:
    shown = ["-" if None in values else f"{100 * np.mean(values):.1f}" for values in (first, second)]
    return " / ".join(shown)


def acceptance(runs: list[dict[str, Figures]]) -> dict[str, bool]:
    """What section 12 lets a test ask for at alpha = 0.1 with three seeds."""
    repaired, printed, prior = ([run[name] for run in runs] for name in ("repaired", "FedCoE printed", PRIOR))
    return {
        "repaired: overlap below 0.6, spread above 0.01": mean(repaired, "overlap") < 0.6
        and mean(repaired, "spread") > 0.01,
        "printed: overlap 1, spread below 0.001": mean(printed, "overlap") > 0.999 and mean(printed, "spread") < 0.001,
        "repaired at least 5 points above printed (global)": mean(repaired, "overall") - mean(printed, "overall")
        >= 0.05,
        "profile prior not worse by more than 1 point (cold)": np.mean([f.cold for f in prior])
        >= np.mean([f.cold for f in repaired]) - 0.01,
    }


def of_compare(setting: Setting, alpha: float, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The methods as `fedge compare` runs them, in what is nearest to the setting there."""
    n_server = setting.n_images - setting.n_on_devices
    fields = {
        "set": setting.images, "model": setting.model, "samples": setting.n_images, "alpha": alpha, "rounds": rounds,
        "devices": N_CLIENTS + N_NEW, "late_joiners": N_NEW, "global_test": n_server / setting.n_images,
        "server_data": setting.n_server_data / n_server, "local_steps": setting.sgd.steps,
        "momentum": setting.sgd.momentum, "batch_size": setting.sgd.batch_size, "learning_rate": setting.learning_rate,
    }  # fmt: skip
    methods = [
        *MEASURED,
        *(
            ":".join([setting.method(variant), *(f"{key}={value}" for key, value in options.items())])
            for variant, options in (*VARIANTS.values(), ("NoPrior", {}))
        ),
    ]
    label = f"{setting.name}, alpha {alpha:g}"
    return measured(label, compared(label, methods, fields, arguments))


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--set", choices=["mnist", "cifar10"], default="mnist")
    parser.add_argument("--full", action="store_true", help="cifar10: the paper's size")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--alphas", default="0.1,0.5")
    parser.add_argument("--rounds", type=int, help="default: 100; with --full 1,000")
    parser.add_argument("--quick", action="store_true", help="one seed, three rounds, alpha 0.1: to see that it runs")
    parser.add_argument("--train-on", type=Processor, choices=list(Processor), default=Processor.CPU)
    add_metrics(parser, "fedcoe", "instead of the table print what METRICS of table.py has, of `fedge compare`")
    add_rows(parser)
    flags = parser.parse_args()
    rows = chosen_rows(ROWS, flags)
    if flags.full and flags.set != "cifar10":
        parser.error("--full is for --set cifar10")
    if flags.rows and flags.metrics:
        parser.error("--rows is for the table; --metrics has all rows")
    seeds = [0] if flags.quick else [int(seed) for seed in flags.seeds.split(",")]
    setting = MNIST if flags.set == "mnist" else CIFAR_FULL if flags.full else CIFAR
    rounds = 3 if flags.quick else flags.rounds or (1000 if setting is CIFAR_FULL else 100)
    torch.set_num_threads(1)
    logging.getLogger("fedge.method").setLevel(logging.ERROR)  # that "printed" collapses is in the table
    alphas = [0.1] if flags.quick else [float(alpha) for alpha in flags.alphas.split(",")]
    if flags.metrics:
        write(flags, [of_compare(setting, alpha, rounds, flags) for alpha in alphas], [])
        return
    began, results = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as home:
        for alpha in alphas:
            runs = []
            for seed in seeds:
                trial = Trial(setting, flags.data, alpha, seed, rounds, Path(home), flags.train_on)
                runs.append(asyncio.run(trial.everything(rows)))
                say(f"alpha {alpha}, seed {seed}: {time.monotonic() - began:.0f} s")
            print("\n".join(lines(setting, alpha, runs)), flush=True)
            results[str(alpha)] = msgspec.to_builtins(runs)
            if alpha == 0.1 and setting is MNIST and not flags.rows:
                results["acceptance"] = {name: bool(holds) for name, holds in acceptance(runs).items()}
                print("\n".join(f"  {'yes' if holds else 'NO '}  {name}" for name, holds in acceptance(runs).items()))
    finish(flags, {"seeds": seeds, "rounds": rounds, "tables": results})


if __name__ == "__main__":
    main()
