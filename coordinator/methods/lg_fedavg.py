"""LG-FedAvg: the other way round, the head is averaged, the base stays on the device.

Source: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020,
Algorithm 1; pm_moe.md section 4.
"""

from __future__ import annotations

from typing import ClassVar

from coordinator.methods.keeping import Keeping, KeepingState
from fedge.messages import KeepPart, Part


class LgFedAvg(Keeping[KeepingState]):
    """Each round a device loads the global head, trains base and head together, and sends the head."""

    name = "lg-fedavg"
    kind = KeepingState
    part: ClassVar[Part] = Part.HEAD

    def keep(self, state: KeepingState) -> KeepPart:  # noqa: ARG002 - always the same
        """The base."""
        return KeepPart(private=Part.BASE)
