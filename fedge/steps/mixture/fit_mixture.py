"""SCMoE-PFL (scmoe_pfl.md sections 10, 11) in one order: the private model, the gate, the bundle."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedge.steps.contract import Action
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Starts
from fedge.wire.messages import BlobRef

GateData = Literal["validation", "training"]
"""The samples from which SCMoE-PFL's gate learns."""
Offset = Literal["never", "untrained"]
"""Case in which the candidates' mean energies are subtracted (section 11.4); "untrained" means too few gate samples."""


class FitMixture(Action, frozen=True, kw_only=True):
    """A request to fit a mixture and write its bundle; no part of it is sent."""

    STEP: ClassVar = "fit_mixture"
    RESULT: ClassVar = Installed
    EXPORTS: ClassVar = True
    TIMED: ClassVar = False

    experts: Starts
    initial_model: BlobRef
    sgd: Sgd  # training of the private model, including its steps
    private_data: Literal["sensitive", "all"] = "all"
    private_start: Literal["initial", "best"] = "best"
    gate: GateData = "validation"
    energy_offset: Offset = "untrained"
    near_best: bool = False  # only new experts within 0.02 of the best, at most 3
    top: Annotated[int, Meta(ge=1, le=64)] = 2

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of each candidate on all samples, and of the private model's training."""
        looks = (2 + len(self.experts)) * (n_train + n_val)
        return looks + self.sgd.count_passes(self.sgd.count_steps(n_train), n_train)
