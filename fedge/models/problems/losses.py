"""The loss of a batch, whatever the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fedge.models.problems import classification, multi_label, own, reconstruction, regression, segmentation
from fedge.problems.problem import Problem

Losses = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
PADDING: Final = -100
"""Target of a padding sample, which counts in no loss and no gradient; NaN where targets are floats."""

_LOSSES: Final[dict[str, Losses]] = {
    "classification": classification.compute_losses,
    "multi-label": multi_label.compute_losses,
    "regression": regression.compute_losses,
    "segmentation": segmentation.compute_losses,
    "reconstruction": reconstruction.compute_losses,
    "own": own.compute_losses,
}


def compute_losses(problem: Problem, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses of n samples, (n,), 0 for padding samples.

    Args:
        problem: the task's problem.
        outputs: those of the network, (n, ...).
        x: inputs, (n, ...).
        y: targets, (n, ...), as `Problem.convert_targets` makes them.
    """
    real = find_real_samples(y)
    wide = real.view(real.shape + (1,) * (y.ndim - real.ndim))
    kind = type(problem).__struct_config__.tag
    losses = _LOSSES[str(kind)](problem, outputs, x, torch.where(wide, y, torch.zeros_like(y)))
    return torch.where(real, losses, torch.zeros_like(losses))


def compute_mean_loss(problem: Problem, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the samples that are no padding."""
    return compute_losses(problem, outputs, x, y).sum() / find_real_samples(y).sum().clamp(min=1)


def find_real_samples(y: Tensor) -> Tensor:
    """Return which of n samples are no padding, (n,)."""
    flat = y.flatten(1)[:, 0] if y.ndim > 1 else y
    return ~torch.isnan(flat) if y.is_floating_point() else flat != PADDING
