"""fedge.md section 8: EM weights of the candidates on the validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from fedge.data.problems.calibration import Calibration
from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.wire.messages import Count, Role, Share

Weights = Annotated[dict[Role, Share], Meta(min_length=1)]
Variants = Annotated[tuple[Weights, ...], Meta(min_length=1, max_length=4)]


Products = dict[Role, dict[Role, float]]
"""Sums over samples of the products of two candidates' residuals, or their means (`Problem.sum_products`)."""


def format_products(products: NDArray[np.float64] | None, roles: Sequence[Role]) -> Products | UnsetType:
    """Return products (M, M) by the roles of the candidates, as they travel."""
    if products is None:
        return UNSET
    return {a: dict(zip(roles, row.tolist(), strict=True)) for a, row in zip(roles, products, strict=True)}


def select_products(products: Products | UnsetType, roles: Sequence[Role]) -> NDArray[np.float64] | None:
    """Return the products of these candidates, (M, M); None if those of some pair are unknown."""
    if isinstance(products, UnsetType) or any(b not in products.get(a, {}) for a in roles for b in roles):
        return None
    return np.array([[products[a][b] for b in roles] for a in roles])


class WeightsFitted(Result, frozen=True, kw_only=True):
    """The weights omega_i for each pooled mean of the order."""

    REVEALS: ClassVar = {"weights": Reveals.WEIGHT, "n_validation": Reveals.COUNT, "products": Reveals.LOSS}
    weights: Variants
    n_validation: Count
    products: Products | UnsetType = UNSET  # if the problem's weights need them; of all candidates of the device


class OfPooled(Action, frozen=True, kw_only=True):
    """A request to fit something on validation samples from each pooled mean (without and with the local model)."""

    calibration: dict[Role, Calibration]
    pooled: Variants
    shrinkage: Annotated[float, Meta(gt=0)]
    products: Products | UnsetType = UNSET  # means over the samples of all devices, once they are known

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of each candidate on the validation samples, once per variant."""
        return len(self.calibration) * len(self.pooled) * n_val


class FitWeights(OfPooled, frozen=True, kw_only=True):
    """A request for EM weights from each pooled mean."""

    STEP: ClassVar = "fit_weights"
    RESULT: ClassVar = WeightsFitted

    def check(self, result: WeightsFitted, task: TaskSpec) -> None:
        """Require one set of weights per variant, for its candidates, with sum 1, and products of all pairs."""
        require(len(result.weights) == len(self.pooled), "the number of weights is not that of pooled means")
        for weights, pooled in zip(result.weights, self.pooled, strict=True):
            require(set(weights) <= set(pooled), "the report has weights of candidates that are not in the pool")
            require(math.isclose(sum(weights.values()), 1, abs_tol=1e-6), "the weights do not sum to 1")
        if not isinstance(result.products, UnsetType):
            _require_products(result.products, self.pooled[-1])


def _require_products(products: Products, pooled: Weights) -> None:
    require(set(products) <= set(pooled), "the report has products of candidates that are not in the pool")
    require(all(set(row) == set(products) for row in products.values()), "products of some pairs are missing")
    require(all(row[a] >= 0 for a, row in products.items()), "a product of residuals with themselves is negative")
    pairs = ((row[b], products[b][a]) for a, row in products.items() for b in row)
    require(all(there == back for there, back in pairs), "the products of two candidates differ by their order")
