"""EM weights of the candidates (fedge.md section 8)."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from edge_agent.device.device import Device
from edge_agent.learning.candidates import make_pooled_candidates
from fedge.steps.mixture.fit_weights import FitWeights, Products, WeightsFitted, format_products


def run(device: Device, action: FitWeights) -> WeightsFitted:
    """Fit weights for each pooled mean."""
    products: Products | UnsetType = UNSET
    weights, y = [], device.data.shared_validation[1]
    for pooled in action.pooled:  # the last one has all candidates
        found = make_pooled_candidates(device, action.calibration, pooled)
        own = found.fit_weights(device, y, pooled, action.shrinkage, action.products)
        weights.append({role: min(float(w), 1.0) for role, w in zip(found.roles, own, strict=True)})
        products = format_products(device.task.problem.sum_products(found.answers, y), found.roles)
    return WeightsFitted(weights=tuple(weights), n_validation=len(y), products=products)
