"""Objectives: what the models of one or several devices minimise, for `edge_agent.learning.frame.Recipe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from edge_agent.device.device import Device
from fedge.models.problems.cross_entropy import Loss, compute_class_weights, cross_entropy
from fedge.models.problems.losses import make_loss
from fedge.models.training import Network, Stack, to_tensor
from fedge.steps.sgd import Sgd

Learns = Network | Stack
"""The models that learn: one, or several side by side."""
Objective = Callable[[Learns, Sequence[Device]], AbstractContextManager[Loss]]
"""(what learns, its devices) -> a context with the loss; the present weights are those of the start."""


def use_cross_entropy(_: Learns, __: Sequence[Device]) -> AbstractContextManager[Loss]:
    """Return a context with plain mean cross-entropy, whatever the order's recipe says of the loss."""
    return nullcontext(cross_entropy)


@dataclass(frozen=True, slots=True)
class LossOfOrder:
    """The objective of most steps: the loss of an order's recipe, with the class weights of each device."""

    sgd: Sgd

    @contextmanager
    def __call__(self, learns: Learns, devices: Sequence[Device]) -> Iterator[Loss]:
        """Yield the loss; what learns holds the class weights meanwhile."""
        learns.given = stack_class_weights(self.sgd, learns, devices)
        try:
            yield make_loss(learns.task.problem, self.sgd)
        finally:
            learns.given = ()


def stack_class_weights(sgd: Sgd, learns: Learns, devices: Sequence[Device]) -> tuple[Tensor, ...]:
    """Return the class weights of D_L, (C,), or (n, C) for a stack; nothing if the recipe has no class weights."""
    if not sgd.class_weights:
        return ()
    rows = [compute_class_weights(device.data.shared[1], device.task.n_classes) for device in devices]
    return (to_tensor(np.stack(rows) if isinstance(learns, Stack) else rows[0], learns.processor),)
