"""FedPer: the base is averaged, the head stays on the device.

Source: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2, with the last
layer as personalization layer; baselines.md section 6.
"""

from __future__ import annotations

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.tensors.layout import HEAD


class FedPer(PersonalLayers[PersonalState]):
    """Each round a device loads the global base, trains base and head together, and sends the base."""

    name = "fedper"
    personal = HEAD
