"""Networks that start from given weights and of which only a part is trained.

`--adapt` selects which whole layers are trained (`fedge.tensors.layout.Selector`), such as `head`, `head,layer4.*` or
`!norm` (all but the normalisation). The head is always trained. With `lora` or `lora:RANK` the other convolutions and
linear layers each get an adapter. Everything else is frozen and no part of the layout, so it is neither sent nor
averaged, and its running statistics do not change.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; A is frozen at random values as in
Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024 (FFA-LoRA). The mean of the devices'
B A then equals the mean of their B times A, and only half of the numbers are sent.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError, raise_as
from fedge.models import network, weights
from fedge.tensors.layout import Tensors, view_bytes

LORA: Final = "lora"
RANK: Final = 4
LARGE: Final = 2**16
"""Number of a layer's weights from which computing a gradient of W costs more than two further operations."""


class Adapter(nn.Module):
    """A convolution or linear layer with W + B A in place of W; only B (rows, rank) is trained, starting at 0.

    Args:
        layer: the layer, whose weights W (rows, ...) are treated as a matrix (rows, n).
        rank: the rank of B A; at most min(rows, n).
        seed: the seed of A (rank, n), whose numbers are N(0, 1/n).

    In training a large layer adds B A x to W x, so that no gradient of the size of W is computed. A step of ResNet-18
    on 32 samples of 32 x 32 then takes 155 ms instead of 232, and a step of its last stage 33 instead of 83 (one core).
    Otherwise the weights are summed, which ONNX Runtime does once, when it loads the graph.
    """

    a: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear, rank: int, seed: int) -> None:
        super().__init__()
        rows, n = layer.weight.flatten(1).shape
        rank = min(rank, rows, n)
        a = np.random.default_rng(seed).standard_normal((rank, n), np.float32) / np.float32(np.sqrt(n))
        _freeze(layer)
        self.layer = layer
        self.register_buffer("a", torch.from_numpy(a), persistent=False)
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the adapted layer."""
        if not self.training or self.layer.weight.numel() < LARGE or getattr(self.layer, "groups", 1) > 1:
            return self._apply_weights(
                x, self.layer.weight + (self.b @ self.a).view(self.layer.weight.shape), self.layer.bias
            )
        low = self._apply_weights(x, self.a.view(-1, *self.layer.weight.shape[1:]))
        out: Tensor = self.layer(x)
        if isinstance(self.layer, nn.Linear):
            return out + functional.linear(low, self.b)
        return out + functional.conv2d(low, self.b[..., None, None])

    def _apply_weights(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer's output with these weights in place of its own."""
        if isinstance(self.layer, nn.Linear):
            return functional.linear(x, weight, bias)
        out: Tensor = self.layer._conv_forward(x, weight, bias)  # noqa: SLF001 - with any kind of padding
        return out


class StillNorm(nn.Module):
    """BatchNorm with fixed statistics and weights, also in training: x * scale + shift per channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        with torch.no_grad():
            scale = torch.rsqrt(norm.running_var + norm.eps) * (1 if norm.weight is None else norm.weight)
            shift = (0 if norm.bias is None else norm.bias) - norm.running_mean * scale
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (n, channels, ...)."""
        shape = (-1, *(1,) * (x.ndim - 2))
        return x * self.scale.view(shape) + self.shift.view(shape)


def load_initial_weights(module: nn.Module, task: TaskSpec) -> None:
    """Load the weights that a task names into a network, in place; a head for other classes keeps its own.

    Raises:
        ConfigError: the weights are missing or do not fit; the text says which of them.
    """
    ref = weights.find_weights(task)
    if ref is None:
        return
    with raise_as(ConfigError, f"the weights of {task.model} are not a safetensors file", on=ProtocolError):
        known = network.find_aliases(module)
        found = {known.get(name, name): array for name, array in view_bytes(weights.read_weights(ref.digest)).items()}
    own = dict(network.iterate_tensors(module))
    head = network.find_head_name(module, task)
    of_head = {f"{head}.weight", f"{head}.bias"}
    if head is not None and any(_differs(found, own, name) for name in of_head):
        found = {name: array for name, array in found.items() if name not in of_head}
        own = {name: tensor for name, tensor in own.items() if name not in of_head}
    found = {name: _sum_to_grey(array, own[name]) if name in own else array for name, array in found.items()}
    faults = [f"lacks {name}" for name in own if name not in found]
    faults += [f"has {name}, which the network has not" for name in found if name not in own]
    faults += [
        f"{name} is {found[name].dtype}{found[name].shape}, in the network {_get_type(tensor)}{tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in found and (_differs(found, own, name) or found[name].dtype != _get_type(tensor))
    ]
    faults += [f"{name} holds NaN or infinity" for name, array in found.items() if not np.isfinite(array).all()]
    if faults:
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise ConfigError(f"the weights do not fit the network {task.model}: {'; '.join(faults[:4])}{more}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(np.array(found[name])))


def adapt_network(module: nn.Module, task: TaskSpec) -> None:
    """Freeze the layers that are not trained, and add adapters, in place.

    Raises:
        ConfigError: `--adapt` matches no layer of the network, or is invalid.
    """
    patterns = [p.strip() for p in str(task.model_options[weights.ADAPT]).split(",") if p.strip()]
    rank = max((_parse_rank(p) for p in patterns if p.partition(":")[0] == LORA), default=0)
    selector = tuple(p for p in patterns if p.partition(":")[0] != LORA)
    head = network.find_head_name(module, task)
    layout = network.make_layout(module, head)
    chosen = {info.name.rpartition(".")[0] for info in layout.select(selector).tensors} if selector else set()
    if not selector and not rank:
        raise ConfigError("--adapt names nothing: say lora, head, or other layers")
    for number, (name, layer) in enumerate(list(module.named_modules())):
        if name in chosen or name == head:
            continue
        if rank and isinstance(layer, nn.Conv2d | nn.Linear):
            module.set_submodule(name, Adapter(layer, rank, zlib.crc32(f"{number} {name}".encode())))
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:  # noqa: SLF001
            module.set_submodule(name, StillNorm(layer))
        else:
            _freeze(layer)


def _parse_rank(pattern: str) -> int:
    _, colon, number = pattern.partition(":")
    if not colon:
        return RANK
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--adapt {pattern}: the rank is a whole number from 1 on, as in lora:4")
    return int(number)


def _freeze(layer: nn.Module) -> None:
    """Turn the layer's own tensors into constants, outside any layout (`fedge.models.network.iterate_tensors`)."""
    for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        delattr(layer, name)
        layer.register_buffer(name, tensor.detach(), persistent=False)


def _sum_to_grey(array: NDArray[np.generic], tensor: Tensor) -> NDArray[np.generic]:
    """Sum a first convolution's RGB weights for grey input."""
    if array.ndim == 4 and array.shape[1] == 3 and tensor.shape == (array.shape[0], 1, *array.shape[2:]):
        return np.asarray(array.sum(axis=1, keepdims=True, dtype=array.dtype))
    return array


def _differs(found: Tensors, own: dict[str, Tensor], name: str) -> bool:
    return name not in found or found[name].shape != tuple(own[name].shape)


def _get_type(tensor: Tensor) -> np.dtype[np.generic]:
    return np.dtype(np.int64 if tensor.dtype is torch.int64 else np.float32)
