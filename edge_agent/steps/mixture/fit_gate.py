"""Gate, final fit, guard, bundle (fedge.md sections 9 to 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edge_agent.device.device import Device
from edge_agent.learning import gate, mixture, private_model
from edge_agent.learning.candidates import INITIAL, Candidates, Fitted, candidates, fit, fitted_on
from edge_agent.learning.evaluation import final_prior, logits, metrics, prior, score
from edge_agent.learning.mixture import PLAIN
from export import Candidate, GateWeights, Guard, Mixture
from fedge.bundle.formula import Array, calibrated, log_mixture, log_weights
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

    For variants: `trains_gate` False: r = 0 (section 9). `guards`: section 11. `refits`: section 10.
    """
    data = device.data
    found = candidates(
        device, final_candidates(device, action), data.validation, prior(device), action.calibration, action.pooled
    )
    beta = action.beta if len(data.y_val) else 0.0
    weights = mixture.em_weights(found.log_p, mixture.spread(action.pooled, found.roles), action.shrinkage)
    scores = log_weights(weights) + beta * found.energies
    log_p = np.where(np.isfinite(found.log_q).all(axis=2).T, found.log_p, np.nan)
    trained = GateWeights.untrained(device.task.input_shape, len(found.roles))
    if trains_gate:
        trained = gate.train_gate(data.x_val, log_p, scores, seed=device.seed)
    fused = log_mixture(found.log_q, scores)
    guard = chosen_guard(device, found.fitted, action.calibration, fused) if guards else None
    final = final_models(device, found, action.sgd) if refits else list(found.models)
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
        made.append(Candidate(role=role, name=role.value, model=found.fitted.model(device, role), weight=0.0))
        trained = _with_room(trained)
    index = None if guard is None else [c.role for c in made].index(guard[0])
    return device.write_bundle(
        Mixture(
            candidates=tuple(made),
            log_prior=final_prior(device),
            beta=beta,
            gate=trained,
            guard=None if guard is None or index is None else Guard(index, guard[1].temperature, guard[1].kappa),
        ),
        "fedge",
        metrics(device, fused),
    )


def final_candidates(device: Device, action: FitGate) -> Fitted:
    """The candidates that stay: with marked samples, private and local model trained anew on all samples (3.1).

    They never leave the device. Without marks they are the pooled candidates.
    """
    fitted = fitted_on(device)
    if not device.data.any_sensitive:
        return fitted
    shared = {name: fitted.model(device, name) for name in fitted.models if name not in {Role.PRIVATE, Role.LOCAL}}
    data = device.data
    streams = REAL_PRIVATE, REAL_LOCAL
    return private_model.or_before(
        lambda: fit(device, shared, fitted.plan, action.sgd, data.training, data.validation, streams), fitted
    )


def chosen_guard(
    device: Device, fitted: Fitted, calibration: Mapping[Role, Calibration], fused: Array
) -> tuple[Role, Calibration] | None:
    """Section 11: the alternative that gets half of the output, for the models before section 10 and with r = 0."""
    data, n_classes = device.data, device.task.n_classes
    counts = np.bincount(data.y_val, minlength=n_classes)
    if not mixture.representative(counts, data.class_counts(n_classes)):
        return None
    alternatives = [
        (role, PLAIN if role is Role.GLOBAL else calibration.get(role, PLAIN))
        for role in (Role.GLOBAL, Role.PRIVATE, Role.LOCAL)
        if role in fitted.roles
    ]
    classes = prior(device)
    scores = []
    for role, chosen in alternatives:
        found = logits(device, fitted.model(device, role), data.x_val)
        scores.append(score(device, calibrated(found, classes, chosen)))
    best = mixture.guard(score(device, fused), scores)
    return None if best is None else alternatives[best]


def final_models(device: Device, found: Candidates, sgd: Sgd) -> list[Model]:
    """Section 10: private and local model also learn from the validation samples, once everything is chosen."""
    kept, final = found.fitted, dict(zip(found.roles, found.models, strict=True))

    def again(role: Role, start: str, steps: int, stream: int) -> Model:
        work = partial(private_model.fit, device, kept.model(device, start), device.data.labelled, sgd, steps, stream)
        return private_model.or_before(work, final[role])

    if len(device.data.y_val) and Role.PRIVATE in final:
        private = again(Role.PRIVATE, kept.plan.private_start, kept.private_steps, FINAL_PRIVATE)
        final[Role.PRIVATE] = private_model.mean_model([final[Role.PRIVATE], private])
    if len(device.data.y_val) and Role.LOCAL in final:
        final[Role.LOCAL] = again(Role.LOCAL, INITIAL, kept.plan.local_steps, FINAL_LOCAL)
    return list(final.values())


def _with_room(weights: GateWeights) -> GateWeights:
    """The gate with one more output, which is always 0."""
    out_weight = np.vstack([weights.out_weight, np.zeros((1, weights.out_weight.shape[1]))])
    return replace(weights, out_weight=out_weight, out_bias=np.append(weights.out_bias, 0.0))
