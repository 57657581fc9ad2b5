"""Maths by which a device fits its mixture: prior, temperature, weights, energy, guard (fedge.md sections 6 to 11).

Pure float64 numpy, symbols as in the specification: M candidates, C classes, n samples. The mixture's own formula is in
`fedge.bundle.formula`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.calibration import make_grid
from fedge.bundle.formula import Array, calibrate_logits, compute_log_weights, log_softmax
from fedge.steps.mixture.fit_weights import Calibration
from fedge.wire.messages import Role

PLAIN: Final = Calibration(temperature=1.0, kappa=0.0)
"""Calibration that leaves a model's probabilities as they are."""
EM_STEPS: Final = 60
BASE_CHECKPOINT: Final = 1  # 40 steps, section 6
STEPS_MARGIN_NATS: Final = 2.0
GUARD_MARGIN_NATS: Final = 5.0
GUARD_MARGIN_SAMPLES: Final = 2
MAX_CLASS_DISTANCE: Final = Fraction(2, 5)
TIE: Final = 1e-9
"""A value is better only if it exceeds the best so far by more than this (section 2)."""


def find_best(values: Sequence[float]) -> int:
    """Return the index of the largest value, the first on a tie."""
    best = 0
    for i, value in enumerate(values):
        if value > values[best] + TIE:
            best = i
    return best


def find_best_rank(ranks: Sequence[tuple[float, float]]) -> int:
    """Return the index of the best rank, by the first number, then the second; the first on a tie."""
    best = max(first for first, _ in ranks)
    return find_best([second if first == best else -math.inf for first, second in ranks])


def choose_steps(log_likelihoods: Sequence[float]) -> int:
    """Return the index of the checkpoint: 1 (40 steps) unless another is 2 nats better (section 6).

    >>> choose_steps([-10, -9, -8, -7.5])
    1
    """
    bonus = [STEPS_MARGIN_NATS if i == BASE_CHECKPOINT else 0.0 for i in range(len(log_likelihoods))]
    return find_best([value + extra for value, extra in zip(log_likelihoods, bonus, strict=True)])


# ------------------------------------------------------------------------------------- section 7: prior and temperature


def compute_log_prior(counts: NDArray[np.integer]) -> Array:
    """Compute log class shares pi, (C,), with half a sample added per class; uniform without counts."""
    smoothed = np.asarray(counts, np.float64) + 0.5
    return np.asarray(np.log(smoothed / smoothed.sum()))


def select_true_log_p(log_p: Array, labels: NDArray[np.int64]) -> Array:
    """Return log p of the true classes, (..., n), from (..., n, C); a row that is not finite counts as uniform."""
    picked = log_p[..., np.arange(len(labels)), labels]
    return np.asarray(np.where(np.isfinite(picked), picked, -math.log(log_p.shape[-1])))


def compute_total_loss(
    logits: NDArray[np.floating], labels: NDArray[np.int64], prior: Array, chosen: Calibration
) -> float:
    """Compute the sum of the cross-entropies of one candidate, (n, C) logits, in nats."""
    return -float(select_true_log_p(calibrate_logits(logits, prior, chosen), labels).sum())


def compute_grid_losses(
    logits: NDArray[np.floating], labels: NDArray[np.int64], prior: Array, role: Role
) -> tuple[float, ...]:
    """Compute the sums of losses over the (T, kappa) grid of a role (section 7)."""
    return tuple(compute_total_loss(logits, labels, prior, chosen) for chosen in make_grid(role))


# --------------------------------------------------------------------------------------------------- section 8: weights


def distribute_weights(pooled: Mapping[Role, float], present: Sequence[Role]) -> Array:
    """Return pooled weights u of the candidates that a device has, (M,), sum 1.

    The shares of missing candidates go to the others in proportion (section 12); if nothing is left, all are equal.

    Raises:
        ValueError: no candidate is present.
    """
    if not present:
        raise ValueError("the device has none of the candidates")
    shares = np.array([pooled.get(role, 0.0) for role in present], np.float64)
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(present), 1 / len(present))


def fit_em_weights(log_p: Array, pooled: Array, shrinkage: float) -> Array:
    """Fit omega, (M,), by EM from u to sum_n log sum_k omega_k p_nk + a sum_k u_k log omega_k (section 8).

    Args:
        log_p: (n, M) log-probabilities of the true classes; n may be 0.
        pooled: u, (M,), sum 1.
        shrinkage: a > 0, in samples; every omega_k is at least a u_k / (n + a).
    """
    weights = pooled
    for _ in range(EM_STEPS if len(log_p) else 0):
        responsibility = np.exp(log_softmax(compute_log_weights(weights) + log_p))
        weights = (responsibility.sum(axis=0) + shrinkage * pooled) / (len(log_p) + shrinkage)
    return weights


# ------------------------------------------------------------------------------------------------- section 9: energy


def compute_energy_statistics(energies: Array) -> tuple[Array, Array]:
    """Compute mean and deviation per candidate, (M,) each, over finite energies; 0 and 1 without any."""
    means, deviations = np.zeros(energies.shape[1]), np.ones(energies.shape[1])
    for k, column in enumerate(energies.T):
        finite = column[np.isfinite(column)]
        if len(finite):
            means[k], deviations[k] = finite.mean(), finite.std()
    return means, deviations


# ---------------------------------------------------------------------------------------------------- section 11: guard


def is_representative(validation: NDArray[np.integer], training: NDArray[np.integer]) -> bool:
    """Return whether the class shares of V_i are within 0.4 (inclusive) of D_i's; counts, (C,) each.

    >>> is_representative(np.array([0, 1, 4]), np.array([2, 0, 3]))
    True
    """
    if validation.sum() == 0 or training.sum() == 0:
        return False
    return compute_class_distance(validation, training) <= MAX_CLASS_DISTANCE


def compute_class_distance(validation: NDArray[np.integer], training: NDArray[np.integer]) -> Fraction:
    """Compute half the L1 distance between the class shares of two sets of counts, exactly."""
    v, d = validation.tolist(), training.tolist()
    n, m = sum(v), sum(d)
    return Fraction(sum(abs(a * m - b * n) for a, b in zip(v, d, strict=True)), 2 * n * m)


def choose_alternative(mixture: tuple[float, int], alternatives: Sequence[tuple[float, int]]) -> int | None:
    """Return the index of the alternative that gets half of the output, or None.

    Pairs are (log-likelihood on V_i in nats, samples classified correctly). An alternative must beat the mixture by
    more than 5 nats and at least 2 samples; among several the most likely one wins.
    """
    clear = [
        i
        for i, (log_likelihood, correct) in enumerate(alternatives)
        if log_likelihood > mixture[0] + GUARD_MARGIN_NATS + TIE and correct >= mixture[1] + GUARD_MARGIN_SAMPLES
    ]
    return clear[find_best([alternatives[i][0] for i in clear])] if clear else None
