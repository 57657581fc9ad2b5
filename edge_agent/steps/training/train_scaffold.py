"""SCAFFOLD's local steps, y <- y - rate (g - c_i + c), and the device's next control variate.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1,
lines 7 to 14, option II; baselines.md section 17.
"""

from __future__ import annotations

import numpy as np

from edge_agent.device.device import Device
from edge_agent.device.encoding import send_update
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from edge_agent.learning.reversible import pack_vector, read_vector
from fedge.models.optimizer import Shifted, make_optimizer
from fedge.models.training import to_tensor
from fedge.steps.contract import Result
from fedge.steps.training.train_scaffold import TrainScaffold
from fedge.tensors.layers import Layers, select_params
from fedge.tensors.layout import Codec, Layout, Model


def run(device: Device, action: TrainScaffold) -> Result:
    """Train with control variates; a report that did not count has moved neither side's."""
    return train_alone(device, action, lambda x, mine: learn(device, action, x, mine))


def learn(device: Device, action: TrainScaffold, x: Model, mine: Layers | None) -> Learned:
    """Compute y and c_i+, and send dc = c_i+ - c_i."""
    network, sgd, part = device.network, action.sgd, select_params(device.layout)
    d = device.layout.n_params
    c = np.zeros(d, np.float32) if action.control is None else device.fetch_model(action.control, part).params
    c_i = read_vector(mine, counted=action.counted, n_params=d)
    correction = to_tensor(c - c_i, network.processor)
    network.load(x)
    fit(network, [device], Recipe(sgd, optimizer=lambda _: Shifted(make_optimizer(sgd), correction)))
    y = network.dump()
    k_rate = np.float32(sgd.count_steps(device.data.n_shared) * sgd.learning_rate)
    c_plus = c_i - c + (x.params - y.params) / k_rate  # line 12, option (ii)
    sent = send_update(device, Model(c_plus - c_i, y.buffers, y.counters), part, Codec.FLOAT32)
    return Learned(y, kept=pack_vector(c_plus, c_i, device.order.round, device.layout), report={"control": sent})


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """Return the model itself, since control variates are no layers."""
    return model
