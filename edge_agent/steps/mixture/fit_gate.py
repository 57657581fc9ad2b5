"""Finish the mixture on a device: gate, final fit, guard, bundle (fedge.md sections 9 to 11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec import structs

from edge_agent.device.device import Device
from edge_agent.learning import gate, mixture, private_model
from edge_agent.learning.candidates import INITIAL, Candidates, FittedModels, fit_models, load_fitted, make_candidates
from edge_agent.learning.evaluation import Figures, fit_final_offset, fit_own_offset, measure_model
from export import Candidate, GateWeights, Guard, Mixture
from fedge.bundle.formula import compute_log_weights
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.maths import Array
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

FINAL_PRIVATE, FINAL_LOCAL, REAL_PRIVATE, REAL_LOCAL = range(3, 7)
"""Streams of random numbers within the order."""


def run(
    device: Device, action: FitGate, *, trains_gate: bool = True, guards: bool = True, refits: bool = True
) -> Installed:
    """Write the bundle of the mixture, or of the best candidate alone if the problem's answers cannot be mixed.

    Variants change `trains_gate`, whether the gate is trained, else r = 0 (section 9), and `guards` and `refits`,
    whether sections 11 and 10 apply.
    """
    data = device.data
    found = make_candidates(
        device,
        fit_final_candidates(device, action),
        data.validation,
        data.training,
        action.calibration,
        action.pooled,
    )
    mixed = device.task.problem.MIXED
    beta = action.beta if len(data.y_val) and mixed else 0.0
    weights = found.fit_weights(device, data.y_val, action.pooled, action.shrinkage, action.products)
    if not mixed:
        found, weights = found.select(int(weights.argmax())), np.ones(1)
    scores = compute_log_weights(weights) + beta * found.energies
    trained = GateWeights.make_untrained(device.task.input_shape, len(found.roles))
    if trains_gate and mixed:
        trained = gate.train_gate(data.x_val, found.log_p, scores, seed=device.seed)
    fused = found.measure(device, scores)
    guard = choose_guard(device, found.fitted, action.calibration, fused) if guards and mixed else None
    final = fit_final_models(device, found, action.sgd) if refits else list(found.models)
    assemble = partial(make_mixture, device, found, weights, beta, trained, guard)
    before = assemble(found.models, fit_own_offset) if device.task.problem.SETS else None
    return device.write_bundle(assemble(final, fit_final_offset), "fedge", fused.metrics, before=before)


def make_mixture(
    device: Device,
    found: Candidates,
    weights: Array,
    beta: float,
    trained: GateWeights,
    guard: tuple[Role, Calibration] | None,
    models: Sequence[Model],
    fit_offset: Callable[[Device, Model], Array],
) -> Mixture:
    """Make the mixture of these models, one for each candidate, with offsets of one kind."""
    made = [
        Candidate(
            role=role,
            name=role.value,
            model=model,
            offset=fit_offset(device, model),
            calibration=chosen,
            energy_mean=float(found.energy_mean[k]),
            energy_std=float(found.energy_std[k]),
            weight=min(float(weights[k]), 1.0),
        )
        for k, (role, model, chosen) in enumerate(zip(found.roles, models, found.calibrations, strict=True))
    ]
    if guard is not None and guard[0] not in found.roles:  # the local model, which the pool omitted, for the guard
        role = guard[0]
        model = found.fitted.decode_model(device, role)
        offset = fit_offset(device, model)
        made.append(Candidate(role=role, name=role.value, model=model, offset=offset, weight=0.0))
        trained = _add_output(trained)
    index = None if guard is None else [c.role for c in made].index(guard[0])
    return Mixture(
        candidates=tuple(made),
        beta=beta,
        gate=trained,
        guard=None if guard is None or index is None else Guard(index, guard[1]),
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
    device: Device, fitted: FittedModels, calibration: Mapping[Role, Calibration], fused: Figures
) -> tuple[Role, Calibration] | None:
    """Choose the candidate that gets half of the output, or None (section 11); before section 10, with r = 0."""
    data = device.data
    groups = device.task.problem.group_targets(data.labelled[1])
    training, validation = groups[: data.n_train], groups[data.n_train :]
    n_groups = int(groups.max(initial=0)) + 1
    if not mixture.is_representative(*(np.bincount(own, minlength=n_groups) for own in (validation, training))):
        return None
    known = calibration.get(Role.GLOBAL, PLAIN).deviation  # that of its errors, without which nothing is likely
    alternatives = [
        (role, structs.replace(PLAIN, deviation=known) if role is Role.GLOBAL else calibration.get(role, PLAIN))
        for role in (Role.GLOBAL, Role.PRIVATE, Role.LOCAL)
        if role in fitted.roles
    ]
    found = []
    for role, chosen in alternatives:
        model = fitted.decode_model(device, role)
        found.append(measure_model(device, model, chosen, fit_own_offset(device, model))[:2])
    best = mixture.choose_alternative(fused[:2], found)
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
