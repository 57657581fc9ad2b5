"""Training that keeps each sample's features near the device's mean features of its class (fedge.md section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_agent.device.device import Device
from edge_agent.learning.objectives import stack_class_weights
from fedge.models import network as models
from fedge.models.problems.cross_entropy import CrossEntropy, Loss, make_entropy
from fedge.models.problems.losses import PADDING
from fedge.models.training import CHUNK, Network, Stack, pad_samples, to_tensor
from fedge.steps.sgd import Sgd

PLAIN: Final = CrossEntropy()
MOST_SAMPLES: Final = CHUNK
"""Most samples from which a device's class means are computed; they fit in one forward pass."""


@dataclass(frozen=True, slots=True)
class NearClassMeans:
    """Objective for `edge_agent.learning.frame.Recipe`: cross-entropy, and a term that draws features to class means.

    `weight`: weight of that term. `sgd`: the order's recipe, which says what cross-entropy.
    """

    weight: float
    sgd: Sgd

    @contextmanager
    def __call__(self, learns: Network | Stack, devices: Sequence[Device]) -> Iterator[Loss]:
        """Compute each device's class means with its present weights, and yield the loss that uses these means."""
        drawn = [draw_samples(*device.data.shared, device.make_rng()) for device in devices]
        x, y = (
            to_tensor(own, learns.processor) for own in (pad_samples(drawn) if isinstance(learns, Stack) else drawn[0])
        )
        with torch.inference_mode():
            means = compute_class_means(learns.compute_present_features(x), y, devices[0].task.n_classes)
        learns.given = (means.clone(), *stack_class_weights(self.sgd, learns, devices))
        try:
            entropy = make_entropy(self.sgd)
            with make_means_loss(models.get_head(learns.module, learns.layout), self.weight, entropy) as loss:
                yield loss
        finally:
            learns.given = ()


def draw_samples(
    x: NDArray[np.float32], y: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the samples for a device's class means: the first that training with `rng` would draw."""
    chosen = rng.permutation(len(y))[:MOST_SAMPLES]
    return x[chosen], y[chosen]


def compute_class_means(features: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Compute each class's mean features, (..., C, D), from features (..., m, D) and labels (..., m).

    The mean of a class without samples is NaN. Samples labelled `PADDING` are ignored. Sums are in float64, class means
    in float32.
    """
    of_class = (labels.unsqueeze(-2) == torch.arange(n_classes, device=labels.device).unsqueeze(-1)).double()
    means: Tensor = of_class @ features.double() / of_class.sum(dim=-1, keepdim=True)
    return means.float()


@contextmanager
def make_means_loss(head: nn.Linear, weight: float, measure: CrossEntropy = PLAIN) -> Iterator[Loss]:
    """Yield the loss: cross-entropy + weight * (average over samples and features of (feature - class mean)^2).

    The loss takes the class means (C, D) besides a batch, and class weights (C,) if there are any. Samples whose class
    has no mean add 0 to the second term. `measure`: the cross-entropy.
    """
    seen: list[Tensor] = []

    def compute_loss(module: nn.Module, x: Tensor, y: Tensor, means: Tensor, *weights: Tensor) -> Tensor:
        entropy = measure(module(x), y, *weights)
        features, goals, real = seen.pop(), means[y.clamp(min=0)], (y != PADDING).unsqueeze(-1)
        away = torch.where(goals.isnan() | ~real, 0.0, features - goals)
        return entropy + weight * away.square().sum() / (real.sum() * features.shape[-1])

    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield compute_loss
    finally:
        hook.remove()
