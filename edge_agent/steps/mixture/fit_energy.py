"""Compute the mixture's losses with and without energies (fedge.md section 9)."""

from __future__ import annotations

from edge_agent.device.device import Device
from edge_agent.learning import mixture
from edge_agent.learning.candidates import Candidates, make_pooled_candidates
from fedge.bundle.calibration import BETAS
from fedge.bundle.formula import compute_log_weights
from fedge.data.problems.maths import Array
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy


def run(device: Device, action: FitEnergy) -> EnergyFitted:
    """Compute the losses for each pooled mean of the weights."""
    pooled_losses: list[float] = []
    beta_losses: list[tuple[float, float, float]] = []
    for pooled in action.pooled:
        found = make_pooled_candidates(device, action.calibration, pooled)
        u = mixture.distribute_weights(pooled, found.roles)
        own = found.fit_weights(device, device.data.shared_validation[1], pooled, action.shrinkage, action.products)
        pooled_losses.append(_compute_loss(device, found, u, 0.0))
        plain, half, full = (_compute_loss(device, found, own, beta) for beta in BETAS)
        beta_losses.append((plain, half, full))
    return EnergyFitted(
        pooled_losses=tuple(pooled_losses),
        beta_losses=tuple(beta_losses),
        n_validation=len(device.data.shared_validation[1]),
    )


def _compute_loss(device: Device, found: Candidates, weights: Array, beta: float) -> float:
    unknown = device.task.problem.compute_unknown(device.data.shared_validation[1])
    scores = compute_log_weights(weights) + beta * found.energies
    return -float(mixture.compute_mixture_likelihood(found.log_p, scores, unknown).sum())
