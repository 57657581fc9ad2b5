"""GPFL: base, valve, class embeddings and the own head learn together; the own head stays.

Source: Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning", ICCV 2023; baselines.md section 25. Head and class shares shape the gradient of what
is sent, so they are of D_L alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from edge_agent.learning.objectives import Learns, LossOfOrder
from fedge.models.layers.valve import ValveHead
from fedge.models.network import find_layer, listen_to_layers
from fedge.models.problems.cross_entropy import Loss
from fedge.models.training import Network, to_tensor
from fedge.steps.contract import Result
from fedge.steps.personal.train_gp import TrainGp
from fedge.tensors.layers import cut, paste
from fedge.tensors.layout import Model

overlay = paste
"""The function that puts the device's own head behind the shared valve."""


def run(device: Device, action: TrainGp) -> Result:
    """Train for a round."""
    return train_alone(device, action, lambda start, _: train_model(device, action, start))


def train_model(device: Device, action: TrainGp, start: Model) -> Learned:
    """Train from `start` on D_L, n >= 1; keep the own head and the class shares, and send all else.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    network, layout = device.network, device.layout
    network.load(start)
    fit(network, [device], Recipe(action.sgd, objective=Guided(action)))
    trained = network.dump()
    return Learned(trained, kept=cut(trained, layout, layout.select(action.personal)))


@dataclass(frozen=True, slots=True)
class Guided:
    """Objective for `Recipe`: the loss of personal features, and those of generic ones (39) with the decay."""

    action: TrainGp

    @contextmanager
    def __call__(self, learns: Learns, devices: Sequence[Device]) -> Iterator[Loss]:
        """Yield the loss; embeddings that condition and attract are those of the start."""
        assert isinstance(learns, Network)
        counts = devices[0].data.count_shared_classes(learns.task.n_classes).astype(np.float32)
        shares = counts / devices[0].data.n_shared
        head = find_layer(learns.module, ValveHead)
        fixed = head.freeze(to_tensor(shares, learns.processor))
        decaying = [head.embeddings, *head.gamma.parameters(), *head.beta.parameters()]
        seen: list[Tensor] = []
        try:
            with (
                LossOfOrder(self.action.sgd)(learns, devices) as problem_loss,
                listen_to_layers([head], lambda _layer, inputs, _output: seen.append(inputs[0])),
            ):

                def compute_loss(module: nn.Module, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
                    loss = problem_loss(module, x, y, *given)
                    generic = head.open_valve(seen.pop(), fixed.mean(dim=0))
                    loss = loss + compute_guidance(generic, head.embeddings, y)
                    away: Tensor = torch.linalg.norm(generic - fixed[y])
                    squares = torch.stack([weights.pow(2).sum() for weights in decaying]).sum()
                    return loss + self.action.pull * away + self.action.decay / 2 * squares

                yield compute_loss
        finally:
            head.frozen = None


def compute_guidance(f: Tensor, embeddings: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the cosines between features (b, D) and embeddings (C, D), labels y (b,).

    Example:
        >>> f, embeddings = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> round(float(compute_guidance(f, embeddings, torch.tensor([0]))), 4)  # log(1 + e^-1)
        0.3133
    """
    cosines = functional.normalize(f) @ functional.normalize(embeddings).T
    return functional.cross_entropy(cosines, y)
