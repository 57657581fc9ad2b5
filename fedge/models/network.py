"""Networks, and the conversion between a network and the vectors of `fedge.tensors`.

A layout lists the parameters in the order of `named_parameters`, but the head's last, then the persistent buffers. A
float32 buffer (running statistics, frozen parameters) is a "buffer", an int64 buffer is a "counter". A tensor shared by
two layers counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import nn

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.loading import FAILURES, describe_error
from fedge.tensors.layout import HEAD, Layout, Model, TensorInfo, flatten, unflatten

N = TypeVar("N", bound=nn.Module)

_KINDS = {torch.float32: "buffer", torch.int64: "counter"}
_LAYERS: Final[dict[str, tuple[type[nn.Module], ...]]] = {
    "norm": (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm),  # noqa: SLF001 - torch's own base of them
    "conv": (nn.modules.conv._ConvNd,),  # noqa: SLF001
    "linear": (nn.Linear,),
}


@contextmanager
def listen_to_layers(layers: Iterable[nn.Module], hear: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Call `hear` with layer, inputs and output whenever one of these layers runs; `hear` may return another output."""
    hooks = [layer.register_forward_hook(hear) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_layer(module: nn.Module, kind: type[N]) -> N:
    """Return the first layer of a kind, which the network must have."""
    return next(layer for layer in module.modules() if isinstance(layer, kind))


def find_head_name(module: nn.Module, task: TaskSpec) -> str | None:
    """Find the head: the linear layer that turns features (n, D) into the network's logits (n, C).

    It is identified by behaviour: random numbers in place of its output must come out of the network unchanged. Return
    None if no such layer is trainable, used once, and has its own weight and bias. The network is left unchanged.

    Raises:
        ConfigError: the network does not take inputs of the task's shape.
    """
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, layer in module.named_modules():
        own = {f"{name}.weight", f"{name}.bias"}
        if isinstance(layer, nn.Linear) and own <= trainable and _is_head(layer, module, task):
            return str(name)
    return None


def _is_head(layer: nn.Linear, module: nn.Module, task: TaskSpec) -> bool:
    shape = task.problem.get_output_shape(task.input_shape)
    if shape != (layer.out_features,):
        return False
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((4, *task.input_shape), np.float32))
    wanted = torch.from_numpy(rng.standard_normal((4, *shape), np.float32))
    seen: list[tuple[int, ...]] = []

    def replace_output(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(inputs[0].shape))
        return wanted if output.shape == wanted.shape else output

    training = module.training
    try:
        with listen_to_layers([layer], replace_output), torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = module.eval()(x)
    except FAILURES as error:
        taken = f"(n, {', '.join(map(str, task.input_shape))})"
        do = " (a sample is one array: join several, and let forward take them apart)"
        says = describe_error(error) + do * ("positional argument" in str(error))
        raise ConfigError(f"{task.model} does not take inputs {taken}: {says}") from error
    finally:
        module.train(training)
    is_one = isinstance(found, torch.Tensor) and found.shape == wanted.shape
    return is_one and seen == [(4, layer.in_features)] and torch.equal(found, wanted)


def get_head(module: nn.Module, layout: Layout) -> nn.Linear:
    """Return a network's head, which turns the features (n, D) into the logits (n, C).

    Raises:
        ConfigError: the network has no head.
    """
    weight, _ = layout.select(HEAD).tensors
    head = module.get_submodule(weight.name.rpartition(".")[0])
    assert isinstance(head, nn.Linear)
    return head


def compute_features_and_logits(
    module: nn.Module, x: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head's input, (n, D), and the network's output, (n, C), with gradients.

    Raises:
        ConfigError: the network has no head.
    """
    seen: list[torch.Tensor] = []
    with listen_to_layers([get_head(module, layout)], lambda _layer, inputs, _output: seen.append(inputs[0])):
        logits: torch.Tensor = module(x)
    return seen[-1], logits


def make_layout(module: nn.Module, head: str | None = None) -> Layout:
    """Return names, shapes and kinds of all tensors in a module's state; `head` is the name by `find_head_name`.

    Raises:
        ConfigError: a tensor is neither float32 nor an int64 buffer.
    """
    layers = {name: _get_layer_kind(layer) for name, layer in module.named_modules()}
    if head is not None:
        layers[head] = "head"
    tensors = [
        make_tensor_info(name, tensor, layers[name.rpartition(".")[0]]) for name, tensor in iterate_tensors(module)
    ]
    buffers = [info for info in tensors if info.kind != "param"]
    params = sorted((info for info in tensors if info.kind == "param"), key=lambda info: info.layer == "head")
    return Layout(tensors=(*params, *buffers))


def load_model(module: nn.Module, model: Model, layout: Layout) -> None:
    """Write the vectors into the module's tensors, in place."""
    arrays = unflatten(model, layout)
    with torch.no_grad():
        for name, tensor in iterate_tensors(module):
            tensor.copy_(torch.tensor(arrays[name]))


def dump_model(module: nn.Module, layout: Layout) -> Model:
    """Copy the module's tensors into new vectors.

    Raises:
        ProtocolError: `layout` (the module has other tensors) or `not-finite` (training diverged).
    """
    return flatten({name: np.asarray(tensor.detach().cpu()) for name, tensor in iterate_tensors(module)}, layout)


def iterate_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors by name: parameters, then persistent buffers."""
    persistent = module.state_dict().keys()
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def find_aliases(module: nn.Module) -> dict[str, str]:
    """Return further names of shared tensors, each with the tensor's name in `iterate_tensors`."""
    names = {id(tensor): name for name, tensor in iterate_tensors(module)}
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    found = {name: names[id(tensor)] for each in every for name, tensor in each if id(tensor) in names}
    return {name: first for name, first in found.items() if name != first}


def _get_layer_kind(layer: nn.Module) -> str:
    """Return the kind of a layer in selectors, or "" for other layers."""
    return next((kind for kind, classes in _LAYERS.items() if isinstance(layer, classes)), "")


def make_tensor_info(name: str, tensor: torch.Tensor, layer: str) -> TensorInfo:
    """Describe a tensor of a network for its layout. Raises ConfigError if its type cannot be sent."""
    kind = "param" if tensor.requires_grad and tensor.dtype is torch.float32 else _KINDS.get(tensor.dtype)
    if kind is None:
        raise ConfigError(f"tensor {name} is {tensor.dtype}; a network may have float32 tensors and int64 buffers")
    return TensorInfo(name=name, shape=tuple(tensor.shape), kind=kind, layer=layer)
