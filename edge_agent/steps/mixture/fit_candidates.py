"""Fit private and local model, choose the primary expert, compute losses over the calibration grid (fedge.md 6, 7)."""

from __future__ import annotations

from typing import Final

from edge_agent.device.device import Device
from edge_agent.learning import candidates, mixture
from edge_agent.learning.evaluation import compute_logits, compute_shared_prior, fetch_best_start
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

PRIVATE, LOCAL = range(2)
"""Streams of random numbers within the order."""
THREADED: Final = True


def run(
    device: Device, action: FitCandidates, *, private_start: str = "", private_steps: int | None = None
) -> CandidatesFitted:
    """Fit on D_L, keep the models, and report each candidate's losses on V_L.

    With marked samples, the private and the local model are shadows; `fit_gate` trains those that stay (3.1).
    Variants give the private model's start (`candidates.Plan`), and its number of steps without validation.
    """
    models: dict[str, Model] = {
        candidates.INITIAL: device.fetch_model(action.initial_model),
        Role.GLOBAL: device.fetch_model(action.global_model),
    }
    start, cluster = str(Role.GLOBAL), -1
    if action.experts:
        models[Role.EXPERT], chosen = fetch_best_start(device, action.experts)
        start, cluster = Role.EXPERT, chosen.cluster
    plan = candidates.Plan(
        private_start=private_start or start, private_steps=private_steps, local_steps=action.local_steps
    )
    data = device.data
    fitted = candidates.fit_models(
        device, models, plan, action.sgd, data.shared, data.shared_validation, (PRIVATE, LOCAL)
    )
    candidates.save_fitted(device, fitted)
    (x, y), classes = device.data.shared_validation, compute_shared_prior(device)
    losses = {
        role: mixture.compute_grid_losses(
            compute_logits(device, fitted.decode_model(device, role), x), y, classes, role
        )
        for role in (fitted.roles if action.tell else ())
    }
    return CandidatesFitted(losses=losses, n_validation=len(y), cluster=cluster)
