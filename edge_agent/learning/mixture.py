"""Maths by which a device fits its mixture: weights, energy, guard (fedge.md sections 6 to 11).

Pure float64 numpy, symbols as in the specification: M candidates, n samples. What a candidate's outputs say is up to
the task's problem (`fedge.data.problems`). The mixture's own formula is in `fedge.bundle.formula`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.formula import NUMPY, mix
from fedge.data.problems.maths import Array, log_softmax
from fedge.wire.messages import Role

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


def compute_shares(scores: Array, usable: NDArray[np.bool_]) -> Array:
    """Return alpha = softmax(s) over the usable candidates, (n, M); zeros where none is usable.

    `scores`: s = log omega + beta e, (n, M). `usable`: whether all of a candidate's outputs are finite, (n, M).
    """
    some = usable.any(axis=1, keepdims=True)
    return np.where(usable, np.exp(log_softmax(np.where(usable | ~some, scores, -np.inf))), 0.0)


def compute_mixture_likelihood(log_p: Array, scores: Array, unknown: Array) -> Array:
    """Return log sum_k alpha_k exp l_k, (n,), the mixture's log-likelihood of its targets (section 9).

    Args:
        log_p: l of each candidate, (n, M); a candidate that is not finite is dropped for that sample.
        scores: s = log omega + beta e, (n, M).
        unknown: (n,), what counts where no candidate is usable.
    """
    usable = np.isfinite(log_p)
    some = usable.any(axis=1)
    found = unknown.copy()
    masked = np.where(usable, scores, -np.inf)[some]
    found[some] = mix(np.where(usable, log_p, 0.0)[some], masked, NUMPY)
    return found


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


def choose_alternative(mixture: tuple[float, float], alternatives: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the alternative that gets half of the output, or None.

    Pairs are (log-likelihood on V_i in nats, score times samples: those classified correctly). An alternative must beat
    the mixture by more than 5 nats and at least 2 samples; among several the most likely one wins.
    """
    clear = [
        i
        for i, (log_likelihood, correct) in enumerate(alternatives)
        if log_likelihood > mixture[0] + GUARD_MARGIN_NATS + TIE and correct >= mixture[1] + GUARD_MARGIN_SAMPLES - TIE
    ]
    return clear[find_best([alternatives[i][0] for i in clear])] if clear else None
