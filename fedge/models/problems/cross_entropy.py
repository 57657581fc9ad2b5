"""Losses of classification: mean cross-entropy, with the label smoothing and the class weights of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedge.steps.sgd import Sgd

Loss = Callable[..., Tensor]
"""Function from a module in training mode, inputs (b, ...) and labels (b,) to the batch's mean loss, with its gradient.

For each model of a stack, the function also gets that model's tensors in the stack's `given`, as further arguments."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Mean cross-entropy of logits (b, C) and labels (b,), as `torch.nn.CrossEntropyLoss`.

    `smoothing`: the share of each target that is spread evenly over all classes. With class weights (C,) the mean is
    weighted by those of the labels.
    """

    smoothing: float = 0.0

    def __call__(self, logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the loss of a batch; labels -100 count nowhere."""
        return functional.cross_entropy(logits, y, weights, label_smoothing=self.smoothing)


def cross_entropy(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the module's logits."""
    return functional.cross_entropy(module(x), y)


def make_entropy(sgd: Sgd) -> CrossEntropy:
    """Make the cross-entropy of a recipe, without its class weights."""
    return CrossEntropy(sgd.label_smoothing or 0.0)


def make_loss(sgd: Sgd) -> Loss:
    """Make the loss of a recipe; with class weights, these follow a batch as a further argument, (C,)."""
    entropy = make_entropy(sgd)

    def compute_loss(module: nn.Module, x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        return entropy(module(x), y, *weights)

    return compute_loss if sgd.label_smoothing or sgd.class_weights else cross_entropy


def make_loss_of(sgd: Sgd, y: NDArray[np.int64], n_classes: int, processor: torch.device) -> Loss:
    """Make the loss of a recipe for samples with the labels y, whose class weights it holds."""
    loss = make_loss(sgd)
    if not sgd.class_weights:
        return loss
    weights = torch.from_numpy(compute_class_weights(y, n_classes)).to(processor)
    return lambda module, x, labels: loss(module, x, labels, weights)


def compute_class_weights(y: NDArray[np.int64], n_classes: int) -> NDArray[np.float32]:
    """Compute the weights (C,) with which all classes of n samples count the same: n / (classes there * n_c).

    The mean over the samples is 1; a class without samples has weight 0.

    Example:
        >>> [round(float(weight), 3) for weight in compute_class_weights(np.array([0, 0, 0, 2]), 3)]
        [0.667, 0.0, 2.0]
    """
    counts = np.bincount(y, minlength=n_classes)
    present = counts > 0
    weights: NDArray[np.float64] = np.zeros(n_classes)
    weights[present] = len(y) / max(int(present.sum()), 1) / counts[present]
    return weights.astype(np.float32)
