"""Evaluates models on a device's own samples and picks the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_agent.device.device import Device
from edge_agent.learning import mixture
from edge_agent.learning.mixture import PLAIN
from edge_agent.learning.private_model import Samples
from fedge.bundle.formula import Array
from fedge.models.training import compute_loss_and_gradient_norm
from fedge.steps.mixture.fit_weights import Calibration
from fedge.steps.training.train import Choice, Start
from fedge.tensors.layout import Model

WITH_PRIOR: Final = Calibration(temperature=1.0, kappa=1.0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of a model before training: accuracy on V_L; loss and gradient norm on D_L if requested."""

    accuracy: float | None
    loss: float | None = None
    gradient_norm: float | None = None


def evaluate_model(device: Device, model: Model, *, measure: bool = True) -> Evaluation:
    """Evaluate a model on V_L and, if `measure`, on D_L, n >= 1."""
    found = compute_accuracy(device, model)
    if not measure:
        return Evaluation(found)
    device.network.load(model)
    return Evaluation(found, *compute_loss_and_gradient_norm(device.network, *device.data.shared))


def fetch_best_start(device: Device, starts: Sequence[Start], choose: Choice = "loss") -> tuple[Model, Start]:
    """Return the best start on V_L, or on D_L if V_L is empty; the first on a tie."""
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
    """Return a model's rank, (number correct or 0, log-likelihood), larger is better; (0, 0) without samples."""
    data = device.data
    x, y = data.shared_validation if len(data.shared_validation[1]) else data.shared
    if choose == "loss":
        return 0.0, -compute_loss(device, model, (x, y))
    found = compute_logits(device, model, x)
    return float((found.argmax(axis=1) == y).sum()), -mixture.compute_total_loss(
        found, y, compute_shared_prior(device), PLAIN
    )


def compute_loss(device: Device, model: Model, samples: Samples) -> float:
    """Compute the sum of losses, in nats, with T = 1, kappa = 1 and the prior of D_L."""
    x, y = samples
    return mixture.compute_total_loss(compute_logits(device, model, x), y, compute_shared_prior(device), WITH_PRIOR)


def compute_logits(device: Device, model: Model, x: NDArray[np.float32]) -> Array:
    """Compute logits (n, C) of model inputs; (0, C) of none."""
    return device.network.compute_logits(model, x).reshape(len(x), device.task.n_classes)


def compute_accuracy(device: Device, model: Model) -> float | None:
    """Compute the accuracy on V_L, 0 to 1, or None without samples."""
    x, y = device.data.shared_validation
    return float((compute_logits(device, model, x).argmax(axis=1) == y).mean()) if len(y) else None


def compute_shared_prior(device: Device) -> Array:
    """Compute log class shares (C,) of D_L, the prior for everything that leaves the device or influences what does."""
    return mixture.compute_log_prior(device.data.count_shared_classes(device.task.n_classes))


def compute_prior(device: Device) -> Array:
    """Compute log class shares (C,) of all training samples, the prior for what stays on the device."""
    return mixture.compute_log_prior(device.data.count_classes(device.task.n_classes))


def compute_final_prior(device: Device) -> Array:
    """Compute log class shares (C,) of training and validation samples."""
    return mixture.compute_log_prior(device.data.count_classes(device.task.n_classes, with_validation=True))


def score_predictions(device: Device, log_p: Array) -> tuple[float, int]:
    """Compute the validation samples' log-likelihood, and the number classified correctly."""
    y = device.data.y_val
    return float(mixture.select_true_log_p(log_p, y).sum()), int((log_p.argmax(axis=1) == y).sum())


def compute_metrics(device: Device, log_p: Array) -> dict[str, float]:
    """Compute figures for the bundle, from log-probabilities (m, C) of the validation samples."""
    m = len(device.data.y_val)
    if not m:
        return {}
    log_likelihood, correct = score_predictions(device, log_p)
    return {"validation_accuracy": correct / m, "validation_loss": -log_likelihood / m}
