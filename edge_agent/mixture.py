"""The maths of a device's mixture: prior, temperature, weights, energy, fusion, guard (fedge.md sections 6 to 11).

Pure float64 numpy, symbols as in the specification: M candidates, C classes, n samples. `export.reference` and the ONNX
graph compute the same prediction; a test compares them. With weights 1/M, T = 1, kappa = 0, beta = 1 and energies that
are neither standardised nor clipped, `fuse` is SCMoE-PFL's gate (scmoe_pfl.md section 11).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from export.mixture import ENERGY_CLIP, MIN_ENERGY_STD
from fedge.calibration import grid
from fedge.messages import Role
from fedge.steps.fit_weights import Calibration

Array = NDArray[np.float64]

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


def calibrated(logits: NDArray[np.floating], prior: Array, calibration: Calibration) -> Array:
    """Log-probabilities q = log-softmax(l / T + kappa * pi) along the last axis; NaN where a logit is not finite."""
    with np.errstate(invalid="ignore"):
        z = np.asarray(logits, np.float64) / calibration.temperature + calibration.kappa * prior
        z = z - z.max(axis=-1, keepdims=True)
        return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


def of_labels(log_p: Array, labels: NDArray[np.int64]) -> Array:
    """Log p of the true classes, (..., n), from (..., n, C). Not finite: as if every class were equally likely."""
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
        responsibility = np.exp(_log_softmax(_log(weights) + log_p))
        weights = (responsibility.sum(axis=0) + shrinkage * pooled) / (len(log_p) + shrinkage)
    return weights


# ----------------------------------------------------------------------------------------- section 9: energy and fusion


def raw_energies(logits: NDArray[np.floating]) -> Array:
    """logsumexp_c l_k(x), (n, M), from logits (M, n, C)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.logaddexp.reduce(np.asarray(logits, np.float64), axis=2).T)


def energy_statistics(energies: Array) -> tuple[Array, Array]:
    """Mean and population deviation per candidate, (M,) each, over the samples with a finite energy; none: 0 and 1."""
    means, deviations = np.zeros(energies.shape[1]), np.ones(energies.shape[1])
    for k, column in enumerate(energies.T):
        finite = column[np.isfinite(column)]
        if len(finite):
            means[k], deviations[k] = finite.mean(), finite.std()
    return means, deviations


def standardised(energies: Array, mean: Array, std: Array, clip: float = ENERGY_CLIP) -> Array:
    """Standardised energies, (n, M), between -clip and clip."""
    return np.asarray(np.clip((energies - mean) / np.maximum(std, MIN_ENERGY_STD), -clip, clip))


def fuse(
    log_q: Array,
    weights: Array,
    energies: Array,
    *,
    beta: float,
    gate_scores: NDArray[np.floating] | float = 0.0,
    experts: Sequence[int] = (),
    top: int = 2,
) -> tuple[Array, Array]:
    """The mixture: s_k = log omega_k + beta e_k + r_k, alpha = softmax(s), log p = log sum_k alpha_k exp q_k.

    Args:
        log_q: (M, n, C) log-probabilities of the candidates; a candidate with one that is not finite is dropped for
            the sample, and the others take its share. None left: p = 1/C and alpha = 0 (scmoe_pfl.md 11.2).
        weights: omega, (M,).
        energies: standardised, (n, M).
        beta: strength of the energy.
        gate_scores: r, (n, M) or 0.
        experts: candidates of which only the `top` largest scores take part in a sample, the lower index on a tie.
        top: see `experts`.

    Returns:
        log p, (n, C), and alpha, (n, M).
    """
    _, n, n_classes = log_q.shape
    scores = _log(weights) + np.broadcast_to(gate_scores, (n, len(weights)))
    if beta:
        scores = scores + beta * energies
    usable = np.isfinite(log_q).all(axis=2).T & np.isfinite(np.broadcast_to(gate_scores, scores.shape))
    scores = np.where(usable, scores, -np.inf)
    if len(experts) > top:
        losers = np.argsort(-scores[:, list(experts)], axis=1, kind="stable")[:, top:]
        np.put_along_axis(scores, np.asarray(experts)[losers], -np.inf, axis=1)
    some = np.isfinite(scores).any(axis=1)
    log_alpha = np.full(scores.shape, -np.inf)
    log_alpha[some] = _log_softmax(scores[some])
    log_p = np.full((n, n_classes), -math.log(n_classes))
    clean = np.where(usable.T[:, :, None], log_q, 0.0)
    log_p[some] = np.logaddexp.reduce(log_alpha.T[:, some, None] + clean[:, some], axis=0)
    return log_p, np.exp(log_alpha)


def _log_softmax(scores: Array) -> Array:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _log(weights: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(weights))


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
    """Index of the alternative that takes half of the output, or None.

    Pairs are (log-likelihood on V_i in nats, samples classified correctly). An alternative needs more than 5 nats and
    at least 2 samples above the mixture; of several the most likely one is taken.
    """
    clear = [
        i
        for i, (log_likelihood, correct) in enumerate(alternatives)
        if log_likelihood > mixture[0] + GUARD_MARGIN_NATS + TIE and correct >= mixture[1] + GUARD_MARGIN_SAMPLES
    ]
    return clear[first_best([alternatives[i][0] for i in clear])] if clear else None


def guarded(p_mixture: Array, p_alternative: Array) -> Array:
    """Half the mixture and half the alternative."""
    return 0.5 * p_mixture + 0.5 * p_alternative
