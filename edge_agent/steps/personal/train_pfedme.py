"""pFedMe: a personal model per device that the Moreau envelope of its loss ties to the shared one.

Source: T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1;
baselines.md section 14. Theta shapes what is sent, so it learns from D_L alone.
"""

from __future__ import annotations

import msgspec

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, train_alone
from fedge.models.problems.losses import make_loss_of
from fedge.models.training import Trainer, draw_batches
from fedge.steps.contract import Result
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.tensors.layers import paste
from fedge.tensors.layout import Model

overlay = paste
"""The function that puts theta in place of the model that the device is served."""


def run(device: Device, action: TrainPFedMe) -> Result:
    """Train theta and w_i."""
    return train_alone(device, action, lambda w, _: train_models(device, action, w))


def train_models(device: Device, action: TrainPFedMe, w: Model) -> Learned:
    """Return w_{i,R}, whose change is sent, and theta_{i,R}, which is kept, from the global model w.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    network, (x, y), rng = device.network, device.data.shared, device.make_rng()
    sgd = msgspec.structs.replace(action.sgd, proximal_mu=action.moreau_lambda)
    loss = make_loss_of(device.task.problem, sgd, y, network.processor)
    drawn = draw_batches(len(y), sgd.batch_size, rng)
    theta, params = w, w.params
    for _ in range(sgd.count_steps(len(y))):
        batch = next(drawn)
        network.load(theta)
        trainer = Trainer(network, x[batch], y[batch], sgd, rng, anchor=params, loss=loss)
        trainer.run(action.inner_steps, device.stop)  # K steps towards the minimum of f_i + lambda/2 |theta - w_i|^2
        theta = network.dump()
        params = params - action.outer_rate * action.moreau_lambda * (params - theta.params)  # line 8
    return Learned(Model(params, theta.buffers, theta.counters), kept=theta)
