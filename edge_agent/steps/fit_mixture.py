"""SCMoE-PFL on a device: private model, energy-aware gate, bundle.

Source: Li et al., "SCMoE-PFL", Information Fusion, 2026, §3.1 steps 2 and 6, §3.3, Algorithm 2;
specification docs/methods/scmoe_pfl.md, sections 8 to 11. Departures: one squared-weights penalty
for all of the gate's parameters, and full batches.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edge_agent import gate, mixture, private_model
from edge_agent.device import Device, FailedError
from edge_agent.evaluation import final_prior, logits, rank
from edge_agent.mixture import PLAIN
from edge_agent.private_model import Samples
from edge_agent.steps.install import installed
from export import Candidate, GateWeights, Mixture
from fedge.fusion import Array, calibrated, raw_energies
from fedge.messages import Role
from fedge.steps.fit_mixture import FitMixture, GateData
from fedge.steps.install import Installed
from fedge.tasks import DeviceData
from fedge.tensors import Model

NEAR: Final = 0.02  # of the best validation accuracy, section 9
MOST: Final = 3
DECAY: Final = 1e-3  # of the gate, section 11.5


def run(device: Device, action: FitMixture) -> Installed:
    """Private model, gate over it and the experts, bundle; nothing of it is sent.

    Raises:
        FailedError: there is neither an expert nor a training sample.
    """
    experts = [device.model(start.model) for start in action.experts]
    if action.near_best:
        experts = near_best(device, experts)
    if action.alone in {"average", "best"} and experts:
        one = private_model.mean_model(experts) if action.alone == "average" else best(device, experts)
        return _write(device, action, [one], (Role.EXPERT,), None, np.zeros(1))
    private = fit_private(device, action, experts)
    if action.alone == "private" and private:
        return _write(device, action, [private], (Role.PRIVATE,), None, np.zeros(1))
    models = [*([private] if private else []), *experts]
    if not models:
        raise FailedError("no expert and no training sample: nothing to predict with")
    roles = (*((Role.PRIVATE,) if private else ()), *(Role.EXPERT for _ in experts))
    weights, offsets = fit_gate(device, action, models, roles)
    return _write(device, action, models, roles, weights, offsets)


def near_best(device: Device, experts: list[Model]) -> list[Model]:
    """Section 9: of the experts new to the device, those within 0.02 of the best accuracy, at most 3."""
    samples = max(len(device.data.y_val) or device.data.n_shared, 1)
    ranks = [rank(device, model, "accuracy") for model in experts]
    enough = max((correct for correct, _ in ranks), default=0.0) - NEAR * samples
    best = sorted((k for k, (correct, _) in enumerate(ranks) if correct >= enough), key=lambda k: (-ranks[k][0], k))
    return [experts[k] for k in sorted(best[:MOST])]


def best(device: Device, experts: list[Model]) -> Model:
    """Section 8: the highest validation accuracy, then the lowest cross-entropy, then the lowest number."""
    return experts[mixture.first_ranked([rank(device, model, "accuracy") for model in experts])]


def fit_private(device: Device, action: FitMixture, experts: list[Model]) -> Model | None:
    """Section 10; None with fewer than two training samples (section 3)."""
    data = device.data
    if data.n_train < 2:
        return None
    start = device.model(action.initial_model)
    if action.private_start == "best" and experts:
        start = best(device, experts)
    training: Samples = data.training
    if action.private_data == "sensitive" and data.sensitive.any():  # otherwise nothing is left
        training = (data.x_train[data.sensitive], data.y_train[data.sensitive])
    rng = device.rng(0)
    return private_model.or_before(
        lambda: private_model.fit(device.network, start, training, action.sgd, action.sgd.steps, rng, device.stop),
        start,
    )


def fit_gate(
    device: Device, action: FitMixture, models: list[Model], roles: tuple[Role, ...]
) -> tuple[GateWeights, Array]:
    """Section 11.5: the gate over the candidates, and the energy offsets mu, (M,), 0 if disabled."""
    data = device.data
    x, y = gate_data(data, action.gate)
    trained = len(y) >= gate.MIN_SAMPLES
    offsets = np.zeros(len(models))
    if action.energy_offset == "always" or (action.energy_offset == "untrained" and not trained):
        seen = data.x_val if len(data.y_val) else data.x_train
        energies = raw_energies(np.stack([logits(device, model, seen) for model in models]))
        offsets, _ = mixture.energy_statistics(energies)
    if not trained:
        return GateWeights.untrained(device.task.input_shape, len(models)), offsets
    found = np.stack([logits(device, model, x) for model in models])
    log_q = calibrated(found, np.zeros(device.task.n_classes), PLAIN)
    scores = (raw_energies(found) - offsets) * action.energy
    usable = np.asarray(np.isfinite(log_q).all(axis=2).T)
    log_p = np.where(usable, mixture.of_labels(log_q, y).T, np.nan)
    experts = [k for k, role in enumerate(roles) if role is Role.EXPERT]
    scores = np.where(usable, scores, 0.0)
    fitted = gate.train_gate(x, log_p, scores, seed=device.seed, decay=DECAY, experts=experts, top=action.top)
    return fitted, offsets


def gate_data(data: DeviceData, what: GateData) -> Samples:
    """Section 11.5: the gate's training data, inputs (m, *input_shape) and labels (m,); untrained: none."""
    match what:
        case "validation":
            return data.x_val, data.y_val
        case "training":
            return data.x_train, data.y_train
        case "training+validation":
            return data.labelled
        case "untrained" | "uniform":
            return data.x_val[:0], data.y_val[:0]


def _write(
    device: Device,
    action: FitMixture,
    models: list[Model],
    roles: tuple[Role, ...],
    weights: GateWeights | None,
    offsets: Array,
) -> Installed:
    """Sections 11.2 and 11.3 as a bundle: equal weights, T = 1, no prior; raw energies minus their offsets."""
    names = [role.value if role is Role.PRIVATE else f"expert-{k}" for k, role in enumerate(roles)]
    energy = action.energy and action.gate != "uniform" and len(models) > 1
    gate_weights = weights or GateWeights.untrained(device.task.input_shape, len(models))
    made = Mixture(
        candidates=tuple(
            Candidate(role=role, name=name, model=model, energy_mean=float(offset))
            for role, name, model, offset in zip(roles, names, models, offsets, strict=True)
        ),
        log_prior=final_prior(device),
        beta=1.0 if energy else 0.0,
        gate=gate_weights,
        top=action.top,
        energy_clip=np.inf,
    )
    info = device.write_bundle(made, "scmoe-pfl", {})
    return installed(info)
