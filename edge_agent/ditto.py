"""Ditto: beside the shared model a personal one that is drawn to it, and never sent.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1;
scmoe_pfl.md section 14. The shared model learns as in FedAvg. The personal model v minimises the local loss +
(lambda / 2) ||v - w||^2, where w is the global model at the round's start. It has no way into the upload, so it learns
from all training samples, sensitive ones included. A device's first v is the w that it gets first.
"""

from __future__ import annotations

import msgspec
import numpy as np

from edge_agent.outcome import Stop
from edge_agent.private_model import Samples
from fedge.messages import KeepModel, Sgd
from fedge.models.training import Network, Trainer, never
from fedge.tensors import Model, Tensors, flatten, unflatten


def learn(
    network: Network,
    w: Model,
    mine: Tensors | None,
    shared: Samples,
    training: Samples,
    keep: KeepModel,
    sgd: Sgd,
    rngs: tuple[np.random.Generator, np.random.Generator],
    stop: Stop = never,
) -> tuple[Model, Tensors]:
    """The shared model trained from w on D_L, and v, trained as long on all training samples.

    Args:
        network: of the task.
        w: the global model.
        mine: v so far; None: w.
        shared: D_L, n >= 1.
        training: all training samples.
        keep: lambda.
        sgd: of both.
        rngs: of the two.
        stop: checked between batches.

    Raises:
        ProtocolError: `not-finite`, training diverged.
    """
    network.load(w)
    Trainer(network, *shared, sgd, rngs[0]).run(sgd.steps_for(len(shared[1])), stop)
    trained = network.dump()
    network.load(w if mine is None else flatten(mine, network.layout))
    drawn = msgspec.structs.replace(sgd, proximal_mu=keep.proximal_lambda)
    Trainer(network, *training, drawn, rngs[1], anchor=w.params).run(sgd.steps_for(len(training[1])), stop)
    return trained, unflatten(network.dump(), network.layout)
