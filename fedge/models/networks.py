"""The built-in networks: small ones without batch normalisation, which are quick to export, and two of torchvision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedge.data.task import TaskSpec
from fedge.data.text import Text
from fedge.errors import ConfigError
from fedge.models import torchvision_ops
from fedge.models.layers.resnet_moe import ResNetMoE
from fedge.models.weights import RESERVED

Options = Mapping[str, int | float | str | bool]


def mlp(task: TaskSpec) -> nn.Module:
    """Build a perceptron: flatten, linear, ReLU, linear. Option: hidden=32. For digits (8x8, 10 classes) d = 2410."""
    options = _parse_sizes(task, hidden=32)
    hidden = options["hidden"]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(task.input_shape), hidden), nn.ReLU(), *_make_last(task, hidden)
    )


def cnn(task: TaskSpec) -> nn.Module:
    """Build two 3x3 convolutions with ReLU and 2x2 pooling, and a hidden layer. Options: channels=16, hidden=64."""
    options = _parse_sizes(task, channels=16, hidden=64)
    return _make_two_convolutions(task, 3, (options["channels"], 2 * options["channels"]), options["hidden"])


def cnn_fedavg(task: TaskSpec) -> nn.Module:
    """Build two 5x5 convolutions with 32 and 64 channels, and 512 hidden units.

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, §3.
    """
    _parse_sizes(task)
    return _make_two_convolutions(task, 5, (32, 64), 512)


def resnet_moe(task: TaskSpec) -> nn.Module:
    """Build a residual network with routed branches (`resnet_moe`). Options: experts=2 per block, top=1 per sample."""
    options = _parse_sizes(task, experts=2, top=1)
    _require_images(task, 4)
    if options["top"] > options["experts"]:
        raise ConfigError(f"option top of {task.model} is {options['top']}, with {options['experts']} experts")
    return ResNetMoE(task.input_shape, _count_outputs(task), **options)


def mobilenet_v3_small(task: TaskSpec) -> nn.Module:
    """Build torchvision's MobileNetV3-Small, d = 1.53 M for ten classes; below 64 pixels the first stride is 1.

    Source: Howard et al., "Searching for MobileNetV3", ICCV 2019.
    """
    net = _make_torchvision(task, "mobilenet_v3_small")
    first: Any = net.get_submodule("features.0")
    first[0] = _make_first_convolution(task, first[0])
    return net


def resnet_18(task: TaskSpec) -> nn.Module:
    """Build torchvision's ResNet-18, d = 11.2 M for ten classes; below 64 pixels the first stride is 1.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """
    net = _make_torchvision(task, "resnet18")
    net.set_submodule("conv1", _make_first_convolution(task, net.get_submodule("conv1")))
    return net


def unet(task: TaskSpec) -> nn.Module:
    """Build a small U-Net, from images to an output for each pixel. Option: channels=16, doubled at each of two steps.

    Source: Ronneberger et al., "U-Net", MICCAI 2015, with group normalisation in place of none.
    """
    options = _parse_sizes(task, channels=16)
    _require_images(task, 8)
    shape = task.problem.get_output_shape(task.input_shape)
    if shape[1:] != task.input_shape[1:]:
        asked = f"{task.problem.NAME} asks for {shape}"
        raise ConfigError(f"{task.model} gives an output for each pixel, but {asked}: take another network")
    return _UNet(task.input_shape, shape[0], options["channels"])


def autoencoder(task: TaskSpec) -> nn.Module:
    """Build a perceptron with a narrow middle: flatten, hidden, code, hidden, outputs. Options: hidden=64, code=8."""
    options = _parse_sizes(task, hidden=64, code=8)
    hidden, code = options["hidden"], options["code"]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(task.input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, code),
        nn.ReLU(),
        nn.Linear(code, hidden),
        nn.ReLU(),
        *_make_last(task, hidden),
    )


def bag(task: TaskSpec) -> nn.Module:
    """Build a bag of embeddings for tokens (length,): their mean, 0 left out, then linear. Options: width=32, buckets.

    Tokens are below buckets, by default those of the task's texts, or 4096. Source: Joulin et al., "Bag of Tricks for
    Efficient Text Classification", EACL 2017.
    """
    options = _parse_sizes(task, width=32, buckets=(task.preprocessing.text or Text()).buckets)
    if len(task.input_shape) != 1:
        raise ConfigError(f"{task.model} takes texts, or tokens (length,), not {task.input_shape}")
    return nn.Sequential(_Bag(options["buckets"], options["width"]), *_make_last(task, options["width"]))


def _count_outputs(task: TaskSpec) -> int:
    """Return the number of outputs of a network that gives a vector.

    Raises:
        ConfigError: the problem's outputs are no vector.
    """
    shape = task.problem.get_output_shape(task.input_shape)
    if len(shape) != 1:
        raise ConfigError(
            f"{task.model} gives a vector, but {task.problem.NAME} asks for {shape}: take another network"
        )
    return shape[0]


NETWORKS: Final[dict[str, Callable[[TaskSpec], nn.Module]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn_fedavg": cnn_fedavg,
    "resnet_moe": resnet_moe,
    "mobilenet-v3-small": mobilenet_v3_small,
    "resnet-18": resnet_18,
    "unet": unet,
    "autoencoder": autoencoder,
    "bag": bag,
}
_SMALL: Final = 64
"""Side in pixels below which the first stride is 1; torchvision's networks are made for 224 and shrink images much."""


def _make_torchvision(task: TaskSpec, name: str) -> nn.Module:
    """Make one of torchvision's networks.

    Raises:
        ConfigError: an option or the input is wrong, or torchvision is not installed.
    """
    _parse_sizes(task)
    _require_images(task, 8)
    torchvision_ops.declare_operators()
    try:
        from torchvision import models  # seconds
    except ModuleNotFoundError as error:
        raise ConfigError(f"{task.model} is a network of torchvision: pip install 'fedge[vision]'") from error
    net: nn.Module = getattr(models, name)(num_classes=_count_outputs(task))
    return net


def _make_first_convolution(task: TaskSpec, usual: Any) -> nn.Conv2d:
    """Make the first convolution, for any number of channels and for small images."""
    channels, *sides = task.input_shape
    stride = 1 if min(sides) < _SMALL else 2
    return nn.Conv2d(channels, usual.out_channels, usual.kernel_size, stride, usual.padding, bias=False)


def _make_two_convolutions(task: TaskSpec, kernel: int, channels: tuple[int, int], hidden: int) -> nn.Module:
    _require_images(task, 4)
    n_channels, height, width = task.input_shape
    return nn.Sequential(
        nn.Conv2d(n_channels, channels[0], kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels[0], channels[1], kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels[1] * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        *_make_last(task, hidden),
    )


def _make_last(task: TaskSpec, hidden: int) -> list[nn.Module]:
    """Make the last layers, from hidden units to outputs of the problem's shape."""
    shape = task.problem.get_output_shape(task.input_shape)
    last = nn.Linear(hidden, math.prod(shape))
    return [last] if len(shape) == 1 else [last, nn.Unflatten(1, shape)]


def _require_images(task: TaskSpec, side: int) -> None:
    shape = task.input_shape
    if len(shape) != 3 or min(shape[1:]) < side:
        raise ConfigError(f"{task.model} needs images (channels, height >= {side}, width >= {side}), not {shape}")


def _parse_sizes(task: TaskSpec, **defaults: int) -> dict[str, int]:
    """Return a network's options, which are positive whole numbers; missing ones come from `defaults`."""
    if unknown := set(task.model_options) - {*defaults, *RESERVED}:
        raise ConfigError(f"{task.model} has no option {sorted(unknown)}; it has {sorted(defaults)}")
    sizes: dict[str, int] = {}
    for name, default in defaults.items():
        value = task.model_options.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"option {name} of {task.model} must be a whole number from 1 on, not {value!r}")
        sizes[name] = value
    return sizes


_GROUPS = 4
"""Groups of channels that are normalised together; running statistics would be averaged over devices."""


class _Bag(nn.Module):
    """The mean embedding, (n, width), of tokens (n, length); 0 counts nowhere."""

    def __init__(self, n_buckets: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_buckets, width)
        nn.init.uniform_(self.embedding.weight, -1 / width, 1 / width)  # as in the paper's code: rare tokens say little

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.long().clamp(0, self.embedding.num_embeddings - 1)
        there = (tokens > 0).to(x.dtype).unsqueeze(-1)
        mean: Tensor = (self.embedding(tokens) * there).sum(dim=1) / there.sum(dim=1).clamp(min=1)
        return mean


class _UNet(nn.Module):
    """Images (n, channels, H, W) to outputs (n, n_outputs, H, W), H and W at least 8."""

    def __init__(self, input_shape: tuple[int, ...], n_outputs: int, channels: int) -> None:
        super().__init__()
        self.sides = input_shape[1:]
        self.first = _make_unet_block(input_shape[0], channels)
        self.second = _make_unet_block(channels, 2 * channels)
        self.middle = _make_unet_block(2 * channels, 4 * channels)
        self.fourth = _make_unet_block(6 * channels, 2 * channels)
        self.fifth = _make_unet_block(3 * channels, channels)
        self.last = nn.Conv2d(channels, n_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of a batch."""
        height, width = self.sides
        high = self.first(x)
        low = self.second(functional.max_pool2d(high, 2))
        middle = self.middle(functional.max_pool2d(low, 2))
        low = self.fourth(torch.cat([low, _repeat_pixels(middle, height // 2, width // 2)], dim=1))
        high = self.fifth(torch.cat([high, _repeat_pixels(low, height, width)], dim=1))
        out: Tensor = self.last(high)
        return out


def _make_unet_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(min(_GROUPS, after), after), nn.ReLU())


def _repeat_pixels(x: Tensor, height: int, width: int) -> Tensor:
    """Repeat rows and columns twice, and the last ones until the size is right."""
    return functional.interpolate(x, size=(height, width), mode="nearest")
