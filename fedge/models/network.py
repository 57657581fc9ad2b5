"""Networks, and the conversion between a network and the vectors of `fedge.tensors`.

A layout lists the parameters in the order of `named_parameters` with the head's last, then the persistent buffers:
float32 ones (running statistics and frozen parameters: "buffer") and int64 ones ("counter"). A tensor shared by two
layers counts once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from fedge.data.task import INPUT, LOGITS, TaskSpec
from fedge.errors import ConfigError
from fedge.models import torchvision_ops
from fedge.models.networks import NETWORKS
from fedge.models.weights import ADAPT, tell_fresh_head
from fedge.system.loading import FAILURES, load_object, reason_of
from fedge.system.text import nearest
from fedge.tensors.layout import HEAD, Layout, Model, TensorInfo, flatten, unflatten

_KINDS = {torch.float32: "buffer", torch.int64: "counter"}
_LAYERS: Final[dict[str, tuple[type[nn.Module], ...]]] = {
    "norm": (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm),  # noqa: SLF001 - torch's own base of them
    "conv": (nn.modules.conv._ConvNd,),  # noqa: SLF001
    "linear": (nn.Linear,),
}


def build(task: TaskSpec) -> nn.Module:
    """The task's network with weights from torch's global generator, or with the given weights if it is adapted.

    A user's factory is called with the task, or without arguments if it takes none; a module class works, too. A module
    passed in Python is copied with its weights.

    Raises:
        ConfigError: the network is unknown, an option is wrong, the user's factory fails or returns no module, or the
            task's weights are missing or do not fit.
    """
    module = _plain(task)
    if ADAPT not in task.model_options:
        return module
    from fedge.models import adapters

    adapters.begin(module, task)
    adapters.adapt(module, task)
    return module


def _plain(task: TaskSpec) -> nn.Module:
    if ":" not in task.model:
        if task.model not in NETWORKS:
            hint = nearest(task.model, NETWORKS)
            raise ConfigError(
                f"unknown model {task.model}{hint}: use one of {', '.join(NETWORKS)}, or package.module:factory"
            )
        return NETWORKS[task.model](task)
    torchvision_ops.declare()
    factory = load_object(task.model)
    try:
        module = copy.deepcopy(factory) if isinstance(factory, nn.Module) else _call(factory, task)
    except FAILURES as error:
        raise ConfigError(f"{task.model} fails with {reason_of(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{task.model} returned {type(module).__name__}, not a torch.nn.Module")
    require_usable(module, task)
    return module


def require_usable(module: nn.Module, task: TaskSpec) -> None:
    """Refuse a network whose tensors cannot be sent, averaged and put back by name.

    Raises:
        ConfigError: it is scripted or compiled, its state holds something else than tensors, or a tensor has no shape
            yet, no elements, a wrong type, a name that graphs use, or its memory in common with another, or is not in
            main memory.
    """
    for name, layer in module.named_modules():
        if (maker := _maker_of(layer)) is not None:
            what = f"its layer {name}" if name else "it"
            raise ConfigError(f"{task.model}: {what} was made by {maker}: give the torch.nn.Module that it was made of")
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            what = f"its state has {name}, a {type(value).__name__}, and only tensors are sent"
            do = "keep it in a buffer (register_buffer), not in get_extra_state, and train before you quantise"
            raise ConfigError(f"{task.model}: {what}: {do}")
    places: dict[int, str] = {}
    for name, tensor in state(module):
        if (fault := _fault(name, tensor)) is not None:
            raise ConfigError(f"{task.model}: tensor {name} {fault}")
        if (other := places.setdefault(tensor.data_ptr(), name)) != name:
            do = "assign the parameter itself, as in self.b.weight = self.a.weight, or copy it with clone()"
            raise ConfigError(f"{task.model}: tensors {other} and {name} share their memory, but are two: {do}")


def _fault(name: str, tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor, and what to do; None: nothing. Raises ConfigError if it has a wrong type."""
    if nn.parameter.is_lazy(tensor):
        do = "name the sizes, as in torch.nn.Linear(64, 32) instead of LazyLinear(32)"
        return f"is lazy, it has no shape before the first input: {do}"
    if not tensor.numel():
        return f"of shape {tuple(tensor.shape)} has no elements: leave it out, or check the sizes of its layer"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}: make the network on the cpu; --train-on says where it learns"
    if name in {INPUT, LOGITS}:
        return f"is called as the input or the output of graphs ({INPUT}, {LOGITS}): give it another name"
    _info(name, tensor, "")
    return None


def _maker_of(layer: nn.Module) -> str | None:
    """What turned a layer into code that nothing can look into or export; None: nothing did."""
    if isinstance(layer, torch.jit._script.RecursiveScriptModule):  # noqa: SLF001 - a traced one can be looked into
        return "torch.jit.script"
    if isinstance(layer, nn.DataParallel):
        return "torch.nn.DataParallel"
    return "torch.compile" if hasattr(layer, "_orig_mod") else None


def _call(factory: Callable[..., object], task: TaskSpec) -> object:
    """Call a factory with the task, or without arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in inspect.signature(factory).parameters.values() if p.kind in kinds and p.default is p.empty]
    return factory(task) if needed else factory()


def initial(task: TaskSpec, seed: int) -> tuple[Layout, Model]:
    """Layout and initial weights of the task's network: equal seeds, equal bytes. Leaves the global generator alone.

    Raises:
        ConfigError: as `build`; or a weight is NaN or infinite.
    """
    from fedge.models import adapters

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build(task)
    if ADAPT not in task.model_options:
        adapters.begin(module, task)
    layout = layout_of(module, head_name(module, task))
    tell_fresh_head(task, layout)
    if wrong := [name for name, own in state(module) if own.is_floating_point() and not own.isfinite().all()]:
        raise ConfigError(
            f"{task.model} begins with NaN or infinity in {', '.join(wrong[:4])}: initialise these weights, or give "
            "weights that are finite"
        )
    return layout, dump(module, layout)


@contextmanager
def listening(layers: Iterable[nn.Module], hear: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Context in which `hear` gets each of these layers with its inputs and output; it may return another output."""
    hooks = [layer.register_forward_hook(hear) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def head_name(module: nn.Module, task: TaskSpec) -> str | None:
    """Find the head: the linear layer that turns features (n, D) into the network's logits (n, C).

    It is identified by behaviour: random numbers in place of its output must come out of the network unchanged. None:
    no such layer that is trainable, used once, and has its own weight and bias. The network is left unchanged.

    Raises:
        ConfigError: the network does not take inputs of the task's shape.
    """
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, layer in module.named_modules():
        own = {f"{name}.weight", f"{name}.bias"}
        if isinstance(layer, nn.Linear) and own <= trainable and _gives_the_logits(layer, module, task):
            return str(name)
    return None


def _gives_the_logits(layer: nn.Linear, module: nn.Module, task: TaskSpec) -> bool:
    if layer.out_features != task.n_classes:
        return False
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((4, *task.input_shape), np.float32))
    wanted = torch.from_numpy(rng.standard_normal((4, task.n_classes), np.float32))
    seen: list[tuple[int, ...]] = []

    def replace(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(inputs[0].shape))
        return wanted if output.shape == wanted.shape else output

    training = module.training
    try:
        with listening([layer], replace), torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = module.eval()(x)
    except FAILURES as error:
        taken = f"(n, {', '.join(map(str, task.input_shape))})"
        raise ConfigError(f"{task.model} does not take inputs {taken}: {reason_of(error)}") from error
    finally:
        module.train(training)
    is_one = isinstance(found, torch.Tensor) and found.shape == wanted.shape
    return is_one and seen == [(4, layer.in_features)] and torch.equal(found, wanted)


def head_of(module: nn.Module, layout: Layout) -> nn.Linear:
    """The head of a network of this layout: its input is the features (n, D), its output the logits (n, C).

    Raises:
        ConfigError: the network has no head.
    """
    weight, _ = layout.select(HEAD).tensors
    head = module.get_submodule(weight.name.rpartition(".")[0])
    assert isinstance(head, nn.Linear)
    return head


def features_and_logits(module: nn.Module, x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's input, (n, D), and the network's output, (n, C), both with gradients.

    Raises:
        ConfigError: the network has no head.
    """
    seen: list[torch.Tensor] = []
    with listening([head_of(module, layout)], lambda _layer, inputs, _output: seen.append(inputs[0])):
        logits: torch.Tensor = module(x)
    return seen[-1], logits


def layout_of(module: nn.Module, head: str | None = None) -> Layout:
    """Names, shapes and kinds of all tensors in a module's state; `head`: from `head_name`.

    Raises:
        ConfigError: a tensor is neither float32 nor an int64 buffer.
    """
    layers = {name: _layer(layer) for name, layer in module.named_modules()}
    if head is not None:
        layers[head] = "head"
    tensors = [_info(name, tensor, layers[name.rpartition(".")[0]]) for name, tensor in state(module)]
    buffers = [info for info in tensors if info.kind != "param"]
    params = sorted((info for info in tensors if info.kind == "param"), key=lambda info: info.layer == "head")
    return Layout(tensors=(*params, *buffers))


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


def aliases(module: nn.Module) -> dict[str, str]:
    """The further names of tensors that have several, each with the name in `state`: layers may share a weight."""
    names = {id(tensor): name for name, tensor in state(module)}
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    found = {name: names[id(tensor)] for each in every for name, tensor in each if id(tensor) in names}
    return {name: first for name, first in found.items() if name != first}


def _layer(layer: nn.Module) -> str:
    """The kind of a layer, as selectors name it."""
    return next((kind for kind, classes in _LAYERS.items() if isinstance(layer, classes)), "")


def _info(name: str, tensor: torch.Tensor, layer: str) -> TensorInfo:
    kind = "param" if tensor.requires_grad and tensor.dtype is torch.float32 else _KINDS.get(tensor.dtype)
    if kind is None:
        raise ConfigError(f"tensor {name} is {tensor.dtype}; a network may have float32 tensors and int64 buffers")
    return TensorInfo(name=name, shape=tuple(tensor.shape), kind=kind, layer=layer)
