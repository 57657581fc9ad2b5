"""FedDyn's local training: a risk that changes with the rounds, so that its minima approach that of all devices.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1; baselines.md
section 18. From theta_0, the model of the server, and g, its local gradient, the device seeks the minimum of

    F_i(theta) - <g, theta> + alpha / 2 |theta - theta_0|^2

with the recipe of the order, and then keeps g <- g - alpha (theta - theta_0).
"""

from __future__ import annotations

import msgspec
import numpy as np

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from edge_agent.learning.reversible import pack_vector, read_vector
from fedge.models.optimizer import Shifted, make_optimizer
from fedge.models.training import to_tensor
from fedge.steps.contract import Result
from fedge.steps.training.train_feddyn import TrainFedDyn
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Layout, Model


def run(device: Device, action: TrainFedDyn) -> Result:
    """Train with both terms; a report that did not count has moved neither side."""
    return train_alone(device, action, lambda start, mine: learn(device, action, start, mine))


def learn(device: Device, action: TrainFedDyn, start: Model, mine: Layers | None) -> Learned:
    """Compute theta, of which the change is sent, and the next g."""
    network = device.network
    gradient = read_vector(mine, counted=action.counted, n_params=device.layout.n_params)
    sgd = msgspec.structs.replace(action.sgd, proximal_mu=action.alpha)
    anchor, shift = (to_tensor(vector, network.processor) for vector in (start.params, -gradient))
    network.load(start)
    fit(network, [device], Recipe(sgd, optimizer=lambda _: Shifted(make_optimizer(sgd, anchor), shift)))
    trained = network.dump()
    after = gradient - np.float32(action.alpha) * (trained.params - start.params)
    return Learned(trained, kept=pack_vector(after, gradient, device.order.round, device.layout))


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """Return the model itself, since a gradient is no layer."""
    return model
