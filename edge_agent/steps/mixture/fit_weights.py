"""EM weights of the candidates (fedge.md section 8)."""

from __future__ import annotations

from edge_agent.device.device import Device
from edge_agent.learning import mixture
from edge_agent.learning.candidates import make_pooled_candidates
from fedge.steps.mixture.fit_weights import FitWeights, WeightsFitted


def run(device: Device, action: FitWeights) -> WeightsFitted:
    """Fit weights for each pooled mean."""
    weights = []
    for pooled in action.pooled:
        found = make_pooled_candidates(device, action.calibration, pooled)
        own = mixture.fit_em_weights(found.log_p, mixture.distribute_weights(pooled, found.roles), action.shrinkage)
        weights.append({role: min(float(w), 1.0) for role, w in zip(found.roles, own, strict=True)})
    return WeightsFitted(weights=tuple(weights), n_validation=len(device.data.shared_validation[1]))
