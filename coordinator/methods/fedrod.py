"""FedRoD: the shared model learns with the balanced softmax; a second head on its features stays on the device.

Source: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022;
pm_moe.md section 4. Global prediction: Hd_g(f); personal prediction: Hd_g(f) + Hd_p(f).
"""

from __future__ import annotations

from coordinator.methods.keeping import Keeping, KeepingState
from fedge.messages import KeepHead


class FedRod(Keeping[KeepingState]):
    """Base and global head travel."""

    name = "fedrod"
    kind = KeepingState

    def keep(self, state: KeepingState) -> KeepHead:  # noqa: ARG002 - always the same
        """The second head."""
        return KeepHead()
