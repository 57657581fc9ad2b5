"""FedRoD: the shared model learns with the balanced softmax; a second head on its features stays on the device.

Source: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022;
baselines.md section 9. Global prediction: Hd_g(f); personal prediction: Hd_g(f) + Hd_p(f).
"""

from __future__ import annotations

from typing import Any

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.training.train_rod import TrainRod


class FedRod(PersonalLayers[PersonalState]):
    """FedRoD: base and global head travel; the second head is kept."""

    name = "fedrod"
    needs_head = True
    CLASSES = "weighs the classes by a balanced softmax"
    REFUSED = NO_CLUSTERS | {
        "class_weights": "its balanced softmax weighs the classes already",
        "dp": explain_no_noise((TrainRod, "update")),
    }

    def make_step(self, state: PersonalState, **common: Any) -> TrainRod:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which both heads learn."""
        return TrainRod(poolable=self.pooled, **common)
