"""LG-FedAvg: the other way round, the head is averaged, the base stays on the device.

Source: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020,
Algorithm 1; baselines.md section 8.
"""

from __future__ import annotations

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.tensors.layout import BASE


class LgFedAvg(PersonalLayers[PersonalState]):
    """Each round a device loads the global head, trains base and head together, and sends the head."""

    name = "lg-fedavg"
    personal = BASE
