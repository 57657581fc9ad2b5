"""Ditto: besides the shared model, a personal one that is pulled towards it and never sent.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1;
scmoe_pfl.md section 14. The shared model learns as in FedAvg. The personal model v minimises the local loss +
(lambda / 2) ||v - w||^2, where w is the global model at the round's start. It cannot influence the upload, so it learns
from all training samples, including sensitive ones. A device's first v is the first w it receives.
"""

from __future__ import annotations

import msgspec

from edge_agent.device.device import Device
from edge_agent.learning import private_model
from edge_agent.learning.frame import Learned, train_alone
from fedge.models.training import Trainer
from fedge.steps.contract import Result
from fedge.steps.training.train_ditto import TrainDitto
from fedge.tensors.layers import Layers, pasted
from fedge.tensors.layout import Model

overlay = pasted


def run(device: Device, action: TrainDitto) -> Result:
    """Both models, one after the other."""
    return train_alone(device, action, lambda w, mine: learn(device, action, w, mine))


def learn(device: Device, action: TrainDitto, w: Model, mine: Layers | None) -> Learned:
    """The shared model trained from w on D_L, and v trained equally long on all training samples. `mine` None: v is w.

    Raises:
        ProtocolError: `not-finite`, training diverged.
    """
    network, data, sgd = device.network, device.data, action.sgd
    trained = private_model.fit(device, w, data.shared, sgd, sgd.steps_for(data.n_shared))
    before = w if mine is None else mine.model
    network.load(before)
    drawn = msgspec.structs.replace(sgd, proximal_mu=action.proximal_lambda)
    # a separate stream, so that the shared model learns the same whatever is kept
    with device.untimed():
        Trainer(network, *data.training, drawn, device.rng(1), anchor=w.params).run(
            sgd.steps_for(data.n_train), device.stop
        )
    return Learned(trained, private_model.or_before(network.dump, before))
