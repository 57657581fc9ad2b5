"""fedge.md section 8: EM weights of the candidates on the validation samples."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.wire.messages import Count, Role, Share


class Calibration(Struct, frozen=True, kw_only=True):
    """Temperature T_k > 0 and prior strength kappa_k >= 0 of one candidate, the same on all devices."""

    temperature: Annotated[float, Meta(gt=0, le=100)]
    kappa: Annotated[float, Meta(ge=0, le=100)]


Weights = Annotated[dict[Role, Share], Meta(min_length=1)]
Variants = Annotated[tuple[Weights, ...], Meta(min_length=1, max_length=4)]


class WeightsFitted(Result, frozen=True, kw_only=True):
    """The weights omega_i for each pooled mean of the order."""

    REVEALS: ClassVar = {"weights": Reveals.WEIGHT, "n_validation": Reveals.COUNT}
    weights: Variants
    n_validation: Count


class OfPooled(Action, frozen=True, kw_only=True):
    """A request to fit something on validation samples from each pooled mean (without and with the local model)."""

    calibration: dict[Role, Calibration]
    pooled: Variants
    shrinkage: Annotated[float, Meta(gt=0)]

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of each candidate on the validation samples, once per variant."""
        return len(self.calibration) * len(self.pooled) * n_val


class FitWeights(OfPooled, frozen=True, kw_only=True):
    """A request for EM weights from each pooled mean."""

    STEP: ClassVar = "fit_weights"
    RESULT: ClassVar = WeightsFitted

    def check(self, result: WeightsFitted, task: TaskSpec) -> None:
        """Require one set of weights per variant, for its candidates, with sum 1."""
        require(len(result.weights) == len(self.pooled), "the number of weights is not that of pooled means")
        for weights, pooled in zip(result.weights, self.pooled, strict=True):
            require(set(weights) <= set(pooled), "the report has weights of candidates that are not in the pool")
            require(math.isclose(sum(weights.values()), 1, abs_tol=1e-6), "the weights do not sum to 1")
