"""Ditto: FedAvg, and beside it each device trains a model of its own that is drawn to the global one.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1;
baselines.md section 5. A device takes twice as many steps in a round as in FedAvg.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.training.train_ditto import TrainDitto


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of Ditto. `proximal_lambda`: lambda, pull to the global model; 0 is training alone."""

    proximal_lambda: Annotated[float, Meta(ge=0)] = 0.1


class Ditto(PersonalLayers[PersonalState]):
    """Ditto: the global model is FedAvg's; v_i predicts on device i and stays on it."""

    name = "ditto"
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainDitto, "update"))}

    def make_step(self, state: PersonalState, **common: Any) -> TrainDitto:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which both models learn."""
        return TrainDitto(proximal_lambda=self.options.proximal_lambda, **common)
