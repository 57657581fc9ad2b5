"""pFedMe: a personal model per device that the Moreau envelope of its loss ties to the shared one.

Source: T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1, with
beta = 1; baselines.md section 14. A device takes `inner_steps` times as many steps in a round as in FedAvg.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_pfedme import InnerSteps, Positive, TrainPFedMe


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of pFedMe.

    `inner_steps`: K, steps of the personal model for one of the shared. `moreau_lambda`: lambda, strength of the tie.
    `outer_rate`: eta, rate of the shared model.
    """

    inner_steps: InnerSteps = 5
    moreau_lambda: Positive = 15.0
    outer_rate: Positive = 0.05


class PFedMe(PersonalLayers[PersonalState]):
    """pFedMe: FedAvg of w_{i,R}, while theta_{i,R} stays on device i and predicts there."""

    name = "pfedme"
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainPFedMe, "update"))}

    def make_step(self, state: PersonalState, **common: Any) -> TrainPFedMe:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which theta learns and w_i follows it."""
        own = {name: getattr(self.options, name) for name in self.options.__struct_fields__}
        return TrainPFedMe(**common, **own)
