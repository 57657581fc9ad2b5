"""How a device fits its mixture: prior, temperature, weights, energy, guard (fedge.md sections 6 to 11).

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

from fedge.bundle.calibration import grid
from fedge.bundle.formula import Array, calibrated, log_softmax, log_weights
from fedge.steps.mixture.fit_weights import Calibration
from fedge.wire.messages import Role

PLAIN: Final = Calibration(temperature=1.0, kappa=0.0)
"""A model's own probabilities."""
EM_STEPS: Final = 60
BASE_CHECKPOINT: Final = 1  # 40 steps, section 6
STEPS_MARGIN_NATS: Final = 2.0
GUARD_MARGIN_NATS: Final = 5.0
GUARD_MARGIN_SAMPLES: Final = 2
MAX_CLASS_DISTANCE: Final = Fraction(2, 5)
TIE: Final = 1e-9
"""Better means by more than this (section 2)."""


def first_best(values: Sequence[float]) -> int:
    """Index of the largest value, the first on a tie."""
    best = 0
    for i, value in enumerate(values):
        if value > values[best] + TIE:
            best = i
    return best


def first_ranked(ranks: Sequence[tuple[float, float]]) -> int:
    """Index of the best rank: the first number decides, then the second; the first on a tie."""
    best = max(first for first, _ in ranks)
    return first_best([second if first == best else -math.inf for first, second in ranks])


def choose_steps(log_likelihoods: Sequence[float]) -> int:
    """Index of the checkpoint to keep: the second (40 steps), unless another is better by more than 2 nats (section 6).

    >>> choose_steps([-10, -9, -8, -7.5])
    1
    """
    bonus = [STEPS_MARGIN_NATS if i == BASE_CHECKPOINT else 0.0 for i in range(len(log_likelihoods))]
    return first_best([value + extra for value, extra in zip(log_likelihoods, bonus, strict=True)])


# ------------------------------------------------------------------------------------- section 7: prior and temperature


def log_prior(counts: NDArray[np.integer]) -> Array:
    """Log class shares pi of class counts c, (C,): half a sample is added to each class. No counts: uniform."""
    smoothed = np.asarray(counts, np.float64) + 0.5
    return np.asarray(np.log(smoothed / smoothed.sum()))


def of_labels(log_p: Array, labels: NDArray[np.int64]) -> Array:
    """Log p of the true classes, (..., n), from (..., n, C). Non-finite rows count as uniform."""
    picked = log_p[..., np.arange(len(labels)), labels]
    return np.asarray(np.where(np.isfinite(picked), picked, -math.log(log_p.shape[-1])))


def total_loss(logits: NDArray[np.floating], labels: NDArray[np.int64], prior: Array, chosen: Calibration) -> float:
    """Sum of the cross-entropies of one candidate, (n, C) logits, in nats."""
    return -float(of_labels(calibrated(logits, prior, chosen), labels).sum())


def grid_losses(logits: NDArray[np.floating], labels: NDArray[np.int64], prior: Array, role: Role) -> tuple[float, ...]:
    """The sums of losses over the (T, kappa) grid of a role (section 7)."""
    return tuple(total_loss(logits, labels, prior, chosen) for chosen in grid(role))


# --------------------------------------------------------------------------------------------------- section 8: weights


def spread(pooled: Mapping[Role, float], present: Sequence[Role]) -> Array:
    """Pooled weights u of the candidates that a device has, (M,), sum 1.

    The shares of missing candidates go to the others in proportion (section 12); if nothing is left, all are equal.

    Raises:
        ValueError: no candidate is present.
    """
    if not present:
        raise ValueError("the device has none of the candidates")
    shares = np.array([pooled.get(role, 0.0) for role in present], np.float64)
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(present), 1 / len(present))


def em_weights(log_p: Array, pooled: Array, shrinkage: float) -> Array:
    """Mixture weights omega, (M,): EM from u for sum_n log sum_k omega_k p_nk + a sum_k u_k log omega_k (section 8).

    Args:
        log_p: (n, M) log-probabilities of the true classes; n may be 0.
        pooled: u, (M,), sum 1.
        shrinkage: a > 0, in samples; every omega_k is at least a u_k / (n + a).
    """
    weights = pooled
    for _ in range(EM_STEPS if len(log_p) else 0):
        responsibility = np.exp(log_softmax(log_weights(weights) + log_p))
        weights = (responsibility.sum(axis=0) + shrinkage * pooled) / (len(log_p) + shrinkage)
    return weights


# ------------------------------------------------------------------------------------------------- section 9: energy


def energy_statistics(energies: Array) -> tuple[Array, Array]:
    """Mean and population deviation per candidate, (M,) each, over samples with finite energy; without any, 0 and 1."""
    means, deviations = np.zeros(energies.shape[1]), np.ones(energies.shape[1])
    for k, column in enumerate(energies.T):
        finite = column[np.isfinite(column)]
        if len(finite):
            means[k], deviations[k] = finite.mean(), finite.std()
    return means, deviations


# ---------------------------------------------------------------------------------------------------- section 11: guard


def representative(validation: NDArray[np.integer], training: NDArray[np.integer]) -> bool:
    """Whether the class shares of V_i are within 0.4 of those of D_i; counts, (C,) each. Exactly 0.4 is within.

    >>> representative(np.array([0, 1, 4]), np.array([2, 0, 3]))
    True
    """
    if validation.sum() == 0 or training.sum() == 0:
        return False
    return class_distance(validation, training) <= MAX_CLASS_DISTANCE


def class_distance(validation: NDArray[np.integer], training: NDArray[np.integer]) -> Fraction:
    """Half the L1 distance between the class shares of two sets of counts, each with at least one sample; exact."""
    v, d = validation.tolist(), training.tolist()
    n, m = sum(v), sum(d)
    return Fraction(sum(abs(a * m - b * n) for a, b in zip(v, d, strict=True)), 2 * n * m)


def guard(mixture: tuple[float, int], alternatives: Sequence[tuple[float, int]]) -> int | None:
    """Index of the alternative that gets half of the output, or None.

    Pairs are (log-likelihood on V_i in nats, samples classified correctly). An alternative must beat the mixture by
    more than 5 nats and at least 2 samples; among several the most likely one wins.
    """
    clear = [
        i
        for i, (log_likelihood, correct) in enumerate(alternatives)
        if log_likelihood > mixture[0] + GUARD_MARGIN_NATS + TIE and correct >= mixture[1] + GUARD_MARGIN_SAMPLES
    ]
    return clear[first_best([alternatives[i][0] for i in clear])] if clear else None
