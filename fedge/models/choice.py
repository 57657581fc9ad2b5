"""The network of a task, as a person chooses it: a name or a factory, given weights, and what of it is trained."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.models.weights import ADAPT, SIZE, WEIGHTS, store_weights


def with_network(
    task: TaskSpec, model: str | None = None, weights: Path | None = None, adapt: str | None = None
) -> TaskSpec:
    """Return the task with another network, initial weights and choice of trained layers.

    What another network turns into whole numbers is not scaled (`fedge.models.lookups`).

    Args:
        task: whose own network is used if `model` is None.
        model: as `TaskSpec.model`.
        weights: a safetensors file with the network's tensors by name.
        adapt: see `fedge.models.adapters`; None: everything is trained.

    Raises:
        ConfigError: the file cannot be read, or `adapt` is given without weights.
    """
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
    if model is None or ":" not in model:
        return task
    from fedge.models.lookups import unscale_lookups  # torch: only the network itself shows what it does

    return unscale_lookups(task)
