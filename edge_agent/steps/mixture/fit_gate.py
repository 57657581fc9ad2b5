"""Finish the mixture on a device: gate, final fit, guard, bundle (fedge.md sections 9 to 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edge_agent.device.device import Device
from edge_agent.learning import gate, mixture, private_model
from edge_agent.learning.candidates import INITIAL, Candidates, FittedModels, fit_models, load_fitted, make_candidates
from edge_agent.learning.evaluation import (
    compute_final_prior,
    compute_logits,
    compute_metrics,
    compute_prior,
    score_predictions,
)
from edge_agent.learning.mixture import PLAIN
from export import Candidate, GateWeights, Guard, Mixture
from fedge.bundle.formula import Array, calibrate_logits, compute_log_mixture, compute_log_weights
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_weights import Calibration
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

FINAL_PRIVATE, FINAL_LOCAL, REAL_PRIVATE, REAL_LOCAL = range(3, 7)
"""Streams of random numbers within the order."""


def run(
    device: Device, action: FitGate, *, trains_gate: bool = True, guards: bool = True, refits: bool = True
) -> Installed:
    """Write the bundle of the mixture.

    Variants change `trains_gate`, whether the gate is trained, else r = 0 (section 9), and `guards` and `refits`,
    whether sections 11 and 10 apply.
    """
    data = device.data
    found = make_candidates(
        device,
        fit_final_candidates(device, action),
        data.validation,
        compute_prior(device),
        action.calibration,
        action.pooled,
    )
    beta = action.beta if len(data.y_val) else 0.0
    weights = mixture.fit_em_weights(
        found.log_p, mixture.distribute_weights(action.pooled, found.roles), action.shrinkage
    )
    scores = compute_log_weights(weights) + beta * found.energies
    log_p = np.where(np.isfinite(found.log_q).all(axis=2).T, found.log_p, np.nan)
    trained = GateWeights.make_untrained(device.task.input_shape, len(found.roles))
    if trains_gate:
        trained = gate.train_gate(data.x_val, log_p, scores, seed=device.seed)
    fused = compute_log_mixture(found.log_q, scores)
    guard = choose_guard(device, found.fitted, action.calibration, fused) if guards else None
    final = fit_final_models(device, found, action.sgd) if refits else list(found.models)
    made = [
        Candidate(
            role=role,
            name=role.value,
            model=model,
            temperature=chosen.temperature,
            kappa=chosen.kappa,
            energy_mean=float(found.energy_mean[k]),
            energy_std=float(found.energy_std[k]),
            weight=min(float(weights[k]), 1.0),
        )
        for k, (role, model, chosen) in enumerate(zip(found.roles, final, found.calibrations, strict=True))
    ]
    if guard is not None and guard[0] not in found.roles:  # the local model, which the pool omitted, for the guard
        role = guard[0]
        made.append(Candidate(role=role, name=role.value, model=found.fitted.decode_model(device, role), weight=0.0))
        trained = _add_output(trained)
    index = None if guard is None else [c.role for c in made].index(guard[0])
    return device.write_bundle(
        Mixture(
            candidates=tuple(made),
            log_prior=compute_final_prior(device),
            beta=beta,
            gate=trained,
            guard=None if guard is None or index is None else Guard(index, guard[1].temperature, guard[1].kappa),
        ),
        "fedge",
        compute_metrics(device, fused),
    )


def fit_final_candidates(device: Device, action: FitGate) -> FittedModels:
    """Return the final candidates, which never leave the device.

    Without marked samples they are the pooled candidates; with marks, private and local model are fitted anew on all
    samples (3.1).
    """
    fitted = load_fitted(device)
    if not device.data.has_sensitive:
        return fitted
    shared = {
        name: fitted.decode_model(device, name) for name in fitted.models if name not in {Role.PRIVATE, Role.LOCAL}
    }
    data = device.data
    streams = REAL_PRIVATE, REAL_LOCAL
    return private_model.run_or_revert(
        lambda: fit_models(device, shared, fitted.plan, action.sgd, data.training, data.validation, streams), fitted
    )


def choose_guard(
    device: Device, fitted: FittedModels, calibration: Mapping[Role, Calibration], fused: Array
) -> tuple[Role, Calibration] | None:
    """Choose the candidate that gets half of the output, or None (section 11); before section 10, with r = 0."""
    data, n_classes = device.data, device.task.n_classes
    counts = np.bincount(data.y_val, minlength=n_classes)
    if not mixture.is_representative(counts, data.count_classes(n_classes)):
        return None
    alternatives = [
        (role, PLAIN if role is Role.GLOBAL else calibration.get(role, PLAIN))
        for role in (Role.GLOBAL, Role.PRIVATE, Role.LOCAL)
        if role in fitted.roles
    ]
    classes = compute_prior(device)
    scores = []
    for role, chosen in alternatives:
        found = compute_logits(device, fitted.decode_model(device, role), data.x_val)
        scores.append(score_predictions(device, calibrate_logits(found, classes, chosen)))
    best = mixture.choose_alternative(score_predictions(device, fused), scores)
    return None if best is None else alternatives[best]


def fit_final_models(device: Device, found: Candidates, sgd: Sgd) -> list[Model]:
    """Train private and local model also on the validation samples, after all choices (section 10)."""
    kept, final = found.fitted, dict(zip(found.roles, found.models, strict=True))

    def refit(role: Role, start: str, steps: int, stream: int) -> Model:
        work = partial(
            private_model.fit_model, device, kept.decode_model(device, start), device.data.labelled, sgd, steps, stream
        )
        return private_model.run_or_revert(work, final[role])

    if len(device.data.y_val) and Role.PRIVATE in final:
        private = refit(Role.PRIVATE, kept.plan.private_start, kept.private_steps, FINAL_PRIVATE)
        final[Role.PRIVATE] = private_model.average_models([final[Role.PRIVATE], private])
    if len(device.data.y_val) and Role.LOCAL in final:
        final[Role.LOCAL] = refit(Role.LOCAL, INITIAL, kept.plan.local_steps, FINAL_LOCAL)
    return list(final.values())


def _add_output(weights: GateWeights) -> GateWeights:
    """Return the gate with one more output, which is always 0."""
    out_weight = np.vstack([weights.out_weight, np.zeros((1, weights.out_weight.shape[1]))])
    return replace(weights, out_weight=out_weight, out_bias=np.append(weights.out_bias, 0.0))
