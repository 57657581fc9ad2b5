"""Networks as a user would bring networks of their own: `networks:cnn28`; of the runtime's targets, and of papers."""

from __future__ import annotations

import itertools
import math

from torch import nn

from fedge.data.task import TaskSpec


def cnn28(task: TaskSpec) -> nn.Module:
    """28 x 28 x 1: 5 x 5 convolutions with 32 and 64 channels, unpadded, 2 x 2 pooling; 512 hidden units.

    d = 582,026.
    """
    return nn.Sequential(
        *_convolutions(1, 32, 64), nn.Linear(64 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, task.n_classes)
    )


def cnn32(task: TaskSpec) -> nn.Module:
    """32 x 32 x 3: 5 x 5 convolutions with 64 channels each, unpadded, 2 x 2 pooling; 384 and 192 hidden units.

    d = 797,962.
    """
    return nn.Sequential(
        *_convolutions(3, 64, 64),
        nn.Linear(64 * 5 * 5, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, task.n_classes),
    )


def rn18(task: TaskSpec) -> nn.Module:
    """ResNet-18 for small images: a 3 x 3 stem of width 64 that neither strides nor pools. d = 11,173,962."""
    from torchvision.models import resnet18

    network = resnet18(num_classes=task.n_classes)
    network.conv1 = nn.Conv2d(task.input_shape[0], 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def mlp64(task: TaskSpec) -> nn.Module:
    """The perceptron 64-64-10, on digits."""
    return _perceptron(task, 64)


def mlp64_32(task: TaskSpec) -> nn.Module:
    """64-64-32-10 on digits, 196-64-32-10 on MNIST; the last layer is the head."""
    return _perceptron(task, 64, 32)


def _perceptron(task: TaskSpec, *hidden: int) -> nn.Module:
    sizes = (math.prod(task.input_shape), *hidden)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], task.n_classes))


def _convolutions(n_inputs: int, first: int, second: int) -> list[nn.Module]:
    return [
        nn.Conv2d(n_inputs, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
