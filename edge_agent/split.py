"""Model split: a part of the model is averaged, the other part stays on the device (pm_moe.md section 4).

FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. LG-FedAvg: Liang et al., "Think
Locally, Act Globally", 2020. FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021, Algorithm 1.

All of it learns from D_L: the private part shapes the gradient of the shared one, so what the private part had learned
from a sensitive sample would show in the upload. FedRep's head takes steps of SGD, not epochs.
"""

from __future__ import annotations

import numpy as np

from edge_agent.outcome import Stop
from edge_agent.private_model import Samples
from fedge.messages import KeepPart, Part, Sgd
from fedge.models.training import Network, Trainer, never
from fedge.tensors import Model, Tensors, unflatten


def learn(
    network: Network,
    start: Model,
    shared: Samples,
    keep: KeepPart,
    sgd: Sgd,
    rng: np.random.Generator,
    stop: Stop = never,
) -> tuple[Model, Tensors]:
    """The trained model, and its private part. FedRep (`head_steps` > 0): first the head alone, then the base alone.

    Running statistics belong to the base and move in both phases.

    Raises:
        ProtocolError: `not-finite`, training diverged.
        ConfigError: the network has no head.
    """
    steps = sgd.steps_for(len(shared[1]))
    network.load(start)
    if keep.head_steps:
        Trainer(network, *shared, sgd, rng, moves=Part.HEAD).run(keep.head_steps, stop)
        Trainer(network, *shared, sgd, rng, moves=Part.BASE).run(steps, stop)
    else:
        Trainer(network, *shared, sgd, rng).run(steps, stop)
    trained = network.dump()
    tensors = unflatten(trained, network.layout)
    return trained, {info.name: tensors[info.name] for info in network.layout.part(keep.private).tensors}
