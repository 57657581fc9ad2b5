"""APFL: FedAvg, and beside it each device learns a model of its own and how much of it to mix into the shared one.

Source: Deng et al., "Adaptive Personalized Federated Learning", 2020, Algorithm 1; baselines.md section 13. A device
takes twice as many steps in a round as in FedAvg.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_apfl import OwnShare, TrainApfl


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of APFL. `alpha`: share of a device's own model in its first round, from which it learns the rest."""

    alpha: OwnShare = 0.5


class Apfl(PersonalLayers[PersonalState]):
    """APFL: the global model is FedAvg's; the mixture predicts on device i."""

    name = "apfl"
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainApfl, "update"))}

    def make_step(self, state: PersonalState, **common: Any) -> TrainApfl:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which both models and alpha learn."""
        return TrainApfl(alpha=self.options.alpha, **common)
