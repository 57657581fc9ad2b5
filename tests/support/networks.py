"""Networks of the specifications that are not built in: `package.module:factory` of a task."""

import math

import torch
from torch import nn

from fedge.data.task import TaskSpec


def mlp_64_32(task: TaskSpec) -> nn.Module:
    """Two hidden layers, 64 and 32 (pm_moe.md section 13); digits: 64-64-32-10."""
    n_inputs = 1
    for extent in task.input_shape:
        n_inputs *= extent
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(n_inputs, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, task.n_classes),
    )


def without_head(task: TaskSpec) -> nn.Module:
    """Normalised outputs: no linear layer comes last, so that the network has no head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(6, task.n_classes), nn.LayerNorm(task.n_classes))


def without_bias(task: TaskSpec) -> nn.Module:
    """One linear layer alone: there is no head that could be split off."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), task.n_classes, bias=False))


def normed(task: TaskSpec) -> nn.Module:
    """With running statistics and a counter."""
    n_inputs = math.prod(task.input_shape)
    return nn.Sequential(nn.Linear(n_inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, task.n_classes))


def noisy(task: TaskSpec) -> nn.Module:
    """With running statistics, a counter, and random numbers of its own."""
    n_inputs = math.prod(task.input_shape)
    normal = nn.Sequential(nn.Flatten(), nn.Linear(n_inputs, 16), nn.BatchNorm1d(16), nn.ReLU())
    return nn.Sequential(*normal, nn.Dropout(0.3), nn.Linear(16, task.n_classes))


TRAINS_FOR = 12
"""Forward passes in training that a `Tiring` network does: more than a check asks for, fewer than an order."""


class Tiring(nn.Module):
    """A network that no check can see through: a device's first order to train it fails, and each one after it."""

    def __init__(self, task: TaskSpec) -> None:
        super().__init__()
        self.passes = 0
        self.layers = mlp_64_32(task)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and self.passes > TRAINS_FOR:
            raise RuntimeError("it is tired")
        logits: torch.Tensor = self.layers(x)
        return logits


class Unwritable(Tiring):
    """A network that trains, and that cannot be exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise RuntimeError("it cannot be written down")
        logits: torch.Tensor = self.layers(x)
        return logits
