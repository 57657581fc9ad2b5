"""Evaluates models on a device's own samples and picks the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from edge_agent.device.device import Device
from edge_agent.learning import mixture
from edge_agent.learning.private_model import Samples
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.formulas import Answers, find_usable
from fedge.data.problems.maths import Array
from fedge.models.training import compute_loss_and_gradient_norm, compute_mean_loss
from fedge.steps.training.train import Choice, Start
from fedge.tensors.layout import Model

WITH_OFFSET: Final = Calibration(temperature=1.0, kappa=1.0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of a model before training: score on V_L; loss and gradient norm on D_L if requested."""

    score: float | None
    loss: float | None = None
    gradient_norm: float | None = None


def evaluate_model(device: Device, model: Model, *, measure: bool = True) -> Evaluation:
    """Evaluate a model on V_L and, if `measure`, on D_L, n >= 1."""
    found = compute_score(device, model)
    if not measure:
        return Evaluation(found)
    device.network.load(model)
    return Evaluation(found, *compute_loss_and_gradient_norm(device.network, *device.data.shared))


def fetch_best_start(device: Device, starts: Sequence[Start], choose: Choice = "loss") -> tuple[Model, Start]:
    """Return the best start on V_L, or on D_L if V_L is empty or `choose` says so; the first on a tie."""
    return choose_best_start(device, [device.fetch_model(start.model) for start in starts], starts, choose)


def choose_best_start(
    device: Device, found: Sequence[Model], starts: Sequence[Start], choose: Choice
) -> tuple[Model, Start]:
    """Return the best of these starts, given their models `found`."""
    if len(found) == 1:
        return found[0], starts[0]
    best = mixture.find_best_rank([rank_model(device, model, choose) for model in found])
    return found[best], starts[best]


def rank_model(device: Device, model: Model, choose: Choice) -> tuple[float, float]:
    """Return a model's rank, (score times samples or 0, log-likelihood), larger is better; (0, 0) without samples.

    The score times samples is the number of correct answers in classification.
    """
    data = device.data
    if choose == "training_loss":
        device.network.load(model)
        return 0.0, -compute_mean_loss(device.network, *data.shared)
    x, y = data.shared_validation if len(data.shared_validation[1]) else data.shared
    if choose == "loss":
        return 0.0, -compute_loss(device, model, (x, y))
    problem, outputs = device.task.problem, device.network.predict(model, x, y)
    plain = problem.calibrate(outputs, PLAIN, fit_shared_offset(device, model))
    return len(y) * (problem.score_alone(outputs, y) or 0.0), problem.sum_likelihood(plain, y)


def compute_loss(device: Device, model: Model, samples: Samples) -> float:
    """Compute the sum of losses, in nats, with T = 1, kappa = 1 and the offset of D_L."""
    x, y = samples
    problem = device.task.problem
    answers = problem.calibrate(device.network.predict(model, x, y), WITH_OFFSET, fit_shared_offset(device, model))
    return -problem.sum_likelihood(answers, y)


def compute_score(device: Device, model: Model) -> float | None:
    """Compute the score on V_L, such as the accuracy; None if these samples give none."""
    x, y = device.data.shared_validation
    return device.task.problem.score_alone(device.network.predict(model, x, y), y) if len(y) else None


def fit_offset(device: Device, model: Model, samples: Samples) -> Array:
    """Compute what the targets of these samples say beside a model, such as log class shares (C,)."""
    x, y = samples
    return device.task.problem.fit_offset(y, lambda: device.network.predict(model, x, y))


def fit_shared_offset(device: Device, model: Model) -> Array:
    """Compute the offset of D_L, for everything that leaves the device or influences what does."""
    return fit_offset(device, model, device.data.shared)


def fit_own_offset(device: Device, model: Model) -> Array:
    """Compute the offset of all training samples, for what stays on the device."""
    return fit_offset(device, model, device.data.training)


def fit_final_offset(device: Device, model: Model) -> Array:
    """Compute the offset of training and validation samples."""
    return fit_offset(device, model, device.data.labelled)


class Figures(NamedTuple):
    """Figures on the validation samples: log-likelihood in nats, score times samples, and figures for people."""

    log_likelihood: float
    total_score: float
    metrics: dict[str, float]


def measure_answers(device: Device, components: Sequence[Answers], shares: Array, likelihoods: Array) -> Figures:
    """Measure a mixture's answers on the validation samples.

    Args:
        device: the device.
        components: the answers of M candidates.
        shares: alpha, (m, M).
        likelihoods: the mixture's log-likelihood of each target, (m,).
    """
    problem, y = device.task.problem, device.data.y_val
    if not len(y):
        return Figures(0.0, 0.0, {})
    mixed, total = problem.mix(components, shares), float(likelihoods.sum())
    score = problem.compute_score(mixed, y)
    known = {} if score is None else {f"validation_{problem.SCORE}": score}
    return Figures(total, len(y) * (score or 0.0), known | {"validation_loss": -total / len(y)})


def measure_model(device: Device, model: Model, how: Calibration, offset: Array) -> Figures:
    """Measure one model's answers on the validation samples."""
    problem, (x, y) = device.task.problem, device.data.validation
    answers = problem.calibrate(device.network.predict(model, x, y), how, offset)
    found = problem.compute_log_likelihood(answers, y)
    usable = find_usable(answers)
    likelihoods = np.where(usable & np.isfinite(found), found, problem.compute_unknown(y))
    return measure_answers(device, [answers], usable[:, np.newaxis].astype(np.float64), likelihoods)
