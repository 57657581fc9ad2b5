"""FedEPC's extractor from the server's labelled samples, trained in a short-lived child to keep torch out of here.

Source: fedepc.md sections 3 and 4.1. The child is `coordinator.methods.server.extractor_training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.system import child
from fedge.tensors.layout import Model

FEWEST: Final = 5
"""Fewest samples of a class that has a profile (section 4.1)."""


@dataclass(frozen=True, slots=True)
class Extractor:
    """The extractor W_ext, and its profiles (k, q) of the k >= 2 classes with at least 5 samples."""

    model: Model
    class_profiles: NDArray[np.float64]


def require_samples(task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64]) -> None:
    """Refuse samples of the server that cannot give an extractor and a unit.

    Raises:
        ConfigError: the samples do not fit the task, or fewer than two classes have at least 5 samples.
    """
    if x.shape != (len(y), *task.input_shape) or not len(y) or y.min() < 0 or y.max() >= task.n_classes:
        raise ConfigError(f"the labelled samples {x.shape} of the server do not fit task {task.name}")
    if (np.bincount(y) >= FEWEST).sum() < 2:
        raise ConfigError(f"the server needs at least {FEWEST} labelled samples of each of two or more classes")


def train_extractor(task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], *, seed: int) -> Extractor:
    """Train the task's network on the samples, and profile its classes; equal arguments give equal bits.

    Args:
        task: what is learned.
        x: (n, *input_shape) model inputs.
        y: (n,) labels.
        seed: the seed of first weights and batches.

    Raises:
        ConfigError: the child process failed; the text holds its message.
    """
    with raise_as(ConfigError, "no extractor can be trained on the labelled samples of the server", on=ConfigError):
        model, profiles = child.call_once(
            "coordinator.methods.server.extractor_training:train_and_profile",
            task,
            x,
            y,
            seed,
            returns=tuple[Model, NDArray[np.float64]],
        )
    return Extractor(model, profiles)
