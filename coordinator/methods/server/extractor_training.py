"""Trains FedEPC's extractor (docs/methods/fedepc.md).

`coordinator.methods.server.extractor` runs this in a separate process, so that the coordinator never imports torch.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.methods.server.extractor import FEWEST
from edge_agent.learning.profile import measure_sparsity
from fedge.data.task import TaskSpec
from fedge.models.build import make_initial_model
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model

EPOCHS: Final = 15  # over the samples, section 8
SGD: Final = Sgd(batch_size=16, learning_rate=0.02, momentum=0.9)
"""Settings of the extractor's training, chosen among six on digits, seeds 0 to 3. Of the settings whose clusters are
right, these separate two groups of five best."""


def train_network(task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], *, seed: int) -> Network:
    """Train the task's network for 15 epochs on n >= 1 samples (n, *input_shape) with labels (n,).

    Raises:
        ConfigError: the network cannot be built.
        ProtocolError: training diverged.
    """
    torch.manual_seed(seed)
    _, first = make_initial_model(task, seed)
    network = Network(task)
    network.load(first)
    steps = -(-EPOCHS * len(y) // min(SGD.batch_size, len(y)))
    Trainer(network, x, y, msgspec.structs.replace(SGD, steps=steps), np.random.default_rng(seed)).run(steps)
    return network


def profile_classes(network: Network, x: NDArray[np.float32], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute the profile (q,) of each class with 5 samples or more, (k, q), by ascending class (section 4.1)."""
    labels, counts = np.unique(y, return_counts=True)
    return np.stack([measure_sparsity(network.module, x[y == c]).shares for c in labels[counts >= FEWEST]])


def train_and_profile(
    task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], seed: int
) -> tuple[Model, NDArray[np.float64]]:
    """Train the extractor, and compute the profiles of single classes.

    Raises:
        FedgeError: the network cannot be built, has no ReLU to measure, or diverged.
    """
    network = train_network(task, x, y, seed=seed)
    return network.dump(), profile_classes(network, x, y)
