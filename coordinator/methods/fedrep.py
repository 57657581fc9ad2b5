"""FedRep: as FedPer, but the device trains its head first, with the base frozen, and then the base alone.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1;
pm_moe.md section 4. A device takes `head_steps` more steps in a round than in other methods.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from coordinator.methods import MethodSettings, options_of
from coordinator.methods.fedavg import FedAvgOptions
from coordinator.methods.keeping import Keeping, KeepingState
from fedge.messages import KeepPart, Part


class FedRepOptions(FedAvgOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`head_steps`: steps of the head before those of the base, also with `--local-epochs` (E_h, there in epochs)."""

    head_steps: Annotated[int, Meta(ge=1)] = 10


class FedRep(Keeping[KeepingState]):
    """The base travels; head and base learn one after the other."""

    name = "fedrep"
    kind = KeepingState
    part: ClassVar[Part] = Part.BASE
    Options: ClassVar[type[FedAvgOptions]] = FedRepOptions

    def __init__(self, settings: MethodSettings) -> None:
        super().__init__(settings)
        self.head_steps = options_of(settings, FedRepOptions).head_steps

    def keep(self, state: KeepingState) -> KeepPart:  # noqa: ARG002 - always the same
        """The head, trained alone at first."""
        return KeepPart(private=Part.HEAD, head_steps=self.head_steps)
