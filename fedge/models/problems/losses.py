"""The loss of a batch, whatever the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedge.data.problems.classification import Classification
from fedge.data.problems.own import Own
from fedge.data.problems.problem import Problem
from fedge.errors import ConfigError
from fedge.models.problems import classification, multi_label, own, reconstruction, regression, segmentation
from fedge.models.problems import cross_entropy as losses
from fedge.models.problems.cross_entropy import Loss
from fedge.steps.sgd import Sgd

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


def make_loss(problem: Problem, sgd: Sgd) -> Loss:
    """Make the loss that a network learns by; with class weights, these follow a batch as a further argument, (C,).

    Raises:
        ConfigError: the recipe has parts that the problem does not know.
    """
    if isinstance(problem, Classification):
        return losses.make_loss(sgd)
    require_known(problem, sgd)

    def compute_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return compute_mean_loss(problem, module(x), x, y)

    return compute_loss


def make_loss_of(problem: Problem, sgd: Sgd, y: NDArray[Any], processor: torch.device) -> Loss:
    """Make the loss of a recipe for samples with the targets y, whose class weights it holds."""
    if isinstance(problem, Classification):
        return losses.make_loss_of(sgd, y, len(problem.classes), processor)
    return make_loss(problem, sgd)


def require_known(problem: Problem, sgd: Sgd) -> None:
    """Refuse parts of a recipe that are for single-label classification.

    Raises:
        ConfigError: the recipe has such a part, and the problem is another one.
    """
    given = {"label smoothing": sgd.label_smoothing, "class weights": sgd.class_weights}
    if problem.kind != "classification" and (there := [name for name, value in given.items() if value]):
        raise ConfigError(f"leave out {' and '.join(there)}: for classification, not for {problem.NAME}")


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
    found = _LOSSES[problem.kind](problem, outputs, x, torch.where(wide, y, torch.zeros_like(y)))
    return torch.where(real, found, torch.zeros_like(found))


def compute_mean_loss(problem: Problem, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the samples that are no padding."""
    return compute_losses(problem, outputs, x, y).sum() / find_real_samples(y).sum().clamp(min=1)


def reduce_outputs(
    problem: Problem, outputs: NDArray[np.floating], x: NDArray[np.float32], y: NDArray[Any]
) -> NDArray[np.float64]:
    """Return what the problem's formulas need of outputs (n, ...), with the losses of a user's own problem in it."""
    reduced = np.asarray(problem.reduce_outputs(outputs, x), np.float64)
    if isinstance(problem, Own) and len(y):
        given = (torch.from_numpy(np.ascontiguousarray(each)) for each in (np.asarray(outputs, np.float32), x, y))
        with torch.inference_mode():
            reduced[:, 0] = compute_losses(problem, *given).numpy()
    return reduced


def find_real_samples(y: Tensor) -> Tensor:
    """Return which of n samples are no padding, (n,)."""
    flat = y.flatten(1)[:, 0] if y.ndim > 1 else y
    return ~torch.isnan(flat) if y.is_floating_point() else flat != PADDING
