"""Networks, and the way between a network and the vectors of `fedge.tensors`.

A layout lists the parameters in the order of `named_parameters`, then the persistent buffers: float32 ones (running
statistics and frozen parameters: "buffer") and int64 ones ("counter"). A tensor that two layers share counts once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from fedge.errors import ConfigError
from fedge.loading import load_object
from fedge.models import torchvision_ops
from fedge.models.networks import NETWORKS
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, TensorInfo, flatten, unflatten

_KINDS = {torch.float32: "buffer", torch.int64: "counter"}


def build(task: TaskSpec) -> nn.Module:
    """The task's network with weights from torch's global generator.

    Raises:
        ConfigError: the network is unknown, an option is wrong, or the user's factory does not return a module.
    """
    if ":" not in task.model:
        if task.model not in NETWORKS:
            raise ConfigError(
                f"unknown model {task.model}: use one of {', '.join(NETWORKS)}, or package.module:factory"
            )
        return NETWORKS[task.model](task)
    torchvision_ops.declare()
    module = load_object(task.model)(task)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{task.model} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def initial(task: TaskSpec, seed: int) -> tuple[Layout, Model]:
    """Layout and first weights of the task's network: equal seeds, equal bytes. The global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build(task)
    layout = layout_of(module)
    return layout, dump(module, layout)


def head_of(module: nn.Module) -> nn.Linear:
    """The last layer, as `Layout.part` sees it: its input are the features (n, D), its output the logits (n, C).

    Raises:
        ConfigError: it is no linear layer.
    """
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise ConfigError("the network cannot be split: its last layer must be linear, with weight and bias")
    return layers[-1]


def features_and_logits(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the head, (n, D), and what comes out of the network, (n, C); both have gradients."""
    seen: list[torch.Tensor] = []
    hook = head_of(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits: torch.Tensor = module(x)
    finally:
        hook.remove()
    return seen[-1], logits


def layout_of(module: nn.Module) -> Layout:
    """Names, shapes and kinds of all tensors that make up the state of a module.

    Raises:
        ConfigError: a tensor is neither float32 nor an int64 buffer.
    """
    return Layout(tensors=tuple(_info(name, tensor) for name, tensor in state(module)))


def load(module: nn.Module, model: Model, layout: Layout) -> None:
    """Write the vectors into the module's tensors, in place."""
    arrays = unflatten(model, layout)
    with torch.no_grad():
        for name, tensor in state(module):
            tensor.copy_(torch.tensor(arrays[name]))


def dump(module: nn.Module, layout: Layout) -> Model:
    """The module's tensors as new vectors.

    Raises:
        ProtocolError: `layout` (the module has other tensors) or `not-finite` (training diverged).
    """
    return flatten({name: np.asarray(tensor.detach().cpu()) for name, tensor in state(module)}, layout)


def state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors by name: parameters, then persistent buffers."""
    persistent = module.state_dict().keys()
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    kind = "param" if tensor.requires_grad and tensor.dtype is torch.float32 else _KINDS.get(tensor.dtype)
    if kind is None:
        raise ConfigError(f"tensor {name} is {tensor.dtype}; a network may have float32 tensors and int64 buffers")
    return TensorInfo(name=name, shape=tuple(tensor.shape), kind=kind)
