"""MOON: FedAvg whose devices learn features like the global model's, and unlike those of their own last model.

Source: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1; baselines.md section 20.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_moon import Temperature, TrainMoon
from fedge.wire.messages import NonNegative


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of MOON. `mu`: weight of the contrast; 0 is FedAvg. `tau`: its temperature."""

    mu: NonNegative = 1.0
    tau: Temperature = 0.5


class Moon(PersonalLayers[PersonalState]):
    """MOON: one model for all; what a device keeps of its last round only helps it to learn."""

    name = "moon"
    needs_head = True
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainMoon, "update"))}

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early; no device predicts with what it keeps, so it can."""
        return Method.explain_no_patience(self)

    def make_step(self, state: PersonalState, **common: Any) -> TrainMoon:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round."""
        return TrainMoon(mu=self.options.mu, tau=self.options.tau, **common)

    def find_kept_step(self, state: PersonalState) -> None:
        """Return None, since bundles are made of the global model alone."""
