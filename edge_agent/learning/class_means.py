"""Training that keeps features near the mean of their class, per device (fedge.md section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedge.models.training import CHUNK, PADDING, Loss

MOST_SAMPLES: Final = CHUNK
"""Of a device, for its means: one forward pass."""


def first_drawn(
    x: NDArray[np.float32], y: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The samples for a device's means: the first that training with the same random numbers would draw."""
    chosen = rng.permutation(len(y))[:MOST_SAMPLES]
    return x[chosen], y[chosen]


def class_means(features: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Mean features (..., C, D) per class, from features (..., m, D), labels (..., m); NaN for classes without samples.

    Samples labelled `PADDING` are ignored. Sums are in float64, means in float32.
    """
    of_class = (labels.unsqueeze(-2) == torch.arange(n_classes, device=labels.device).unsqueeze(-1)).double()
    means: Tensor = of_class @ features.double() / of_class.sum(dim=-1, keepdim=True)
    return means.float()


@contextmanager
def near_class_means(head: nn.Linear, weight: float) -> Iterator[Loss]:
    """Context with the loss cross-entropy + weight * mean over samples and features of (feature - class mean)^2.

    The loss gets the means (C, D) along with a batch. Samples of a class without a mean add nothing to the second term.
    """
    seen: list[Tensor] = []

    def loss(module: nn.Module, x: Tensor, y: Tensor, means: Tensor) -> Tensor:
        entropy = functional.cross_entropy(module(x), y)
        features, goals, real = seen.pop(), means[y.clamp(min=0)], (y != PADDING).unsqueeze(-1)
        away = torch.where(goals.isnan() | ~real, 0.0, features - goals)
        return entropy + weight * away.square().sum() / (real.sum() * features.shape[-1])

    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield loss
    finally:
        hook.remove()
