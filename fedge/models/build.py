"""Builds a task's network, and refuses one that cannot take part."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

from fedge.data.task import INPUT, LOGITS, TaskSpec
from fedge.errors import ConfigError
from fedge.models import torchvision_ops
from fedge.models.layers.policy import PolicyHead
from fedge.models.layers.valve import ValveHead
from fedge.models.network import dump_model, find_head_name, iterate_tensors, make_layout, make_tensor_info
from fedge.models.networks import NETWORKS
from fedge.models.weights import ADAPT, log_fresh_head
from fedge.system.loading import FAILURES, describe_error, load_object
from fedge.system.moved import alias_names
from fedge.system.text import suggest_nearest
from fedge.tensors.layout import NO_HEAD, Layout, Model

HEADS: Final[Mapping[str, Callable[..., nn.Module]]] = {"policy": PolicyHead, "valve": ValveHead}
"""What fedge's methods put in the place of a network's head, by the name in a task's `head_class`."""


def make_network(task: TaskSpec) -> nn.Module:
    """Make the task's network, with weights from torch's global generator or, if adapted, the given ones.

    A user's factory is called with the task, or without arguments if it takes none; a module class works, too. A module
    passed in Python is copied with its weights.

    Raises:
        ConfigError: the network is unknown, an option is wrong, the user's factory fails or returns no module, or the
            task's weights are missing or do not fit.
    """
    return _replace_head(_make_adapted(task), task)


def _make_adapted(task: TaskSpec) -> nn.Module:
    """Make the task's network with the head of its own."""
    module = _make_plain(task)
    if ADAPT not in task.model_options:
        return module
    from fedge.models import adapters

    adapters.load_initial_weights(module, task)
    adapters.adapt_network(module, task)
    return module


def _replace_head(module: nn.Module, task: TaskSpec) -> nn.Module:
    """Put a module that takes features (n, D) and gives logits (n, C) in the place of the head, made of the head."""
    if not task.head_class:
        return module
    name = find_head_name(module, task)
    if name is None:
        raise ConfigError(NO_HEAD)
    head = module.get_submodule(name)
    kind = HEADS.get(task.head_class) or load_object(task.head_class)
    try:
        other = kind(head)
    except FAILURES as error:
        raise ConfigError(f"{task.head_class} fails with {describe_error(error)}") from error
    if not isinstance(other, nn.Module):
        raise ConfigError(f"{task.head_class} returned {type(other).__name__}, not a torch.nn.Module")
    module.set_submodule(name, other)
    require_usable(module, task)
    return module


def _make_plain(task: TaskSpec) -> nn.Module:
    if ":" not in task.model:
        if task.model not in NETWORKS:
            hint = suggest_nearest(task.model, NETWORKS)
            raise ConfigError(
                f"unknown model {task.model}{hint}: use one of {', '.join(NETWORKS)}, or package.module:factory"
            )
        return NETWORKS[task.model](task)
    torchvision_ops.declare_operators()
    factory = load_object(task.model)
    try:
        module = copy.deepcopy(factory) if isinstance(factory, nn.Module) else _call(factory, task)
    except FAILURES as error:
        raise ConfigError(f"{task.model} fails with {describe_error(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{task.model} returned {type(module).__name__}, not a torch.nn.Module")
    require_usable(module, task)
    return module


def require_usable(module: nn.Module, task: TaskSpec) -> None:
    """Refuse a network whose tensors cannot be sent, averaged and put back by name.

    Raises:
        ConfigError: the network is scripted or compiled; its state holds something else than tensors; or a tensor has
            no shape yet, has no elements, has a wrong type or a name that graphs use, shares its memory with another
            tensor, or is not in main memory.
    """
    for name, layer in module.named_modules():
        if (maker := _find_maker(layer)) is not None:
            what = f"its layer {name}" if name else "it"
            raise ConfigError(f"{task.model}: {what} was made by {maker}: give the torch.nn.Module that it was made of")
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            what = f"its state has {name}, a {type(value).__name__}, and only tensors are sent"
            do = "keep it in a buffer (register_buffer), not in get_extra_state, and train before you quantise"
            raise ConfigError(f"{task.model}: {what}: {do}")
    places: dict[int, str] = {}
    for name, tensor in iterate_tensors(module):
        if (fault := _explain_fault(name, tensor)) is not None:
            raise ConfigError(f"{task.model}: tensor {name} {fault}")
        if (other := places.setdefault(tensor.data_ptr(), name)) != name:
            do = "assign the parameter itself, as in self.b.weight = self.a.weight, or copy it with clone()"
            raise ConfigError(f"{task.model}: tensors {other} and {name} share their memory, but are two: {do}")


def _explain_fault(name: str, tensor: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor and what to do, or None. Raises ConfigError if its type is wrong."""
    if nn.parameter.is_lazy(tensor):
        do = "name the sizes, as in torch.nn.Linear(64, 32) instead of LazyLinear(32)"
        return f"is lazy, it has no shape before the first input: {do}"
    if not tensor.numel():
        return f"of shape {tuple(tensor.shape)} has no elements: leave it out, or check the sizes of its layer"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}: make the network on the cpu; --train-on says where it learns"
    if name in {INPUT, LOGITS}:
        return f"is called as the input or the output of graphs ({INPUT}, {LOGITS}): give it another name"
    make_tensor_info(name, tensor, "")
    return None


def _find_maker(layer: nn.Module) -> str | None:
    """Return the name of the function that made a layer impossible to inspect or export, or None."""
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


def make_initial_model(task: TaskSpec, seed: int) -> tuple[Layout, Model]:
    """Return layout and initial weights of the task's network; equal seeds give equal bytes.

    Raises:
        ConfigError: as for `make_network`; also if a weight is NaN or infinite.
    """
    from fedge.models import adapters

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _make_adapted(task)
        if ADAPT not in task.model_options:
            adapters.load_initial_weights(module, task)
        module = _replace_head(module, task)
    layout = make_layout(module, find_head_name(module, task))
    log_fresh_head(task, layout)
    if wrong := [name for name, own in iterate_tensors(module) if own.is_floating_point() and not own.isfinite().all()]:
        raise ConfigError(
            f"{task.model} begins with NaN or infinity in {', '.join(wrong[:4])}: initialise these weights, or give "
            "weights that are finite"
        )
    return layout, dump_model(module, layout)


__getattr__ = alias_names(__name__, build="make_network")
