"""FedPer: the base is averaged, the head stays on the device.

Source: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2, with the last
layer as personalization layer; pm_moe.md section 4.
"""

from __future__ import annotations

from typing import ClassVar

from coordinator.methods.keeping import Keeping, KeepingState
from fedge.messages import KeepPart, Part


class FedPer(Keeping[KeepingState]):
    """Each round a device loads the global base, trains base and head together, and sends the base."""

    name = "fedper"
    kind = KeepingState
    part: ClassVar[Part] = Part.BASE

    def keep(self, state: KeepingState) -> KeepPart:  # noqa: ARG002 - always the same
        """The head."""
        return KeepPart(private=Part.HEAD)
