"""fedge.md sections 9 to 11: fit the gate, do the final fit, choose the guard, and write the bundle."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, UnsetType

from fedge.data.problems.calibration import Calibration
from fedge.steps.contract import Action
from fedge.steps.mixture.fit_candidates import CANDIDATE_STEPS
from fedge.steps.mixture.fit_weights import Products, Weights
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.wire.messages import NonNegative, Role


class FitGate(Action, frozen=True, kw_only=True):
    """A request for gate, guard and bundle; `pooled` has "local" only if the pool accepted it."""

    STEP: ClassVar = "fit_gate"
    RESULT: ClassVar = Installed
    EXPORTS: ClassVar = True
    TIMED: ClassVar = False

    calibration: dict[Role, Calibration]
    pooled: Weights
    shrinkage: Annotated[float, Meta(gt=0)]
    beta: NonNegative
    products: Products | UnsetType = UNSET
    sgd: Sgd

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of each candidate on the validation samples, and of the final fit."""
        return len(self.calibration) * n_val + self.sgd.count_passes(CANDIDATE_STEPS, n_train + n_val)
