"""FedBABU: only the base learns in the rounds, under a fixed head; at the end each device fine-tunes the whole.

Source: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1;
baselines.md section 12.
"""

from __future__ import annotations

from typing import Any

from coordinator.aggregation.protection import explain_no_noise
from coordinator.fleet.fleet import Fleet
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.installation import install
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_babu import TrainBabu
from fedge.system.loading import FINE_TUNED
from fedge.tensors.layout import HEAD


class FedBabu(PersonalLayers[PersonalState]):
    """FedBABU: the base travels; the head is that of w_0 until the end."""

    name = "fedbabu"
    personal = HEAD
    REFUSED = NO_CLUSTERS | {
        "dp": explain_no_noise((TrainBabu, "update")),
        FINE_TUNED: "fedbabu ends with the fine-tuning of every device anyway",
    }

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early; devices keep nothing, so it can."""
        return Method.explain_no_patience(self)

    def make_step(self, state: PersonalState, **common: Any) -> TrainBabu:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which the base learns alone."""
        return TrainBabu(**common)

    async def finish(self, state: PersonalState, fleet: Fleet) -> PersonalState:
        """Let every device fine-tune base and head, and install the result."""
        return await install(self, state, fleet, fine_tune=True)
