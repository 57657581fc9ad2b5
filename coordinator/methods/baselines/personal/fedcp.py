"""FedCP: for each sample a policy divides the features between a shared head and one of the device's own.

Source: Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
Policy", KDD 2023; baselines.md section 24. The network of the method has `fedge.models.layers.policy` in
the place of its head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_cp import TrainCp
from fedge.wire.messages import NonNegative


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedCP. `mmd`: lambda, weight of the distance between features and those of the global base."""

    mmd: NonNegative = 5.0


class FedCp(PersonalLayers[PersonalState]):
    """FedCP: base, policy and shared head travel; the own head stays."""

    name = "fedcp"
    personal = ("*.own.head.*", "*.own.vector")
    HEAD_CLASS = TrainCp.HEAD_CLASS
    Options: ClassVar[type[Struct]] = Options
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainCp, "update"))}
    add_classes = Method.add_classes

    def make_step(self, state: PersonalState, **common: Any) -> TrainCp:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round."""
        return TrainCp(mmd=self.options.mmd, **common)
