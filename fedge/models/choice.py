"""A person's choice of a task's network: a name or a factory, initial weights, and the layers that are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from fedge.data.augmentation import with_augment
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.models.weights import ADAPT, SIZE, WEIGHTS, store_weights

TOKENS: Final = frozenset({"bag"})
"""Built-in networks whose inputs are whole numbers, which are not scaled."""


def with_network(
    task: TaskSpec,
    model: str | None = None,
    weights: Path | None = None,
    adapt: str | None = None,
    augment: str | None = None,
) -> TaskSpec:
    """Return the task with another network, initial weights, choice of trained layers and augmentation.

    Inputs that another network turns into whole numbers are not scaled (`fedge.models.lookups`).

    Args:
        task: the task, whose own network is used if `model` is None.
        model: the network, as in `TaskSpec.model`.
        weights: a safetensors file with the network's tensors by name.
        adapt: see `fedge.models.adapters`; if None, everything is trained.
        augment: see `fedge.data.augmentation`; if None, that of the task.

    Raises:
        ConfigError: the file cannot be read, `adapt` is given without weights, or a change of samples does not suit.
    """
    task = with_augment(task, augment)
    options = dict(task.model_options) if model is None else {}
    if weights is not None:
        with raise_as(ConfigError, f"--weights {weights} cannot be read"):
            data = weights.read_bytes()
        options |= {WEIGHTS: store_weights(data), SIZE: len(data)}
    if adapt is not None:
        options[ADAPT] = adapt
    task = msgspec.structs.replace(task, model=model or task.model, model_options=options)
    if ADAPT in options and WEIGHTS not in options:
        raise ConfigError("--adapt keeps most of the network as it is: say what it is, with --weights FILE.safetensors")
    if "noise" in (task.augment or ()) and _takes_whole_numbers(task):
        raise ConfigError(
            "the augmentation noise would turn the whole numbers that the network takes into others: leave it out"
        )
    if model in TOKENS:
        return msgspec.structs.replace(task, preprocessing=Preprocessing(text=task.preprocessing.text))
    if model is None or ":" not in model:
        return task
    from fedge.models.lookups import unscale_lookups  # needs torch, since only running the network shows what it does

    return unscale_lookups(task)


def _takes_whole_numbers(task: TaskSpec) -> bool:
    if task.model in TOKENS or ":" not in task.model:
        return task.model in TOKENS
    from fedge.models.lookups import find_lookups

    return bool(find_lookups(task).any())
