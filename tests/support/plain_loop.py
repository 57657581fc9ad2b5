"""Gradients of a federation's network in float64, for plain loops that a method is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedge.models.build import make_network
from fedge.models.training import draw_batches
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Layout, Model, unflatten
from tests.support.simulation import Fleet

Vector = NDArray[np.float64]


class Gradients:
    """Gradients on the batches that a device draws in an order to train of a federation of seed 0."""

    def __init__(self, fleet: Fleet, layout: Layout, first: Model) -> None:
        self._fleet, self._layout, self._first = fleet, layout, first
        self._network = make_network(fleet.task)
        self._names = [info.name for info in layout.select_kind("param")]

    def of_round(self, number: int, device: str, sgd: Sgd) -> Iterator[Callable[[Vector], Vector]]:
        """The gradient of each step, as a function of the weights."""
        x, y = (torch.from_numpy(np.array(part)) for part in self._fleet.workers[device].data.shared)
        seed = int.from_bytes(hashlib.sha256(f"0.{number}.train.{device}".encode()).digest()[:6])
        drawn = draw_batches(len(y), sgd.batch_size, np.random.default_rng(seed))
        for _ in range(sgd.steps):
            batch = next(drawn)
            yield lambda weights, batch=batch: self._compute(weights, x[batch], y[batch])  # type: ignore[misc]

    def _compute(self, weights: Vector, x: torch.Tensor, y: torch.Tensor) -> Vector:
        first = self._first
        tensors = unflatten(Model(weights.astype(np.float32), first.buffers, first.counters), self._layout)
        self._network.load_state_dict({name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()})
        self._network.zero_grad()
        functional.cross_entropy(self._network(x), y).backward()
        found = dict(self._network.named_parameters())
        return np.concatenate([found[name].grad.numpy().ravel() for name in self._names]).astype(np.float64)  # type: ignore[union-attr]
