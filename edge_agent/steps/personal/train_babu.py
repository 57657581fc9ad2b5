"""FedBABU: train the base alone, under the head of the common initial model.

Source: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1;
baselines.md section 12.
"""

from __future__ import annotations

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone
from fedge.steps.contract import Result
from fedge.steps.personal.train_babu import TrainBabu
from fedge.tensors.layout import Model


def run(device: Device, action: TrainBabu) -> Result:
    """Train the base on D_L."""
    return train_alone(device, action, lambda start, _: train_base(device, action, start))


def train_base(device: Device, action: TrainBabu, start: Model) -> Learned:
    """Train the base of `start` on D_L, n >= 1; its head stays.

    Raises:
        ProtocolError: `not-finite`, because training diverged.
    """
    device.network.load(start)
    fit(device.network, [device], Recipe(action.sgd, moves="base"))
    return Learned(device.network.dump())
