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
from fedge.models.training import loss_and_gradient_norm
from fedge.steps.mixture.fit_weights import Calibration
from fedge.steps.training.train import Choice, Start
from fedge.tensors.layout import Model

WITH_PRIOR: Final = Calibration(temperature=1.0, kappa=1.0)


@dataclass(frozen=True, slots=True)
class Look:
    """A model before training: accuracy on the validation samples; loss and its gradient's norm on D_L if requested."""

    accuracy: float | None
    loss: float | None = None
    gradient_norm: float | None = None


def look(device: Device, model: Model, *, measure: bool = True) -> Look:
    """Evaluate a model on V_L, and on D_L, n >= 1. The network keeps the model's weights."""
    found = accuracy(device, model)
    device.network.load(model)
    return Look(found, *(loss_and_gradient_norm(device.network, *device.data.shared) if measure else ()))


def best_start(device: Device, starts: Sequence[Start], choose: Choice = "loss") -> tuple[Model, Start]:
    """The best start on V_L, or on D_L if that is empty; the first on a tie."""
    return best_of(device, [device.model(start.model) for start in starts], starts, choose)


def best_of(device: Device, found: Sequence[Model], starts: Sequence[Start], choose: Choice) -> tuple[Model, Start]:
    """The best of these starts, given their models `found`."""
    if len(found) == 1:
        return found[0], starts[0]
    best = mixture.first_ranked([rank(device, model, choose) for model in found])
    return found[best], starts[best]


def rank(device: Device, model: Model, choose: Choice) -> tuple[float, float]:
    """(number classified correctly or 0, log-likelihood): larger is better; without samples (0, 0)."""
    data = device.data
    x, y = data.shared_validation if len(data.shared_validation[1]) else data.shared
    if choose == "loss":
        return 0.0, -loss(device, model, (x, y))
    found = logits(device, model, x)
    return float((found.argmax(axis=1) == y).sum()), -mixture.total_loss(found, y, shared_prior(device), PLAIN)


def loss(device: Device, model: Model, samples: Samples) -> float:
    """Sum of losses with T = 1, kappa = 1 and the prior of D_L."""
    x, y = samples
    return mixture.total_loss(logits(device, model, x), y, shared_prior(device), WITH_PRIOR)


def logits(device: Device, model: Model, x: NDArray[np.float32]) -> Array:
    """Logits (n, C) of model inputs; (0, C) of none."""
    return device.network.logits(model, x).reshape(len(x), device.task.n_classes)


def accuracy(device: Device, model: Model) -> float | None:
    """On V_L; None without any."""
    x, y = device.data.shared_validation
    return float((logits(device, model, x).argmax(axis=1) == y).mean()) if len(y) else None


def shared_prior(device: Device) -> Array:
    """Log class shares (C,) of D_L: for everything that leaves the device or influences it."""
    return mixture.log_prior(device.data.shared_counts(device.task.n_classes))


def prior(device: Device) -> Array:
    """Log class shares (C,) of all training samples: for what stays on the device."""
    return mixture.log_prior(device.data.class_counts(device.task.n_classes))


def final_prior(device: Device) -> Array:
    """Log class shares (C,) of training and validation samples."""
    return mixture.log_prior(device.data.class_counts(device.task.n_classes, with_validation=True))


def score(device: Device, log_p: Array) -> tuple[float, int]:
    """Log-likelihood of the validation samples, and the number classified correctly."""
    y = device.data.y_val
    return float(mixture.of_labels(log_p, y).sum()), int((log_p.argmax(axis=1) == y).sum())


def metrics(device: Device, log_p: Array) -> dict[str, float]:
    """Figures for the bundle, from log-probabilities (m, C) of the validation samples."""
    m = len(device.data.y_val)
    if not m:
        return {}
    log_likelihood, correct = score(device, log_p)
    return {"validation_accuracy": correct / m, "validation_loss": -log_likelihood / m}
