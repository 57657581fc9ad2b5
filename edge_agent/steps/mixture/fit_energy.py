"""The mixture with and without energies (fedge.md section 9)."""

from __future__ import annotations

from edge_agent.device.device import Device
from edge_agent.learning import mixture
from edge_agent.learning.candidates import Candidates, pooled_candidates
from fedge.bundle.calibration import BETAS
from fedge.bundle.formula import Array, log_mixture, log_weights
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy


def run(device: Device, action: FitEnergy) -> EnergyFitted:
    """Losses for each pooled mean."""
    pooled_losses: list[float] = []
    beta_losses: list[tuple[float, float, float]] = []
    for pooled in action.pooled:
        found = pooled_candidates(device, action.calibration, pooled)
        u = mixture.spread(pooled, found.roles)
        own = mixture.em_weights(found.log_p, u, action.shrinkage)
        pooled_losses.append(_loss(device, found, u, 0.0))
        plain, half, full = (_loss(device, found, own, beta) for beta in BETAS)
        beta_losses.append((plain, half, full))
    return EnergyFitted(
        pooled_losses=tuple(pooled_losses),
        beta_losses=tuple(beta_losses),
        n_validation=len(device.data.shared_validation[1]),
    )


def _loss(device: Device, found: Candidates, weights: Array, beta: float) -> float:
    log_p = log_mixture(found.log_q, log_weights(weights) + beta * found.energies)
    return -float(mixture.of_labels(log_p, device.data.shared_validation[1]).sum())
