"""What can be read back from what devices send: label shares, samples, and who was learned from.

A simulated federation learns with FedAvg (one hidden layer of 32, unless --model says otherwise; SGD 0.05 with momentum
0.9, 10 steps of 32 samples, updates in int8). Its devices carry out the very orders that methods write, and the attacks
see what leaves them. The attacker knows what a coordinator knows, or a broker without TLS: the model that was sent, the
order, the number of samples; and it has labelled samples of its own, `known`, which are on no device.

Three attacks (--attacks), each in the first round and after --rounds rounds:

labels      Each class's share among a device's samples. Told: total variation error (0: exact, 1: all wrong), and for
            what share of the devices the commonest label was found. "guess": equal shares.
inversion   The samples themselves. Told: peak signal-to-noise ratio in dB of the reconstruction that comes nearest to
            each sample, the same of the nearest known sample ("known"), and the share of samples that a reconstruction
            comes nearer to than half the squared error of the nearest known one ("recovered").
membership  Whether a device learned from a sample that the attacker has. Told: area under the ROC curve (0.5: chance)
            and true positives at 5 % false ones, training samples against test samples of the same devices. 30 % of the
            samples are marked sensitive; "marked" asks the same of these.

Takes four minutes of one processor with digits.

Examples:
    python benchmarks/leaks.py --json leaks.json
    python benchmarks/leaks.py --attacks labels --alpha 0.1 --seeds 0,1,2,3,4
    python benchmarks/leaks.py --attacks inversion --task mnist --data DIR/mnist --model cnn --targets 2
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from script import finish, parser_of, several, show
from sklearn.linear_model import RidgeCV
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.simulation.federation import Federation, partition_samples
from coordinator.simulation.settings import Scenario
from edge_agent.device.worker import Worker
from edge_agent.learning.profile import measure_sparsity
from fedge.bundle.formula import softmax
from fedge.data import preprocessing
from fedge.models.training import Network
from fedge.steps.contract import Action, Result
from fedge.steps.descriptions.mean_features import FeaturesMeasured, MeanFeatures
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tasks import DeviceData, make_device_data
from fedge.tensors.layout import BASE, Codec, Model, Tensors, unflatten
from fedge.wire.messages import BlobRef

Vectors = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]
Samples = tuple[NDArray[np.float32], Labels]

SGD: Final = Sgd()
KNOWN: Final = 300
IMITATED: Final = 300
SENSITIVE: Final = 0.3
FALSE_POSITIVES: Final = 0.05
ATTACKS: Final = ("labels", "inversion", "membership")


# ---------------------------------------------------------------------------------------- attacks on label shares


def shares_of(labels: Labels, n_classes: int) -> NDArray[np.float64]:
    """Class shares (C,) of n >= 1 labels."""
    return np.bincount(labels, minlength=n_classes) / len(labels)


def on_simplex(values: Vectors) -> NDArray[np.float64]:
    """Shares (..., C) of values: what is negative is 0, and each row sums to 1; equal shares where nothing is left."""
    kept = np.maximum(np.asarray(values, np.float64), 0.0)
    total = kept.sum(axis=-1, keepdims=True)
    return np.where(total > 0, kept / np.where(total > 0, total, 1.0), 1 / kept.shape[-1])


def shares_in_mixture(mixed: Vectors, of_classes: Vectors) -> NDArray[np.float64]:
    """Shares (C,) by which the rows of `of_classes`, (C, q), come nearest to `mixed`, (q,), by least squares.

    For all that is a mean over samples: activation profiles and mean features.
    """
    return on_simplex(nnls(np.asarray(of_classes, np.float64).T, np.asarray(mixed, np.float64))[0])


def shares_in_head(change: Vectors, outputs: Vectors, sgd: Sgd) -> NDArray[np.float64]:
    """Shares s (C,) from the change of the head's bias, (C,), as if its gradient had stayed what it was at the start.

    That gradient is mean output minus s, and the mean output is s-weighted: (P^T - I) s, with P (C, C) the mean outputs
    of the known samples of each class. Exact for one step. After Wainakh et al., User-Level Label Leakage from
    Gradients in Federated Learning, PoPETs 2022, there from the weights.
    """
    steps = np.arange(1, sgd.steps + 1)
    length = sgd.learning_rate * ((1 - sgd.momentum**steps) / (1 - sgd.momentum)).sum()
    n_classes = len(change)
    left = np.vstack([np.asarray(outputs, np.float64).T - np.eye(n_classes), np.ones(n_classes)])
    return on_simplex(nnls(left, np.append(-np.asarray(change, np.float64) / length, 1.0))[0])


def shares_by_imitation(updates: Vectors, shares: Vectors, seen: Vectors) -> NDArray[np.float64]:
    """Shares (k, C) of the updates `seen`, (k, d), by ridge regression on devices that the attacker made up.

    Args:
        updates: (m, d) of the devices made up.
        shares: (m, C) what they held.
        seen: (k, d).
    """
    scale = updates.std(axis=0).mean() or 1.0
    fitted = RidgeCV(alphas=np.logspace(-2, 4, 13)).fit(updates / scale, shares)
    return on_simplex(fitted.predict(seen / scale))


# --------------------------------------------------------------------------------------------- attacks on samples


def inputs_of_linear(weight: Vectors, bias: Vectors) -> NDArray[np.float64]:
    """Inputs (k, d) of a first linear layer from the changes of its weight, (h, d), and bias, (h,).

    Of one sample each unit's gradient is the input times the gradient of its bias, so the quotient is the input, of
    several samples a weighted mean of those that the unit is active for. Units whose bias hardly moved are left out.
    Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018.
    """
    moved = np.abs(bias) > 0.05 * np.abs(bias).max(initial=0.0)
    return np.asarray(weight, np.float64)[moved] / np.asarray(bias, np.float64)[moved, None]


def inputs_by_matching(
    module: nn.Module,
    change: Mapping[str, Tensor],
    labels: Labels,
    shape: tuple[int, ...],
    *,
    between: tuple[float, float],
    steps: int,
    seed: int,
) -> NDArray[np.float32]:
    """Inputs (n, *shape) whose gradient points against `change`: cosine, total variation, Adam on signs.

    Args:
        module: the network, with the weights that training began with.
        change: of each trainable tensor.
        labels: (n,) of the samples: the attacker is given them.
        shape: of a sample; images have (channels, height, width).
        between: the smallest and the largest value of an input.
        steps: of the search.
        seed: of the first guess.

    Source: Geiping et al., Inverting Gradients, NeurIPS 2020, eq. 4; several local steps as one gradient, as there.
    """
    weights = {name: own.detach() for name, own in module.named_parameters()}
    target = torch.cat([-change[name].reshape(-1) for name in weights])
    y = torch.from_numpy(labels)
    low, high = between
    x = torch.empty((len(labels), *shape)).uniform_(low, high, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1 * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def loss(own: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, own, (inputs,)), y)

    for _ in range(steps):
        optimiser.zero_grad()
        found = torch.cat([g.reshape(-1) for g in grad(loss)(weights, x).values()])
        distance = 1 - torch.cosine_similarity(found, target, dim=0) + 1e-4 / (high - low) * _variation(x)
        x.grad = torch.autograd.grad(distance, x)[0].sign()
        optimiser.step()
        schedule.step()
        x.data.clamp_(low, high)
    return x.detach().numpy()


def _variation(x: Tensor) -> Tensor:
    """Mean difference of neighbours in an image; 0 of what is none."""
    return sum((x.diff(dim=d).abs().mean() for d in (2, 3)), torch.zeros(())) if x.ndim == 4 else torch.zeros(())


def nearest(found: Vectors, real: Vectors) -> NDArray[np.float64]:
    """Mean squared error (n,) of each of the samples `real`, (n, ...), to the nearest of `found`, (k, ...), k >= 1."""
    a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (real, found))
    return np.stack([((b - own) ** 2).mean(axis=1).min() for own in a])


def psnr(errors: Vectors, between: tuple[float, float]) -> float:
    """Mean peak signal-to-noise ratio in dB of squared errors (n,), at most 100 each, of values in that range."""
    return float(-10 * np.log10(np.maximum(errors / (between[1] - between[0]) ** 2, 1e-10)).mean())


# ------------------------------------------------------------------------------------------ attacks on membership


def loss_drop(before: Vectors, after: Vectors, labels: Labels) -> NDArray[np.float64]:
    """By how much each sample's loss fell, (n,), from logits (n, C) before and after: of members by more."""
    rows = np.arange(len(labels))
    losses = [np.logaddexp.reduce(logits, axis=1) - logits[rows, labels] for logits in (before, after)]
    return np.asarray(losses[0] - losses[1])


def alignment(gradients: Vectors, change: Vectors) -> NDArray[np.float64]:
    """Cosine (n,) between the samples' gradients (n, d) and what the update, (d,), went against.

    Source: Li et al., Effective Passive Membership Inference Attacks in Federated Learning against Overparameterized
    Models, ICLR 2023.
    """
    lengths = np.linalg.norm(gradients, axis=1) * np.linalg.norm(change)
    return np.asarray(-(gradients @ change) / np.maximum(lengths, 1e-30))


def sample_gradients(module: nn.Module, samples: Samples) -> NDArray[np.float32]:
    """The gradient of each sample's loss by the trainable tensors, (n, d)."""
    weights = {name: own.detach() for name, own in module.named_parameters()}

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, own, (x[None],)), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *map(torch.from_numpy, samples))
    return torch.cat([g.reshape(len(samples[1]), -1) for g in found.values()], dim=1).numpy()


def separation(members: Vectors, others: Vectors) -> dict[str, float]:
    """Area under the ROC curve of two sets of scores, and true positives at 5 % false ones."""
    truth = np.repeat([1, 0], [len(members), len(others)])
    bound = np.quantile(others, 1 - FALSE_POSITIVES)
    return {
        "auc": float(roc_auc_score(truth, np.concatenate([members, others]))),
        "true_positives": float((members > bound).mean()),
    }


# ------------------------------------------------------------------------------------------------- what is attacked


@dataclass(slots=True)
class Scene:
    """A federation, the model that it has come to, and what an attacker has. `tests`: of each device."""

    federation: Federation
    data: dict[str, DeviceData]
    tests: dict[str, Samples]
    known: Samples
    network: Network
    model: Model
    home: Path
    seed: int

    @property
    def n_classes(self) -> int:
        return self.federation.task.n_classes

    def answers(
        self, action: Callable[[BlobRef], Action], data: Mapping[str, DeviceData] | None = None
    ) -> dict[str, Any]:
        """What devices answer to the action that `action` makes of the model's reference, as vectors."""
        home = Path(tempfile.mkdtemp(dir=self.home))  # its own: noise that a device has drawn holds for ever
        task, layout = self.federation.task, self.federation.layout
        workers = {i: Worker(i, task, own, home / i) for i, own in (data or self.data).items()}
        fleet = SimulatedFleet(task, layout, workers, seed=self.seed)
        made = action(fleet.put(unflatten(self.model, layout)))
        found = asyncio.run(fleet.run("asked", dict.fromkeys(workers, made)))
        return {i: self._read(fleet, answer.result) for i, answer in found.items() if answer.result is not None}

    def _read(self, fleet: SimulatedFleet, result: Result) -> Any:
        match result:
            case Trained():
                return fleet.get(result.update, self.federation.layout).params.astype(np.float64)
            case Profiled():
                return np.array(result.profile)
            case FeaturesMeasured():
                return np.array(result.mean)
        return None

    def updates(
        self, sgd: Sgd = SGD, codec: Codec = Codec.INT8, data: Mapping[str, DeviceData] | None = None
    ) -> dict[str, Vectors]:
        """The updates (d,) of a round of FedAvg."""
        found = self.answers(lambda ref: Train(starts=(Start(model=ref),), sgd=sgd, codec=codec, measure=False), data)
        return {i: update for i, update in found.items() if update is not None}

    def mean(self, updates: Mapping[str, Vectors]) -> Vectors:
        """Their mean, weighted by the number of samples."""
        weights = [self.data[i].n_shared for i in updates]
        return np.average(list(updates.values()), axis=0, weights=weights)

    def moved(self, change: Vectors) -> Model:
        """The model after a change."""
        return Model((self.model.params + change).astype(np.float32), self.model.buffers, self.model.counters)

    def learn(self, rounds: int) -> None:
        """So many rounds of FedAvg."""
        for _ in range(rounds):
            self.seed += 1000
            self.model = self.moved(self.mean(self.updates()))

    def of_classes(self, what: Callable[[NDArray[np.float32]], Vectors]) -> Vectors:
        """Something of the known samples of each class, (C, ...); of all of them where a class has none."""
        x, y = self.known
        return np.stack([what(x[y == c] if (y == c).any() else x) for c in range(self.n_classes)])

    def named(self, change: Vectors) -> Tensors:
        """A change by the names of tensors."""
        empty = Model(change.astype(np.float32), self.model.buffers, self.model.counters)
        return unflatten(empty, self.federation.layout)


def scene(scenario: Scenario, seed: int, home: Path) -> Scene:
    """The federation before its first round."""
    federation = partition_samples(scenario, seed)
    assert federation.global_test is not None
    task = federation.task
    return Scene(
        federation=federation,
        data={i: make_device_data(task, share) for i, share in federation.shares.items()},
        tests={i: (preprocessing.preprocess(task, s.x_test), s.y_test) for i, s in federation.shares.items()},
        known=(federation.global_test[0][:KNOWN], federation.global_test[1][:KNOWN]),
        network=Network(task),
        model=federation.first,
        home=home,
        seed=seed,
    )


# --------------------------------------------------------------------------------------------------------- measured

Figures = dict[str, dict[str, float]]


def labels(at: Scene) -> Figures:
    """What is found out of each device's label shares."""
    real = {i: shares_of(own.shared[1], at.n_classes) for i, own in at.data.items()}
    guess = {"guess": {i: np.full(at.n_classes, 1 / at.n_classes) for i in real}}
    found = guess | _shares_in_means(at) | _shares_in_updates(at)
    return {name: _share_errors(real, own) for name, own in found.items()}


def _shares_in_means(at: Scene) -> dict[str, dict[str, Vectors]]:
    """Of each device, from its profile and from its mean features."""

    def profile(x: NDArray[np.float32]) -> Vectors:
        at.network.load(at.model)
        return measure_sparsity(at.network.module, x).shares

    asked: dict[str, Callable[[BlobRef], Action]] = {
        "profile": lambda ref: Profile(extractor=ref),
        "profile, sigma_dp 0.05": lambda ref: Profile(extractor=ref, noise=0.05),
        "profile, sigma_dp 0.1": lambda ref: Profile(extractor=ref, noise=0.1),
        "mean features": lambda ref: MeanFeatures(model=ref),
    }
    profiles = at.of_classes(profile)
    features = at.of_classes(lambda x: at.network.compute_features(at.model, x).mean(axis=0))
    return {
        name: {
            i: shares_in_mixture(own, features if name == "mean features" else profiles)
            for i, own in at.answers(action).items()
        }
        for name, action in asked.items()
    }


def _shares_in_updates(at: Scene) -> dict[str, dict[str, Vectors]]:
    """Of each device, from its update, or from a part of it."""
    updates, n_classes = at.updates(), at.n_classes
    outputs = at.of_classes(lambda x: softmax(at.network.compute_logits(at.model, x)).mean(axis=0))
    found = {"bias of the head": {i: shares_in_head(own[-n_classes:], outputs, SGD) for i, own in updates.items()}}
    rng = np.random.default_rng(at.seed)
    n_samples = int(np.mean([own.n_shared for own in at.data.values()]))
    imitators = {f"i{k:03}": _imitator(at.known, n_samples, n_classes, rng) for k in range(IMITATED)}
    imitated = at.updates(data=imitators)
    shares = np.stack([shares_of(imitators[i].y_train, n_classes) for i in imitated])
    made, seen = (np.stack(list(each.values())) for each in (imitated, updates))
    n_base = at.federation.layout.select(BASE).n_params
    for name, part in {"head": slice(n_base, None), "base": slice(0, n_base), "whole update": slice(None)}.items():
        guessed = shares_by_imitation(made[:, part], shares, seen[:, part])
        found[f"{name}, imitated"] = dict(zip(updates, guessed, strict=True))
    return found


def _share_errors(real: Mapping[str, Vectors], found: Mapping[str, Vectors]) -> dict[str, float]:
    errors = [0.5 * np.abs(real[i] - own).sum() for i, own in found.items()]
    flat = [own.max() == own.min() for own in found.values()]
    hits = [
        1 / len(own) if f else own.argmax() == real[i].argmax() for f, (i, own) in zip(flat, found.items(), strict=True)
    ]
    return {"error": float(np.mean(errors)), "commonest": float(np.mean(hits))}


def _imitator(known: Samples, n: int, n_classes: int, rng: np.random.Generator) -> DeviceData:
    """A device that the attacker makes up of its own samples; the skew is unknown to it."""
    x, y = known
    shares = rng.dirichlet(np.full(n_classes, rng.choice([0.05, 0.1, 0.3, 1.0])))
    weights = (shares / np.maximum(np.bincount(y, minlength=n_classes), 1))[y]
    weights = weights if weights.sum() > 0 else np.ones(len(y))
    drawn = rng.choice(len(y), n, p=weights / weights.sum())
    return DeviceData(x[drawn], y[drawn], np.zeros(n, np.bool_), x[:0], y[:0])


INVERTED: Final[Mapping[str, tuple[int | None, Sgd, Codec]]] = {
    "1 sample, 1 step, float32": (1, Sgd(steps=1, batch_size=1), Codec.FLOAT32),
    "1 sample, 1 step, int8": (1, Sgd(steps=1, batch_size=1), Codec.INT8),
    "32 samples, 1 step, int8": (32, Sgd(steps=1), Codec.INT8),
    "all samples, 10 steps of 32, int8 (default)": (None, SGD, Codec.INT8),
}
"""How many samples the device has, how it learns, how it sends."""


def inversion(at: Scene, targets: int, steps: int, say: Callable[[str], None]) -> Figures:
    """How near reconstructions come to the samples of some devices. The attacker is given the labels."""
    found: Figures = {}
    chosen = list(at.data)[:targets]
    between = float(at.known[0].min()), float(at.known[0].max())
    for name, (n, sgd, codec) in INVERTED.items():
        errors: dict[str, list[Vectors]] = defaultdict(list)
        data = {i: _first(at.data[i], n) for i in chosen}
        for i, update in at.updates(sgd, codec, data).items():
            say(f"inversion: {name}, {i}")
            x, y = data[i].shared
            at.network.load(at.model)
            change = at.named(update)
            errors["known"].append(nearest(at.known[0], x))
            first = next(m for m in at.network.module.modules() if isinstance(m, nn.Linear | nn.Conv2d))
            if isinstance(first, nn.Linear):
                weight, bias = (change[info.name] for info in at.federation.layout.tensors[:2])
                read = np.clip(inputs_of_linear(weight, bias), *between)
                errors["first layer"].append(nearest(read.reshape(-1, *x.shape[1:]), x))
            tensors = {key: torch.from_numpy(np.array(own)) for key, own in change.items()}
            made = inputs_by_matching(
                at.network.module, tensors, y, x.shape[1:], between=between, steps=steps, seed=at.seed
            )
            errors["matching"].append(nearest(made, x))
        known = np.concatenate(errors["known"])
        for attack, each in errors.items():
            own = np.concatenate(each)
            found[f"{name}: {attack}"] = {"psnr_db": psnr(own, between), "recovered": float((own <= known / 2).mean())}
    return found


def _first(data: DeviceData, n: int | None) -> DeviceData:
    """A device with the first n of its samples alone that are not marked; None: with all of them."""
    x, y = (own[:n] for own in data.shared)
    return DeviceData(x, y, np.zeros(len(y), np.bool_), x[:0], y[:0])


def membership(at: Scene) -> Figures:
    """How well members are told apart: from the update itself, and from means of updates, as other devices see them."""
    updates = at.updates()
    ids = list(updates)
    groups = {1: [[i] for i in ids], 5: [ids[k : k + 5] for k in range(0, len(ids) - 4, 5)], len(ids): [ids]}
    found: Figures = {}
    for size, each in groups.items():
        scores: dict[str, dict[str, list[Vectors]]] = defaultdict(lambda: defaultdict(list))
        for members in each:
            change = at.mean({i: updates[i] for i in members})
            for i in members:
                data = at.data[i]
                marked = data.x_train[data.sensitive], data.y_train[data.sensitive]
                for kind, samples in {"members": data.shared, "marked": marked, "others": at.tests[i]}.items():
                    for attack, score in _scores(at, change, samples).items():
                        scores[attack][kind].append(score)
        who = "update of one device" if size == 1 else f"mean of {size} updates"
        for attack, kinds in scores.items():
            members, marked, others = (np.concatenate(kinds[kind]) for kind in ("members", "marked", "others"))
            found[f"{who}: {attack}"] = separation(members, others)
            if size == 1 and len(marked):
                found[f"{who}, marked: {attack}"] = separation(marked, others)
    return found


def _scores(at: Scene, change: Vectors, samples: Samples) -> dict[str, Vectors]:
    x, y = samples
    before, after = at.network.compute_logits(at.model, x), at.network.compute_logits(at.moved(change), x)
    at.network.load(at.model)
    gradients = sample_gradients(at.network.module, samples)
    return {"loss": loss_drop(before, after, y), "gradient": alignment(gradients, change)}


def averaged(each: Iterable[Figures]) -> Figures:
    """The mean over the seeds."""
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for figures in each:
        for name, row in figures.items():
            for key, value in row.items():
                rows[name][key].append(value)
    return {name: {key: round(float(np.mean(v)), 3) for key, v in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--attacks", type=several(), default=list(ATTACKS), help="with commas (default: all three)")
    parser.add_argument("--task", default="digits", help="(default digits)")
    parser.add_argument("--data", type=Path, help="folder or file with the samples; digits need none")
    parser.add_argument("--samples", type=int, help="use so many (default: all)")
    parser.add_argument("--model", default="mlp", help="network, such as cnn (default mlp)")
    parser.add_argument("--devices", type=int, default=20, help="(default 20)")
    parser.add_argument("--alpha", type=float, default=0.5, help="label skew, Dirichlet's parameter (default 0.5)")
    parser.add_argument("--rounds", type=int, default=10, help="after which attacks are made again (default 10)")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="with commas (default 0,1,2)")
    parser.add_argument("--targets", type=int, default=3, help="devices whose samples are reconstructed (default 3)")
    parser.add_argument("--steps", type=int, default=1000, help="of a reconstruction's search (default 1000)")
    arguments = parser.parse_args()
    if unknown := set(arguments.attacks) - set(ATTACKS):
        parser.error(f"unknown attacks {sorted(unknown)}; there are labels, inversion and membership")
    scenario = Scenario(
        task=arguments.task, data=arguments.data, samples=arguments.samples, model=arguments.model,
        devices=arguments.devices, alpha=arguments.alpha, sensitive=SENSITIVE, global_test=0.2,
    )  # fmt: skip
    torch.set_num_threads(1)
    logging.getLogger("fedge.worker").setLevel(logging.ERROR)  # noise warns of few samples

    def say(text: str) -> None:
        print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)

    found: dict[str, list[Figures]] = defaultdict(list)
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as home:
            at = scene(scenario, seed, Path(home))
            for when in ("first round", f"after {arguments.rounds} rounds"):
                for attack in arguments.attacks:
                    say(f"seed {seed}, {when}: {attack}")
                    match attack:
                        case "labels":
                            figures = labels(at)
                        case "inversion":
                            figures = inversion(at, arguments.targets, arguments.steps, say)
                        case _:
                            figures = membership(at)
                    found[f"{attack}, {when}"].append(figures)
                if when == "first round":
                    say(f"seed {seed}: {arguments.rounds} rounds")
                    at.learn(arguments.rounds)
    print(file=sys.stderr)
    tables = {name: averaged(each) for name, each in found.items()}
    for name, rows in tables.items():
        show(({"": row} | figures for row, figures in rows.items()), name)
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
    finish(arguments, {"settings": settings, **tables})


if __name__ == "__main__":
    main()
