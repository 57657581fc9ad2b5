"""The candidates of fedge's mixture: what `fit_candidates` keeps for later steps (fedge.md sections 6 to 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct, UnsetType
from numpy.typing import NDArray

from edge_agent.device.device import Device, FailedError, decode_kept
from edge_agent.learning import mixture, private_model
from edge_agent.learning.evaluation import Figures, fit_offset, measure_answers
from edge_agent.learning.private_model import Samples
from fedge.bundle.formula import standardise
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.formulas import Answers, find_usable
from fedge.data.problems.maths import Array, Floats
from fedge.steps.mixture.fit_weights import Products, select_products
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model, flatten, from_bytes, to_bytes, unflatten
from fedge.wire.messages import Role

CANDIDATES: Final = "candidates"
INITIAL: Final = "initial"


class Plan(Struct, frozen=True, kw_only=True):
    """The plan for training the private and the local model.

    `private_start`: the role of the private model's start, or "initial"; `private_steps`: chosen by validation if None.
    """

    private_start: str
    private_steps: int | None
    local_steps: int


class FittedModels(Struct, frozen=True, kw_only=True):
    """The fitted models by role or "initial", how they were fitted, and the private model's number of steps."""

    models: dict[str, bytes]
    plan: Plan
    private_steps: int

    def decode_model(self, device: Device, name: str) -> Model:
        """Return a model by its role, or "initial"."""
        return flatten(from_bytes(self.models[name]), device.layout)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the candidates, in the order of the mixture."""
        return tuple(role for role in Role if role in self.models)


def fit_models(
    device: Device,
    models: Mapping[str, Model],
    plan: Plan,
    sgd: Sgd,
    training: Samples,
    validation: Samples,
    streams: tuple[int, int],
) -> FittedModels:
    """Fit private and local model beside the given ones (fedge.md section 6); neither with fewer than two samples.

    `streams`: streams of the order's random numbers for these two models.
    """
    found, private_steps = dict(models), 0
    if len(training[1]) >= 2:
        start = models[plan.private_start]
        found[Role.PRIVATE], private_steps = private_model.fit_private(
            device, start, training, validation, sgd, streams[0], steps=plan.private_steps
        )
        if plan.local_steps:
            found[Role.LOCAL] = private_model.fit_model(
                device, models[INITIAL], training, sgd, plan.local_steps, streams[1]
            )
    packed = {name: to_bytes(unflatten(model, device.layout)) for name, model in found.items()}
    return FittedModels(models=packed, plan=plan, private_steps=private_steps)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of an order, sorted by `Role`: M roles, calibrations and models, evaluated on m samples."""

    fitted: FittedModels
    roles: tuple[Role, ...]
    models: tuple[Model, ...]
    calibrations: tuple[Calibration, ...]
    answers: tuple[Answers, ...]
    log_p: Array  # (m, M), l of the targets; NaN where a candidate is not usable
    energies: Array  # (m, M), standardised
    energy_mean: Array
    energy_std: Array

    def select(self, index: int) -> Candidates:
        """Return one candidate alone, for a problem whose answers cannot be mixed."""
        one = slice(index, index + 1)
        return replace(
            self,
            roles=self.roles[one],
            models=self.models[one],
            calibrations=self.calibrations[one],
            answers=self.answers[one],
            log_p=self.log_p[:, one],
            energies=self.energies[:, one],
            energy_mean=self.energy_mean[one],
            energy_std=self.energy_std[one],
        )

    def fit_weights(
        self,
        device: Device,
        targets: NDArray[Any],
        pooled: Mapping[Role, float],
        shrinkage: float,
        products: Products | UnsetType,
    ) -> Array:
        """Fit omega, (M,), pulled towards pooled weights (fedge.md section 8)."""
        u = mixture.distribute_weights(pooled, self.roles)
        own = select_products(products, self.roles)
        return device.task.problem.fit_weights(self.answers, targets, u, shrinkage, own)

    def measure(self, device: Device, scores: Array) -> Figures:
        """Measure the mixture with these scores (m, M) on the validation samples."""
        unknown = device.task.problem.compute_unknown(device.data.y_val)
        likelihoods = mixture.compute_mixture_likelihood(self.log_p, scores, unknown)
        shares = mixture.compute_shares(scores, np.isfinite(self.log_p))
        return measure_answers(device, self.answers, shares, likelihoods)


def save_fitted(device: Device, fitted: FittedModels) -> None:
    """Store the candidates durably."""
    device.files.write(CANDIDATES, msgspec.msgpack.encode(fitted))


def load_fitted(device: Device) -> FittedModels:
    """Return the candidates last stored by `save_fitted`.

    Raises:
        FailedError: no candidates are stored.
        DamagedError: the stored candidates are damaged.
    """
    data = device.files.read(CANDIDATES)
    if data is None:
        raise FailedError("the device has no candidates: fit_candidates was not done")
    return decode_kept(data, FittedModels)


def make_candidates(
    device: Device,
    fitted: FittedModels,
    samples: Samples,
    offset_samples: Samples,
    calibration: Mapping[Role, Calibration],
    pooled: Mapping[Role, float],
) -> Candidates:
    """Evaluate the candidates that have a calibration and a pooled weight, on some samples.

    `samples`: (m, *input_shape) and (m, ...), m >= 0. `offset_samples`: those whose targets give the offset. `pooled`:
    weights u.

    Raises:
        FailedError: the device has no such candidate.
    """
    x, y = samples
    roles = tuple(role for role in fitted.roles if role in calibration and role in pooled)
    if not roles:
        raise FailedError(
            f"no candidate fits: the order names {', '.join(pooled)}, the device has {', '.join(fitted.roles)}"
        )
    models = tuple(fitted.decode_model(device, role) for role in roles)
    chosen, problem = tuple(calibration[role] for role in roles), device.task.problem
    answers, log_p, raw = list[Answers](), list[Array](), list[Floats]()
    for model, how in zip(models, chosen, strict=True):
        outputs = device.network.predict(model, x, y)
        says = problem.calibrate(outputs, how, fit_offset(device, model, offset_samples))
        answers.append(says)
        log_p.append(np.where(find_usable(says), problem.compute_log_likelihood(says, y), np.nan))
        raw.append(problem.compute_energies(outputs, says))
    energies = np.stack(raw, axis=1).astype(np.float64)
    mean, std = mixture.compute_energy_statistics(energies)
    return Candidates(
        fitted=fitted,
        roles=roles,
        models=models,
        calibrations=chosen,
        answers=tuple(answers),
        log_p=np.stack(log_p, axis=1),
        energies=standardise(energies, mean, std),
        energy_mean=mean,
        energy_std=std,
    )


def make_pooled_candidates(
    device: Device, calibration: Mapping[Role, Calibration], pooled: Mapping[Role, float]
) -> Candidates:
    """Return the pooled candidates, evaluated on V_L; with marked samples, shadows of them fitted on D_L alone."""
    data = device.data
    return make_candidates(device, load_fitted(device), data.shared_validation, data.shared, calibration, pooled)
