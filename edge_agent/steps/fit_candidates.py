"""Private and local model, primary expert, losses over the calibration grid (fedge.md sections 6 and 7)."""

from __future__ import annotations

from typing import Final

from edge_agent import candidates, mixture, private_model
from edge_agent.device import Device
from edge_agent.evaluation import best_start, logits, prior
from fedge.messages import Role
from fedge.steps.fit_candidates import CandidatesFitted, FitCandidates
from fedge.tensors import Model

PRIVATE, LOCAL = range(2)
"""Streams of random numbers within the order."""
THREADED: Final = True


def run(device: Device, action: FitCandidates) -> CandidatesFitted:
    """Fit, keep, and tell how each candidate does on the validation samples."""
    network, data = device.network, device.data
    models: dict[str, Model] = {Role.GLOBAL: device.model(action.global_model)}
    start, cluster = str(Role.GLOBAL), -1
    if action.experts:
        models[Role.EXPERT], chosen = best_start(device, action.experts)
        start, cluster = Role.EXPERT, chosen.cluster
    initial = device.model(action.initial_model)
    if action.private_start == "initial":
        start = candidates.INITIAL
    private_steps = 0
    if data.n_train >= 2:
        first, rng = initial if start == candidates.INITIAL else models[start], device.rng(PRIVATE)
        models[Role.PRIVATE], private_steps = private_model.fit_private(
            network, first, data.training, data.validation, action.sgd, rng, device.stop, steps=action.private_steps
        )
        if action.local_steps:
            rng = device.rng(LOCAL)
            models[Role.LOCAL] = private_model.fit(
                network, initial, data.training, action.sgd, action.local_steps, rng, device.stop
            )
    candidates.keep(
        device,
        models | {candidates.INITIAL: initial},
        private_start=start,
        private_steps=private_steps,
        local_steps=action.local_steps,
    )
    classes = prior(device)
    losses = {
        role: mixture.grid_losses(logits(device, models[role], data.x_val), data.y_val, classes, role)
        for role in Role
        if role in models
    }
    return CandidatesFitted(losses=losses, n_validation=len(data.y_val), cluster=cluster)
