"""MOON: the shared model's features are drawn to the global model's, and away from the device's own last model's.

Source: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1 and Eq. 3; baselines.md section
20. The last model shapes what is sent, so it learned from D_L alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from edge_agent.learning.objectives import Learns, LossOfOrder
from fedge.models import network as models
from fedge.models.problems.cross_entropy import Loss
from fedge.models.training import Network
from fedge.steps.contract import Result
from fedge.steps.personal.train_moon import TrainMoon
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Layout, Model


def run(device: Device, action: TrainMoon) -> Result:
    """Train the shared model, beside the global and the last one."""
    return train_alone(device, action, lambda w, mine: train_model(device, action, w, mine))


def train_model(device: Device, action: TrainMoon, w: Model, mine: Layers | None) -> Learned:
    """Train the shared model from w on D_L, n >= 1, and keep it; without a last model the loss is the problem's alone.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    device.network.load(w)
    contrast = None if mine is None else Contrast(action, w, mine.model)
    fit(device.network, [device], Recipe(action.sgd, objective=contrast))
    trained = device.network.dump()
    return Learned(trained, kept=trained)


@dataclass(frozen=True, slots=True)
class Contrast:
    """Objective for `Recipe`: the problem's loss + mu times the contrast of features (Eq. 3).

    `last`: the model with which the device's last round ended.
    """

    action: TrainMoon
    w: Model
    last: Model

    @contextmanager
    def __call__(self, learns: Learns, devices: Sequence[Device]) -> Iterator[Loss]:
        """Yield the loss; both other models are fixed, in evaluation mode."""
        assert isinstance(learns, Network)
        others = [Network(learns.task, learns.processor) for _ in range(2)]
        for other, model in zip(others, (self.w, self.last), strict=True):
            other.load(model)
        head = models.get_head(learns.module, learns.layout)
        seen: list[Tensor] = []
        with (
            LossOfOrder(self.action.sgd)(learns, devices) as problem_loss,
            models.listen_to_layers([head], lambda _layer, inputs, _output: seen.append(inputs[0])),
        ):

            def compute_loss(module: nn.Module, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
                loss = problem_loss(module, x, y, *given)
                z = seen.pop()
                with torch.no_grad():
                    z_global, z_last = (other.compute_present_features(x) for other in others)
                return loss + self.action.mu * compute_contrast(z, z_global, z_last, self.action.tau)

            yield compute_loss


def compute_contrast(z: Tensor, z_global: Tensor, z_last: Tensor, tau: float) -> Tensor:
    """Compute the mean of -log(e^(sim(z, z_global)/tau) / (e^(sim(z, z_global)/tau) + e^(sim(z, z_last)/tau))).

    Features (b, D); sim is the cosine.

    Example:
        >>> z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> round(float(compute_contrast(z, 3 * z, other, 0.5)), 4)  # log(1 + e^(-1 / 0.5))
        0.1269
        >>> round(float(compute_contrast(z, other, other, 0.5)), 4)  # log 2: nothing to tell apart
        0.6931
    """
    to_global, to_last = (functional.cosine_similarity(z, other, dim=1) / tau for other in (z_global, z_last))
    return functional.softplus(to_last - to_global).mean()


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """Return the shared model, since the last one only helps to learn."""
    return model
