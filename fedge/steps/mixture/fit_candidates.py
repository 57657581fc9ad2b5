"""fedge.md sections 6 and 7: train private and local models, choose the primary expert, report validation losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Final, Self

import msgspec
from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Starts
from fedge.wire.messages import BlobRef, Count, Role

CANDIDATE_STEPS: Final = 160
"""Most training steps of the private model (fedge.md section 6)."""
Statistics = Annotated[tuple[float, ...], Meta(min_length=1, max_length=4096)]


class CandidatesFitted(Result, frozen=True, kw_only=True):
    """For each candidate the sums over validation samples from which it is calibrated, and m_i, `n_validation`.

    In classification these are 16 sums of losses over the grid, T outermost (`Problem.compute_statistics`).
    """

    REVEALS: ClassVar = {"losses": Reveals.LOSS, "n_validation": Reveals.COUNT, "cluster": Reveals.CHOICE}
    losses: dict[Role, Statistics] = {}
    n_validation: Count = 0
    cluster: Annotated[int, Meta(ge=-1)] = -1  # cluster of the primary expert


class FitCandidates(Action, frozen=True, kw_only=True):
    """A request to train the private and local models, choose the expert, and report losses over the grid.

    The private model starts from the primary expert or, without one, from the global model. `tell` is whether to report
    losses and the choice. The fitted models are kept for `fit_gate` in any case.
    """

    STEP: ClassVar = "fit_candidates"
    RESULT: ClassVar = CandidatesFitted

    global_model: BlobRef
    experts: Starts = ()
    initial_model: BlobRef
    sgd: Sgd
    local_steps: Count
    tell: bool = True

    @property
    def timed(self) -> bool:
        """Whether the report gives the time of the work, which depends on losses."""
        return self.tell

    def reveals(self) -> Mapping[str, Reveals]:
        """Return what each field reveals, without losses and choice if they are not told."""
        untold = {} if self.tell else dict.fromkeys(("losses", "cluster"), Reveals.NOTHING)
        return {**super().reveals(), **untold}

    def without(self, withheld: Collection[str]) -> Self:
        """Return the action; if losses are withheld, it fits all the same but reports none."""
        return msgspec.structs.replace(self, tell=self.tell and Reveals.LOSS not in withheld)

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count two trainings, and the evaluations of all candidates."""
        looks = (5 + len(self.experts)) * n_val
        return looks + self.sgd.count_passes(CANDIDATE_STEPS + self.local_steps, n_train)

    def check(self, result: CandidatesFitted, task: TaskSpec) -> None:
        """Require the global model's losses, if requested, and no losses of candidates that were not offered."""
        offered = {start.cluster for start in self.experts} | {-1}
        require(result.cluster in offered, "the expert was not offered")
        require(not self.tell or Role.GLOBAL in result.losses, "the losses of the global model are missing")
        require(
            bool(self.experts) or Role.EXPERT not in result.losses,
            "the report has losses of an expert, but none was offered",
        )
        for role, sums in result.losses.items():
            wanted = task.problem.count_statistics(own=not role.is_shared)
            require(len(sums) == wanted, f"{len(sums)} sums of the candidate {role} in place of {wanted}")
