"""Fit private and local model, choose the primary expert, compute losses over the calibration grid (fedge.md 6, 7)."""

from __future__ import annotations

from typing import Final

from edge_agent.device.device import Device
from edge_agent.learning import candidates
from edge_agent.learning.evaluation import fetch_best_start, fit_shared_offset
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
    losses = {role: _sum_statistics(device, fitted, role) for role in (fitted.roles if action.tell else ())}
    return CandidatesFitted(
        losses=losses, n_validation=len(data.shared_validation[1]), cluster=cluster if action.tell else -1
    )


def _sum_statistics(device: Device, fitted: candidates.FittedModels, role: Role) -> tuple[float, ...]:
    """Return the sums over V_L from which a candidate is calibrated (section 7)."""
    (x, y), model = device.data.shared_validation, fitted.decode_model(device, role)
    outputs, offset = device.network.predict(model, x, y), fit_shared_offset(device, model)
    return device.task.problem.compute_statistics(outputs, y, offset, own=not role.is_shared)
