"""The worker of a device: carries out one order at a time; no network, no threads, no clock.

Everything random comes from the order's seed, so the same order done twice gives the same bytes. What never leaves the
device (private and local model, choice of the expert) is kept under `home/candidates`, written before the report is
handed out: `FitWeights` after a power cut finds what `FitCandidates` made.

What leaves it: updates made from D_L alone, sparsity profiles of D_L, and the few numbers of `fedge.messages`. Source:
docs/methods/fedge.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from edge_agent import cold_start, gate, mixture, personal, private_model, sharing
from edge_agent.install import install
from edge_agent.labels import describe_labels
from edge_agent.mixture import PLAIN, Array
from edge_agent.outcome import FailedError, Fetch, Outcome, Stop, Unpacked, failed, installed
from edge_agent.pool import fit_pool
from edge_agent.private_model import Samples
from edge_agent.scmoe import fit_mixture
from edge_agent.sending import sent
from edge_agent.sparsity import sparsity_profile, with_noise
from export import BundleInfo, Candidate, GateWeights, Guard, Mixture, Pool, write_bundle
from fedge import codec
from fedge.calibration import BETAS
from fedge.errors import StoreError
from fedge.files import BlobFolder, write_atomically
from fedge.messages import (
    BlobRef,
    Calibration,
    CandidatesFitted,
    Choice,
    Declined,
    DescribeLabels,
    EnergyFitted,
    FitCandidates,
    FitEnergy,
    FitGate,
    FitMixture,
    FitPool,
    FitWeights,
    Install,
    InstallBundle,
    Installed,
    MeanFeatures,
    Order,
    Part,
    Profile,
    Profiled,
    Result,
    Role,
    Route,
    Sgd,
    SharePrivate,
    Start,
    Train,
    Trained,
    Trial,
    Tried,
    WeightsFitted,
)
from fedge.models.training import (
    CPU,
    Network,
    StoppedError,
    Trainer,
    loss_and_gradient_norm,
    mean_loss,
    never,
    seeded,
    shared_network,
)
from fedge.task import TaskSpec
from fedge.tasks import DeviceData
from fedge.tensors import Model, flatten, from_bytes, to_bytes, unflatten

T = TypeVar("T")

_decode = ContextVar("decode", default=codec.decode)


@contextmanager
def remembering(n_models: int = 8) -> Iterator[None]:
    """Within it the last models that orders named are kept, for the workers of a process that are sent the same."""
    before = _decode.set(lru_cache(n_models)(codec.decode))  # quick: bytes remember their hash
    try:
        yield
    finally:
        _decode.reset(before)


WITH_PRIOR: Final = Calibration(temperature=1.0, kappa=1.0)
_PRIVATE, _LOCAL, _GATE, _FINAL_PRIVATE, _FINAL_LOCAL = range(5)  # streams of random numbers within an order


@dataclass(frozen=True, slots=True)
class Look:
    """A model before training: accuracy on the validation samples; loss and its gradient's norm on D_L if wanted."""

    accuracy: float | None
    loss: float | None = None
    gradient_norm: float | None = None


class Kept(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `FitCandidates` left for the orders after it; models by digest."""

    models: dict[Role, str]
    private_start: str
    private_steps: int
    initial: str
    local_steps: int
    cluster: int


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The candidates that an order is about, in the order of `Role`: roles and calibrations (M), models, validation."""

    roles: tuple[Role, ...]
    models: tuple[Model, ...]
    calibrations: tuple[Calibration, ...]
    log_q: Array  # (M, m, C)
    log_p: Array  # (m, M), of the true classes
    energies: Array  # (m, M), standardised
    energy_mean: Array
    energy_std: Array

    @property
    def experts(self) -> tuple[int, ...]:
        return tuple(k for k, role in enumerate(self.roles) if role in {Role.GLOBAL, Role.EXPERT})


class Worker:
    """One device's learning.

    Args:
        device_id: for the texts of failures.
        task: what is learned.
        data: the device's samples; they stay here.
        shares_private: whether the device's owner allows PM-MoE's upload of the private module.
        processor: what trains the network.
        home: durable folder; `candidates` and `bundles` are the worker's.

    Raises:
        ConfigError: a sample has a label that the task does not have.
    """

    def __init__(
        self,
        device_id: str,
        task: TaskSpec,
        data: DeviceData,
        home: Path,
        *,
        shares_private: bool = False,
        processor: torch.device = CPU,
    ) -> None:
        self.device_id = device_id
        self.processor = processor
        self.shares_private = shares_private
        self.task = task
        self.data = data
        self.home = home
        self.fingerprint = task.fingerprint()
        data.require_labels_of(task)
        self.prior = mixture.log_prior(data.class_counts(task.n_classes))

    @property
    def network(self) -> Network:
        """The task's network, which all workers of a thread share: nobody relies on the weights that it has."""
        return shared_network(self.task, self.fingerprint, self.processor)

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop = never) -> Outcome:
        """Carry out an order.

        Args:
            order: what to do.
            fetch: the bytes of a blob that the order names.
            stop: checked between batches.

        Returns:
            `Failed` where the order or its blobs are unfit or the user's network raises anything, `Declined` where
            there are no data for it.

        Raises:
            StoppedError: `stop()` was true.
            StoreError: the disk is full or broken.
        """
        with seeded(order.seed, self.processor):  # dropout in a user's network
            return self.guarded(lambda: self._execute(order, fetch, stop))

    def guarded(self, work: Callable[[], T]) -> T | Outcome:
        """What the work gives, or `Failed` where the order or its blobs are unfit or a user's code raised anything.

        Raises:
            StoppedError, StoreError: as `execute`.
        """
        try:
            return work()
        except (StoreError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's network does, nobody else is harmed
            return failed(self.device_id, error)

    def _execute(self, order: Order, fetch: Fetch, stop: Stop) -> Outcome:  # noqa: PLR0912 - one branch per action
        result: Result
        match order.action:
            case Train() as action:
                return self._train(action, fetch, order, stop)
            case Profile() as action:
                result = self._profile(action, fetch)
            case Trial() as action:
                result = self._try(action, fetch)
            case FitCandidates() as action:
                result = self._fit_candidates(action, fetch, order.seed, stop)
            case FitWeights() as action:
                result = self._fit_weights(action)
            case FitEnergy() as action:
                result = self._fit_energy(action)
            case FitGate() as action:
                result = self._fit_gate(action, order.seed, stop)
            case Install() as action:
                result = install(self, action, fetch, order, stop)
            case FitMixture() as action:
                result = fit_mixture(self, action, fetch, order, stop)
            case MeanFeatures() as action:
                result = personal.mean_features(self, action, fetch)
            case SharePrivate() as action:
                return sharing.share(self, action, order)
            case FitPool() as action:
                result = fit_pool(self, action, fetch, order, stop)
            case DescribeLabels() as action:
                result = describe_labels(self, action)
            case Route() as action:
                result = cold_start.route(action, fetch, self.data.shared[0])
            case InstallBundle() as action:
                result = cold_start.install_bundle(action, fetch, self.home, self.task)
        return Outcome(result, {})

    @property
    def validation(self) -> Samples:
        """Held-out samples: they choose, and train nothing before everything is chosen."""
        return self.data.x_val, self.data.y_val

    def model(self, ref: BlobRef, fetch: Fetch) -> Model:
        """A model of the task's network that an order names."""
        return _decode.get()(fetch(ref), ref.codec, self.network.layout)

    def personal(self, model: Model) -> Model:
        """What the device would use now of the shared model that it is served: what it kept is put over it."""
        return personal.over(self, model)

    # ----------------------------------------------------------------------------------------- section 4: shared rounds

    def _train(self, action: Train, fetch: Fetch, order: Order, stop: Stop) -> Outcome:
        if not self.data.n_shared:
            return Outcome(Declined(reason="no shareable samples"), {})
        if action.keep is not None or action.part is not Part.ALL:
            return personal.train(self, action, fetch, order, stop)
        start, chosen = self.best_start(action.starts, fetch, action.choose)
        before = self.look(start, measure=action.measure)
        x, y = self.data.shared
        rng = np.random.default_rng(order.seed)
        Trainer(self.network, x, y, action.sgd, rng).run(action.sgd.steps_for(len(y)), stop)
        update = self.network.change(start)
        loss_after = mean_loss(self.network, x, y) if action.measure else None
        return self.trained(order, action, chosen, before, loss_after, update)

    def look(self, model: Model, *, measure: bool = True) -> Look:
        """How a model does on the validation samples, and on D_L, n >= 1. The network is left with its weights."""
        accuracy = self.accuracy(model)
        self.network.load(model)
        return Look(accuracy, *(loss_and_gradient_norm(self.network, *self.data.shared) if measure else ()))

    def trained(
        self, order: Order, action: Train, chosen: Start, before: Look, loss_after: float | None, update: Model
    ) -> Outcome:
        """The report of a training: the part that travels of the change that it made to its start.

        `before`, `loss_after`: of the model that the device would use.
        """
        measured = (before.loss, before.gradient_norm, loss_after)
        if not all(math.isfinite(number) for number in measured if number is not None):
            raise FailedError("training diverged")
        layout = self.network.layout
        ref, data = sent(update, layout, layout.part(action.part), action.codec, order)
        result = Trained(
            update=ref,
            n_samples=self.data.n_shared,
            cluster=chosen.cluster,
            loss_before=before.loss,
            loss_after=loss_after,
            gradient_norm=before.gradient_norm,
            val_accuracy=before.accuracy,
        )
        if isinstance(data, Unpacked):
            return Outcome(result, {}, {ref.digest: data})
        return Outcome(result, {ref.digest: data})

    def best_start(self, starts: tuple[Start, ...], fetch: Fetch, choose: Choice = "loss") -> tuple[Model, Start]:
        """The start that does best on the validation samples, on D_L where there are none; the first on a tie."""
        return self.best_of([self.model(start.model, fetch) for start in starts], starts, choose)

    def best_of(self, found: Sequence[Model], starts: tuple[Start, ...], choose: Choice) -> tuple[Model, Start]:
        """The best of the models `found` of these starts."""
        if len(found) == 1:
            return found[0], starts[0]
        best = mixture.first_ranked([self.rank(model, choose) for model in found])
        return found[best], starts[best]

    def rank(self, model: Model, choose: Choice) -> tuple[float, float]:
        """(samples classified correctly or 0, log-likelihood): the larger the better; without samples (0, 0)."""
        x, y = self.validation if len(self.data.y_val) else self.data.shared
        if choose == "loss":
            return 0.0, -self.loss(model, (x, y))
        logits = self.logits(model, x)
        return float((logits.argmax(axis=1) == y).sum()), -mixture.total_loss(logits, y, self.prior, PLAIN)

    def loss(self, model: Model, samples: Samples) -> float:
        """Sum of losses with T = 1, kappa = 1 and the prior of the training samples."""
        x, y = samples
        return mixture.total_loss(self.logits(model, x), y, self.prior, WITH_PRIOR)

    def logits(self, model: Model, x: NDArray[np.float32]) -> Array:
        """Logits (n, C) of model inputs; (0, C) of none."""
        return self.network.logits(model, x).reshape(len(x), self.task.n_classes)

    def accuracy(self, model: Model) -> float | None:
        """On the validation samples; None without any."""
        if not len(self.data.y_val):
            return None
        return float((self.logits(model, self.data.x_val).argmax(axis=1) == self.data.y_val).mean())

    # --------------------------------------------------------------------------------- sections 1, 5: profile and trial

    def _profile(self, action: Profile, fetch: Fetch) -> Result:
        if not self.data.n_shared:
            return Declined(reason="no shareable samples")
        x, _ = self.data.shared
        self.network.load(self.model(action.extractor, fetch))
        found = sparsity_profile(self.network.module, x, self.processor)
        if action.noise:
            found = with_noise(found, len(x), sigma=action.noise, home=self.home)
        return Profiled(
            extractor=action.extractor.digest,
            profile=tuple(found.shares.tolist()),
            halves=found.halves,
            n_samples=len(x),
        )

    def _try(self, action: Trial, fetch: Fetch) -> Tried:
        m = len(self.data.y_val)
        if not m:
            return Tried(delta=None)
        shared, expert = (
            self.loss(self.model(ref, fetch), self.validation) for ref in (action.global_model, action.expert)
        )
        return Tried(delta=(shared - expert) / m)

    # ---------------------------------------------------------------------------------------- sections 6, 7: candidates

    def _fit_candidates(self, action: FitCandidates, fetch: Fetch, seed: int, stop: Stop) -> CandidatesFitted:
        network, data = self.network, self.data
        training = (data.x_train, data.y_train)
        models = {Role.GLOBAL: self.model(action.global_model, fetch)}
        start, cluster = models[Role.GLOBAL], -1
        if action.experts:
            start, chosen = self.best_start(action.experts, fetch)
            models[Role.EXPERT], cluster = start, chosen.cluster
        initial = self.model(action.initial_model, fetch)
        if action.private_start == "initial":
            start = initial
        private_steps = 0
        if data.n_train >= 2:
            rng, steps = _rng(seed, _PRIVATE), action.private_steps
            models[Role.PRIVATE], private_steps = private_model.fit_private(
                network, start, training, self.validation, action.sgd, rng, stop, steps=steps
            )
            if action.local_steps:
                rng = _rng(seed, _LOCAL)
                models[Role.LOCAL] = private_model.fit(
                    network, initial, training, action.sgd, action.local_steps, rng, stop
                )
        self._keep(models, start, private_steps, initial, action.local_steps, cluster)
        losses = {
            role: mixture.grid_losses(self.logits(models[role], data.x_val), data.y_val, self.prior, role)
            for role in Role
            if role in models
        }
        return CandidatesFitted(losses=losses, n_validation=len(data.y_val), cluster=cluster)

    def _keep(
        self,
        models: Mapping[Role, Model],
        private_start: Model,
        private_steps: int,
        initial: Model,
        local_steps: int,
        cluster: int,
    ) -> None:
        """Make the candidates durable: first the tensors, then the file that names them, then the old ones go."""
        folder = BlobFolder(self.home / "candidates")

        def put(model: Model) -> str:
            return folder.put(to_bytes(unflatten(model, self.network.layout)))

        kept = Kept(
            models={role: put(model) for role, model in models.items()},
            private_start=put(private_start),
            private_steps=private_steps,
            initial=put(initial),
            local_steps=local_steps,
            cluster=cluster,
        )
        write_atomically(self.home / "candidates" / "state.json", msgspec.json.encode(kept))
        for digest in set(folder) - {*kept.models.values(), kept.private_start, kept.initial}:
            folder.remove(digest)

    def _kept(self) -> Kept:
        path = self.home / "candidates" / "state.json"
        if not path.exists():
            raise FailedError("no candidates: FitCandidates was not done here")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Kept)
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error

    def _kept_model(self, digest: str) -> Model:
        data = BlobFolder(self.home / "candidates").get(digest)
        return flatten(from_bytes(data), self.network.layout)

    def _candidates(self, calibration: Mapping[Role, Calibration]) -> _Candidates:
        """The kept candidates that `calibration` names, on the validation samples."""
        kept = self._kept()
        roles = tuple(role for role in Role if role in kept.models and role in calibration)
        if not roles:
            raise FailedError(f"the order names {sorted(calibration)}, this device has {sorted(kept.models)}")
        models = tuple(self._kept_model(kept.models[role]) for role in roles)
        logits = np.stack([self.logits(model, self.data.x_val) for model in models])
        calibrations = tuple(calibration[role] for role in roles)
        log_q = np.stack([mixture.calibrated(l_k, self.prior, c) for l_k, c in zip(logits, calibrations, strict=True)])
        raw = mixture.raw_energies(logits)
        mean, std = mixture.energy_statistics(raw)
        return _Candidates(
            roles=roles,
            models=models,
            calibrations=calibrations,
            log_q=log_q,
            log_p=mixture.of_labels(log_q, self.data.y_val).T,
            energies=mixture.standardised(raw, mean, std),
            energy_mean=mean,
            energy_std=std,
        )

    # -------------------------------------------------------------------------------- sections 8, 9: weights and energy

    def _fit_weights(self, action: FitWeights) -> WeightsFitted:
        weights = []
        for pooled in action.pooled:
            found = self._candidates(_only(action.calibration, pooled))
            own = mixture.em_weights(found.log_p, mixture.spread(pooled, found.roles), action.shrinkage)
            weights.append({role: min(float(w), 1.0) for role, w in zip(found.roles, own, strict=True)})
        return WeightsFitted(weights=tuple(weights), n_validation=len(self.data.y_val))

    def _fit_energy(self, action: FitEnergy) -> EnergyFitted:
        pooled_losses: list[float] = []
        beta_losses: list[tuple[float, float, float]] = []
        for pooled in action.pooled:
            found = self._candidates(_only(action.calibration, pooled))
            u = mixture.spread(pooled, found.roles)
            own = mixture.em_weights(found.log_p, u, action.shrinkage)
            pooled_losses.append(self._mixture_loss(found, u, 0.0))
            plain, half, full = (self._mixture_loss(found, own, beta) for beta in BETAS)
            beta_losses.append((plain, half, full))
        return EnergyFitted(
            pooled_losses=tuple(pooled_losses),
            beta_losses=tuple(beta_losses),
            n_validation=len(self.data.y_val),
        )

    def _mixture_loss(self, found: _Candidates, weights: Array, beta: float) -> float:
        log_p, _ = mixture.fuse(found.log_q, weights, found.energies, beta=beta, experts=found.experts)
        return -float(mixture.of_labels(log_p, self.data.y_val).sum())

    # ----------------------------------------------------------------------- sections 9, 10, 11: gate, final fit, guard

    def _fit_gate(self, action: FitGate, seed: int, stop: Stop) -> Installed:
        found = self._candidates(_only(action.calibration, action.pooled))
        beta = action.beta if len(self.data.y_val) else 0.0
        weights = mixture.em_weights(found.log_p, mixture.spread(action.pooled, found.roles), action.shrinkage)
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + (beta * found.energies if beta else np.zeros_like(found.energies))
        log_p = np.where(np.isfinite(found.log_q).all(axis=2).T, found.log_p, np.nan)
        trained = GateWeights.untrained(gate.n_features(self.task.input_shape), len(found.roles))
        if action.gate == "validation":
            trained = gate.train_gate(self.data.x_val, log_p, scores, seed=seed)
        fused, _ = mixture.fuse(found.log_q, weights, found.energies, beta=beta, experts=found.experts)
        guard = self._guard(action.calibration, fused) if action.guard else None
        final = self._final_models(found, action.sgd, seed, stop) if action.final_fit else list(found.models)
        candidates = [
            Candidate(
                role=role,
                name=role.value,
                model=model,
                temperature=chosen.temperature,
                kappa=chosen.kappa,
                energy_mean=float(found.energy_mean[k]),
                energy_std=float(found.energy_std[k]),
                weight=min(float(weights[k]), 1.0),
            )
            for k, (role, model, chosen) in enumerate(zip(found.roles, final, found.calibrations, strict=True))
        ]
        if guard is not None and guard[0] not in found.roles:
            candidates.append(self._without_weight(guard[0]))
            trained = _with_room(trained)
        index = None if guard is None else [c.role for c in candidates].index(guard[0])
        info = self.write(
            Mixture(
                candidates=tuple(candidates),
                log_prior=self.final_prior(),
                beta=beta,
                gate=trained,
                guard=None if guard is None or index is None else Guard(index, guard[1].temperature, guard[1].kappa),
            ),
            action.release,
            "fedge",
            self.metrics(fused),
        )
        return installed(info, tuple(c.role for c in candidates), guarded=guard is not None)

    def _guard(self, calibration: Mapping[Role, Calibration], fused: Array) -> tuple[Role, Calibration] | None:
        """Section 11: the alternative that takes half of the output, on the models before section 10 and with r = 0."""
        counts = np.bincount(self.data.y_val, minlength=self.task.n_classes)
        if not mixture.representative(counts, self.data.class_counts(self.task.n_classes)):
            return None
        kept = self._kept()
        alternatives = [
            (role, PLAIN if role is Role.GLOBAL else calibration.get(role, PLAIN))
            for role in (Role.GLOBAL, Role.PRIVATE, Role.LOCAL)
            if role in kept.models
        ]
        scores = []
        for role, chosen in alternatives:
            logits = self.logits(self._kept_model(kept.models[role]), self.data.x_val)
            scores.append(self._score(mixture.calibrated(logits, self.prior, chosen)))
        best = mixture.guard(self._score(fused), scores)
        return None if best is None else alternatives[best]

    def _score(self, log_p: Array) -> tuple[float, int]:
        """Log-likelihood of the validation samples and how many of them are classified correctly."""
        y = self.data.y_val
        return float(mixture.of_labels(log_p, y).sum()), int((log_p.argmax(axis=1) == y).sum())

    def _final_models(self, found: _Candidates, sgd: Sgd, seed: int, stop: Stop) -> list[Model]:
        """Section 10: the private and the local model also learn from the validation samples, once all is chosen."""
        if not len(self.data.y_val):
            return list(found.models)
        kept, network, everything = self._kept(), self.network, self.data.labelled
        final = []
        for role, model in zip(found.roles, found.models, strict=True):
            match role:
                case Role.PRIVATE:
                    start, rng = self._kept_model(kept.private_start), _rng(seed, _FINAL_PRIVATE)
                    again = private_model.fit(network, start, everything, sgd, kept.private_steps, rng, stop)
                    final.append(private_model.mean_model(model, again))
                case Role.LOCAL:
                    start, rng = self._kept_model(kept.initial), _rng(seed, _FINAL_LOCAL)
                    final.append(private_model.fit(network, start, everything, sgd, kept.local_steps, rng, stop))
                case _:
                    final.append(model)
        return final

    def _without_weight(self, role: Role) -> Candidate:
        """A candidate for the guard alone: the local model that the pool left out."""
        return Candidate(role=role, name=role.value, model=self._kept_model(self._kept().models[role]), weight=0.0)

    def final_prior(self) -> Array:
        """Log class shares (C,) of training and validation samples."""
        return mixture.log_prior(self.data.class_counts(self.task.n_classes, with_validation=True))

    def metrics(self, log_p: Array) -> dict[str, float]:
        """Figures for the bundle, from log-probabilities (m, C) of the validation samples."""
        if not len(self.data.y_val):
            return {}
        log_likelihood, correct = self._score(log_p)
        m = len(self.data.y_val)
        return {"validation_accuracy": correct / m, "validation_loss": -log_likelihood / m}

    # ----------------------------------------------------------------------------------------------------- bundles

    def write(self, made: Mixture | Pool, release: int, method: str, metrics: dict[str, float]) -> BundleInfo:
        """Write a bundle and check it against torch on the validation samples."""
        return write_bundle(
            self.home / "bundles" / str(release),
            task=self.task,
            layout=self.network.layout,
            mixture=made,
            validation=self.data.x_val,
            release=release,
            method=method,
            metrics=metrics,
        )


def _only(calibration: Mapping[Role, Calibration], pooled: Mapping[Role, float]) -> dict[Role, Calibration]:
    """The calibrations of the candidates that have a pooled weight."""
    return {role: chosen for role, chosen in calibration.items() if role in pooled}


def _with_room(weights: GateWeights) -> GateWeights:
    """The gate with one more output, which is always 0."""
    return GateWeights(
        hidden_weight=weights.hidden_weight,
        hidden_bias=weights.hidden_bias,
        out_weight=np.vstack([weights.out_weight, np.zeros((1, weights.out_weight.shape[1]))]),
        out_bias=np.append(weights.out_bias, 0.0),
    )


def _rng(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream])
