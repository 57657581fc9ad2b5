"""Networks of the specifications that are not built in: `package.module:factory` of a task."""

import math

from torch import nn

from fedge.task import TaskSpec


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
