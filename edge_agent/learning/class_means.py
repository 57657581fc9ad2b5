"""Training that keeps features near the mean of their class, per device (fedge.md section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from edge_agent.device.device import Device
from fedge.models import network as models
from fedge.models.training import CHUNK, PADDING, Loss, Network, Stack, padded, tensor

MOST_SAMPLES: Final = CHUNK
"""Of a device, for its means: one forward pass."""


@dataclass(frozen=True, slots=True)
class NearClassMeans:
    """The objective of training (`edge_agent.learning.frame.Recipe`) with this weight of the second term."""

    weight: float

    @contextmanager
    def __call__(self, learns: Network | Stack, devices: Sequence[Device]) -> Iterator[Loss]:
        """Context with the loss, to which each device's means are given, as its present weights make them."""
        drawn = [first_drawn(*device.data.shared, device.rng()) for device in devices]
        x, y = (tensor(own, learns.processor) for own in (padded(drawn) if isinstance(learns, Stack) else drawn[0]))
        with torch.inference_mode():
            means = class_means(learns.features_of(x), y, devices[0].task.n_classes)
        learns.given = (means.clone(),)
        try:
            with near_class_means(models.head_of(learns.module, learns.layout), self.weight) as loss:
                yield loss
        finally:
            learns.given = ()


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
