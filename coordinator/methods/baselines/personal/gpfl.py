"""GPFL: a conditional valve makes generic and personal features, guided by embeddings of the classes.

Source: Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning", ICCV 2023; baselines.md section 25. The network of the method has
`fedge.models.layers.valve` in the place of its head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from coordinator.aggregation.protection import explain_no_noise
from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from coordinator.methods.method import Method
from coordinator.methods.parts.cohort import NO_CLUSTERS
from fedge.steps.personal.train_gp import TrainGp
from fedge.wire.messages import NonNegative


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of GPFL. `pull`: lambda, towards the classes' embeddings. `decay`: mu, of valve and embeddings."""

    pull: NonNegative = 0.01
    decay: NonNegative = 0.1


class Gpfl(PersonalLayers[PersonalState]):
    """GPFL: base, valve and embeddings travel; the head and the device's class shares stay."""

    name = "gpfl"
    personal = ("*.own.head.*", "*.own.vector")
    HEAD_CLASS = TrainGp.HEAD_CLASS
    Options: ClassVar[type[Struct]] = Options
    CLASSES = "learns an embedding of each class"
    REFUSED = NO_CLUSTERS | {"dp": explain_no_noise((TrainGp, "update"))}
    add_classes = Method.add_classes

    def make_step(self, state: PersonalState, **common: Any) -> TrainGp:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round."""
        return TrainGp(pull=self.options.pull, decay=self.options.decay, **common)
