"""FedRep: as FedPer, but the device trains its head first, with the base frozen, and then the base alone.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1;
baselines.md section 7. A device takes `head_steps` more steps per round than in other methods.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.steps.training.train import Train
from fedge.tensors.layout import HEAD


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedRep. `head_steps`: E_h, SGD steps of the head before the base's, also with `--local-epochs`."""

    head_steps: Annotated[int, Meta(ge=1)] = 10


class FedRep(PersonalLayers[PersonalState]):
    """FedRep: the base travels; head and base learn one after the other."""

    name = "fedrep"
    personal = HEAD
    Options: ClassVar[type[Struct]] = Options

    def make_step(self, state: PersonalState, **common: Any) -> Train:  # noqa: ARG002 - the same in all rounds
        """Make the order of the next round, in which the head is trained alone at first."""
        return Train(head_steps=self.options.head_steps, **common)
