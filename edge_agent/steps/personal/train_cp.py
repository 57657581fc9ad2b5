"""FedCP: base, policy and own head learn together; the shared head follows the own one when the round ends.

Source: Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
Policy", KDD 2023; baselines.md section 24. The own head shapes the gradient of what is sent, so it learns
from D_L alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from edge_agent.learning.objectives import Learns, LossOfOrder
from fedge.models.layers.policy import PolicyHead
from fedge.models.network import find_layer, listen_to_layers
from fedge.models.problems.cross_entropy import Loss
from fedge.models.training import Network
from fedge.steps.contract import Result
from fedge.steps.personal.train_cp import TrainCp
from fedge.tensors.layers import cut, paste
from fedge.tensors.layout import Model

BANDWIDTHS = (10, 15, 20, 50)
"""Of the kernels whose sum compares features, as in the authors' code."""

overlay = paste
"""The function that puts the device's own head beside the shared one."""


def run(device: Device, action: TrainCp) -> Result:
    """Train for a round."""
    return train_alone(device, action, lambda start, _: train_model(device, action, start))


def train_model(device: Device, action: TrainCp, start: Model) -> Learned:
    """Train from `start` on D_L, n >= 1; keep the own head, and send all else.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    network, layout = device.network, device.layout
    network.load(start)
    head = find_layer(network.module, PolicyHead)
    before = head.shared.weight.detach().clone(), head.shared.bias.detach().clone()
    fit(network, [device], Recipe(action.sgd, objective=NearGlobal(action, start)))
    head.end_round(*before)
    trained = network.dump()
    return Learned(trained, kept=cut(trained, layout, layout.select(action.personal)))


@dataclass(frozen=True, slots=True)
class NearGlobal:
    """Objective for `Recipe`: the problem's loss + `mmd` times the distance of features to the global base's (36)."""

    action: TrainCp
    start: Model

    @contextmanager
    def __call__(self, learns: Learns, devices: Sequence[Device]) -> Iterator[Loss]:
        """Yield the loss; the global base is fixed, in evaluation mode."""
        assert isinstance(learns, Network)
        fixed = Network(learns.task, learns.processor)
        fixed.load(self.start)
        seen: list[Tensor] = []
        heads = [find_layer(network.module, PolicyHead) for network in (learns, fixed)]
        heads[0].generator = torch.Generator(learns.processor).manual_seed(devices[0].seed)
        try:
            with (
                LossOfOrder(self.action.sgd)(learns, devices) as problem_loss,
                listen_to_layers(heads, lambda _layer, inputs, _output: seen.append(inputs[0])),
            ):

                def compute_loss(module: nn.Module, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
                    loss = problem_loss(module, x, y, *given)
                    with torch.no_grad():
                        fixed.compute_outputs(x)
                    f_global, f = seen.pop(), seen.pop()
                    return loss + self.action.mmd * compute_mmd(f, f_global)

                yield compute_loss
        finally:
            heads[0].generator = None


def compute_mmd(f: Tensor, other: Tensor) -> Tensor:
    """Compute the squared maximum mean discrepancy between features (b, D), with a sum of Gaussian kernels.

    Example: a sample each, at distance 2. With K the sum of exp(-4 / (2 width)) = 3.5595 it is 4 + 4 - 2 K.
        >>> f, other = torch.tensor([[0.0]]), torch.tensor([[2.0]])
        >>> round(float(compute_mmd(f, other)), 4)
        0.8809
    """

    def sum_kernels(a: Tensor, b: Tensor) -> Tensor:
        squares = a.pow(2).sum(dim=1)[:, None] + b.pow(2).sum(dim=1) - 2 * a @ b.T
        return torch.stack([torch.exp(-squares / (2 * width)) for width in BANDWIDTHS]).sum(dim=0)

    return (sum_kernels(f, f) + sum_kernels(other, other) - 2 * sum_kernels(f, other)).mean()
