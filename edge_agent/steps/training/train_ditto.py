"""Ditto: besides the shared model, a personal model that is pulled towards it and never sent.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1;
scmoe_pfl.md section 14. The shared model learns as in FedAvg. The personal model v minimises the local loss +
(lambda / 2) ||v - w||^2, where w is the global model at the round's start. v cannot influence the upload, so it learns
from all training samples, including sensitive ones. A device's first v is the first w that it receives.
"""

from __future__ import annotations

import msgspec

from edge_agent.device.device import Device
from edge_agent.learning import private_model
from edge_agent.learning.frame import Learned, train_alone
from fedge.models.training import Trainer
from fedge.steps.contract import Result
from fedge.steps.training.train_ditto import TrainDitto
from fedge.tensors.layers import Layers, paste
from fedge.tensors.layout import Model

overlay = paste


def run(device: Device, action: TrainDitto) -> Result:
    """Train both models, one after the other."""
    return train_alone(device, action, lambda w, mine: train_models(device, action, w, mine))


def train_models(device: Device, action: TrainDitto, w: Model, mine: Layers | None) -> Learned:
    """Train the shared model from w on D_L, and v as long on all samples, from w if `mine` is None.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    network, data, sgd = device.network, device.data, action.sgd
    trained = private_model.fit_model(device, w, data.shared, sgd, sgd.count_steps(data.n_shared))
    before = w if mine is None else mine.model
    network.load(before)
    drawn = msgspec.structs.replace(sgd, proximal_mu=action.proximal_lambda)
    # a separate stream, so that the shared model learns the same whatever is kept
    with device.pause_timing():
        Trainer(network, *data.training, drawn, device.make_rng(1), anchor=w.params).run(
            sgd.count_steps(data.n_train), device.stop
        )
    return Learned(trained, private_model.run_or_revert(network.dump, before))
