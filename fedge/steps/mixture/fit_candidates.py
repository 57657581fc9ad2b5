"""fedge.md sections 6 and 7: train private and local model, choose the primary expert, report validation losses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Final, Self

import msgspec
from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Starts
from fedge.wire.messages import BlobRef, Count, Role

CANDIDATE_STEPS: Final = 160
"""Of the private model, at most (fedge.md section 6)."""
GridLosses = Annotated[tuple[float, ...], Meta(min_length=16, max_length=16)]


class CandidatesFitted(Result, frozen=True, kw_only=True):
    """Per candidate the 16 sums of validation losses over the grid (T outermost), and m_i."""

    REVEALS: ClassVar = {"losses": Reveals.LOSS, "n_validation": Reveals.COUNT, "cluster": Reveals.CHOICE}
    losses: dict[Role, GridLosses] = {}
    n_validation: Count = 0
    cluster: Annotated[int, Meta(ge=-1)] = -1  # of the primary expert


class FitCandidates(Action, frozen=True, kw_only=True):
    """A request to train private and local model, choose the expert, and report losses over the grid.

    The private model starts from the primary expert, or else from the global model. `tell`: whether to report losses;
    what is fitted is kept for `fit_gate` in any case.
    """

    STEP: ClassVar = "fit_candidates"
    RESULT: ClassVar = CandidatesFitted

    global_model: BlobRef
    experts: Starts = ()
    initial_model: BlobRef
    sgd: Sgd
    local_steps: Count
    tell: bool = True

    def without(self, withheld: Collection[str]) -> Self:
        """Fit all the same, and report nothing."""
        return msgspec.structs.replace(self, tell=self.tell and Reveals.LOSS not in withheld)

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count two trainings, and evaluations of all candidates."""
        looks = (5 + len(self.experts)) * n_val
        return looks + self.sgd.count_passes(CANDIDATE_STEPS + self.local_steps, n_train)

    def check(self, result: CandidatesFitted, task: TaskSpec) -> None:
        """Require the global model's losses, if requested, and none of candidates not offered."""
        offered = {start.cluster for start in self.experts} | {-1}
        require(result.cluster in offered, "an expert that was not offered")
        require(not self.tell or Role.GLOBAL in result.losses, "no losses of the global model")
        require(bool(self.experts) or Role.EXPERT not in result.losses, "losses of an expert without one")
