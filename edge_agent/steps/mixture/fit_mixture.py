"""SCMoE-PFL on a device: private model, energy-aware gate, bundle.

Source: Li et al., "SCMoE-PFL", Information Fusion, 2026, §3.1 steps 2 and 6, §3.3, Algorithm 2;
specification docs/methods/scmoe_pfl.md, sections 8 to 11. Departures: one squared-weights penalty
for all of the gate's parameters, and full batches.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from edge_agent.device.device import Device, FailedError
from edge_agent.learning import gate, mixture, private_model
from edge_agent.learning.evaluation import fit_final_offset, rank_model
from edge_agent.learning.private_model import Samples
from export import Candidate, GateWeights, Mixture
from fedge.data.problems.calibration import PLAIN
from fedge.data.problems.formulas import find_usable
from fedge.data.problems.maths import Array, Floats
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.steps.mixture.install import Installed
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

NEAR: Final = 0.02  # of the best validation accuracy, section 9
MOST: Final = 3
DECAY: Final = 1e-3  # of the gate, section 11.5


def run(device: Device, action: FitMixture) -> Installed:
    """Fit the private model, fit a gate over it and the experts, and write the bundle; no model is sent.

    Raises:
        FailedError: there is neither an expert nor a training sample.
    """
    experts = fetch_experts(device, action)
    models, roles = make_candidates(fit_private(device, action, experts), experts)
    if not device.task.problem.MIXED:
        best = mixture.find_best_rank([rank_model(device, model, "loss") for model in models])
        models, roles = [models[best]], (roles[best],)
    samples = device.data.validation if action.gate == "validation" else device.data.training  # section 11.5
    untrained = len(samples[1]) < gate.MIN_SAMPLES
    levelled = untrained and action.energy_offset == "untrained"
    offsets = compute_mean_energies(device, models) if levelled else np.zeros(len(models))
    weights = fit_gate(device, models, roles, samples, offsets, action.top)
    return write_mixture(device, models, roles, weights, offsets, action.top)


def fetch_experts(device: Device, action: FitMixture) -> list[Model]:
    """Return the experts of the mixture, all that the order names or, with `near_best`, those near the best."""
    experts = [device.fetch_model(start.model) for start in action.experts]
    return select_near_best(device, experts) if action.near_best else experts


def make_candidates(private: Model | None, experts: list[Model]) -> tuple[list[Model], tuple[Role, ...]]:
    """Return models and roles, the private model first.

    Raises:
        FailedError: there is no model.
    """
    models = [*([private] if private else []), *experts]
    if not models:
        raise FailedError("no expert and no training sample: nothing to predict with")
    return models, (*((Role.PRIVATE,) if private else ()), *(Role.EXPERT for _ in experts))


def select_near_best(device: Device, experts: list[Model]) -> list[Model]:
    """Select at most 3 of the new experts, within 0.02 of the best accuracy (section 9)."""
    samples = max(len(device.data.y_val) or device.data.n_shared, 1)
    ranks = [rank_model(device, model, "accuracy") for model in experts]
    enough = max((correct for correct, _ in ranks), default=0.0) - NEAR * samples
    best = sorted((k for k, (correct, _) in enumerate(ranks) if correct >= enough), key=lambda k: (-ranks[k][0], k))
    return [experts[k] for k in sorted(best[:MOST])]


def choose_best(device: Device, experts: list[Model]) -> Model:
    """Return the expert of highest accuracy, then lowest cross-entropy, then number (section 8)."""
    return experts[mixture.find_best_rank([rank_model(device, model, "accuracy") for model in experts])]


def fit_private(device: Device, action: FitMixture, experts: list[Model]) -> Model | None:
    """Fit the private model (section 10), or return None below two training samples (section 3)."""
    data = device.data
    if data.n_train < 2:
        return None
    start = device.fetch_model(action.initial_model)
    if action.private_start == "best" and experts:
        start = choose_best(device, experts)
    training: Samples = data.training
    if action.private_data == "sensitive" and data.sensitive.any():  # otherwise nothing is left
        training = (data.x_train[data.sensitive], data.y_train[data.sensitive])
    return private_model.run_or_revert(
        lambda: private_model.fit_model(device, start, training, action.sgd, action.sgd.steps, 0), start
    )


def compute_mean_energies(device: Device, models: list[Model]) -> Array:
    """Compute offsets mu, (M,), on validation samples, or else on training samples (section 11.4)."""
    data = device.data
    seen = data.x_val if len(data.y_val) else data.x_train
    targets = data.y_val if len(data.y_val) else data.y_train
    found = [measure_candidate(device, model, (seen, targets)) for model in models]
    offsets, _ = mixture.compute_energy_statistics(np.stack([energies for _, energies in found], axis=1))
    return offsets


def measure_candidate(device: Device, model: Model, samples: Samples) -> tuple[Array, Floats]:
    """Return l (n,), NaN where the model is not usable, and the raw energies (n,), without calibration."""
    problem, (x, y) = device.task.problem, samples
    outputs = device.network.predict(model, x, y)
    answers = problem.calibrate(outputs, PLAIN, np.zeros(()))
    found = np.where(find_usable(answers), problem.compute_log_likelihood(answers, y), np.nan)
    return found, problem.compute_energies(outputs, answers)


def fit_gate(
    device: Device,
    models: list[Model],
    roles: tuple[Role, ...],
    samples: Samples,
    offsets: Array,
    top: int,
    *,
    energy: bool = True,
) -> GateWeights:
    """Fit the gate over the candidates (section 11.5), untrained with few samples. `energy`: whether energy counts."""
    x, y = samples
    if len(y) < gate.MIN_SAMPLES:
        return GateWeights.make_untrained(device.task.input_shape, len(models))
    found = [measure_candidate(device, model, samples) for model in models]
    log_p, energies = (np.stack(each, axis=1) for each in zip(*found, strict=True))
    experts = [k for k, role in enumerate(roles) if role is Role.EXPERT]
    scores = np.where(np.isfinite(log_p), (energies - offsets) * energy, 0.0)
    return gate.train_gate(x, log_p, scores, seed=device.seed, decay=DECAY, experts=experts, top=top)


def write_mixture(
    device: Device,
    models: list[Model],
    roles: tuple[Role, ...],
    weights: GateWeights,
    offsets: Array,
    top: int,
    *,
    energy: bool = True,
) -> Installed:
    """Write the bundle with equal weights, T = 1, no prior, and energies minus their offsets (sections 11.2, 11.3)."""
    names = [role.value if role is Role.PRIVATE else f"expert-{k}" for k, role in enumerate(roles)]
    made = Mixture(
        candidates=tuple(
            Candidate(
                role=role,
                name=name,
                model=model,
                offset=fit_final_offset(device, model),
                energy_mean=float(offset),
            )
            for role, name, model, offset in zip(roles, names, models, offsets, strict=True)
        ),
        beta=1.0 if energy and len(models) > 1 else 0.0,
        gate=weights,
        top=top,
        energy_clip=np.inf,
    )
    return device.write_bundle(made, "scmoe-pfl", {})
