"""The mixture's formula in float64 numpy, for training and as reference for the graph (fedge.md sections 7, 9, 11).

Symbols as in the specification: M candidates, C classes, n samples. The graph (`export.graph`) and the engines that run
candidates one by one (`deploy.fusion`) compute the same in float32, the gate's training in torch (`edge_agent.gate`);
tests compare them. With weights 1/M, T = 1, kappa = 0, beta = 1 and energies that are neither standardised nor clipped,
it is SCMoE-PFL's gate (scmoe_pfl.md section 11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from export.mixture import ENERGY_CLIP, MIN_ENERGY_STD, Array, Candidate, GateWeights, Guard, Mixture
from fedge.steps.fit_weights import Calibration

ZERO_WEIGHT = -2e38
"""log ω of a candidate without weight: a share only where no other candidate is usable; finite in float32."""


def calibrated(logits: NDArray[np.floating], prior: Array, by: Calibration | Candidate | Guard) -> Array:
    """Log-probabilities q = log-softmax(l / T + kappa * pi) along the last axis; NaN where a logit is not finite."""
    with np.errstate(invalid="ignore"):
        return log_softmax(np.asarray(logits, np.float64) / by.temperature + by.kappa * prior)


def raw_energies(logits: NDArray[np.floating]) -> Array:
    """logsumexp_c l_k(x), (n, M), from logits (M, n, C)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.logaddexp.reduce(np.asarray(logits, np.float64), axis=2).T)


def standardised(energies: Array, mean: Array, std: Array, clip: float = ENERGY_CLIP) -> Array:
    """Standardised energies, (n, M), between -clip and clip."""
    return np.asarray(np.clip((energies - mean) / np.maximum(std, MIN_ENERGY_STD), -clip, clip))


def log_weights(weights: Array) -> Array:
    """Log ω, (M,), finite for a weight of 0 too."""
    return np.log(weights, out=np.full(np.shape(weights), ZERO_WEIGHT), where=weights > 0)


def log_shares(
    usable: NDArray[np.bool_],
    weights: Array,
    energies: Array,
    *,
    beta: float,
    gate_scores: NDArray[np.floating] | float = 0.0,
    experts: Sequence[int] = (),
    top: int = 2,
) -> Array:
    """Log alpha, (n, M): s_k = log omega_k + beta e_k + r_k, alpha = softmax(s); -inf for a dropped candidate.

    Args:
        usable: (n, M), which candidates take part in a sample; the others share the rest.
        weights: omega, (M,).
        energies: standardised, (n, M).
        beta: strength of the energy.
        gate_scores: r, (n, M) or 0.
        experts: candidates of which only the `top` largest scores take part in a sample, the lower index on a tie.
        top: see `experts`.
    """
    scores = log_weights(weights) + np.broadcast_to(gate_scores, usable.shape)
    if beta:
        scores = scores + beta * energies
    scores = np.where(usable, scores, -np.inf)
    if len(experts) > top:
        losers = np.argsort(-scores[:, list(experts)], axis=1, kind="stable")[:, top:]
        np.put_along_axis(scores, np.asarray(experts)[losers], -np.inf, axis=1)
    some = np.isfinite(scores).any(axis=1)
    log_alpha = np.full(scores.shape, -np.inf)
    log_alpha[some] = log_softmax(scores[some])
    return log_alpha


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
    """The mixture of probabilities: log p = log sum_k alpha_k exp q_k.

    Args:
        log_q: (M, n, C) log-probabilities of the candidates; one that is not finite for a sample, or has no finite gate
            score, is dropped there. None left: p = 1/C and alpha = 0 (scmoe_pfl.md 11.2).
        weights: this and the others as in `log_shares`.
        energies: see there.
        beta: see there.
        gate_scores: see there.
        experts: see there.
        top: see there.

    Returns:
        log p, (n, C), and alpha, (n, M).
    """
    usable = np.isfinite(log_q).all(axis=2).T & np.isfinite(np.broadcast_to(gate_scores, log_q.shape[1::-1]))
    log_alpha = log_shares(usable, weights, energies, beta=beta, gate_scores=gate_scores, experts=experts, top=top)
    return mixed(log_alpha, log_q), np.exp(log_alpha)


def mixed(log_alpha: Array, log_q: Array) -> Array:
    """Log p, (n, C), from log alpha (n, M) and log q (M, n, C); candidates without a share are ignored."""
    some = np.isfinite(log_alpha).any(axis=1)
    log_p = np.full(log_q.shape[1:], -math.log(log_q.shape[2]))
    clean = np.where(np.isfinite(log_alpha).T[:, :, None], log_q, 0.0)
    log_p[some] = np.logaddexp.reduce(log_alpha.T[:, some, None] + clean[:, some], axis=0)
    return log_p


def reference(
    mixture: Mixture, logits: NDArray[np.floating], gate_scores: NDArray[np.floating]
) -> tuple[Array, Array, Array]:
    """What a mixture makes of its candidates' logits.

    Args:
        mixture: M candidates of C classes.
        logits: (M, n, C).
        gate_scores: (n, M), r_k(x).

    Returns:
        p: (n, C) class probabilities, each row sums to 1. weights: (n, M) α of the mixture (before the guard), 0 for a
        candidate that is dropped. energies: (n, M) standardised, before the clip; NaN for a dropped candidate.
    """
    candidates, prior = mixture.candidates, np.asarray(mixture.log_prior, np.float64)
    usable = np.isfinite(logits).all(axis=2).T & np.isfinite(gate_scores)
    clean = np.where(usable.T[:, :, None], np.asarray(logits, np.float64), 0.0)
    mean, std = (np.array([getattr(c, name) for c in candidates]) for name in ("energy_mean", "energy_std"))
    raw = raw_energies(clean / mixture.energy_temperature)
    energies = np.where(usable, standardised(raw, mean, std, math.inf), np.nan)
    log_alpha = log_shares(
        usable,
        np.array([c.weight for c in candidates]),
        standardised(raw, mean, std, mixture.energy_clip),
        beta=mixture.beta,
        gate_scores=gate_scores,
        experts=mixture.experts,
        top=mixture.top,
    )
    weights = np.exp(log_alpha)
    if mixture.space == "logit":
        return np.exp(log_softmax(np.einsum("nm,mnc->nc", weights, clean))), weights, energies
    log_q = np.stack([calibrated(row, prior, c) for row, c in zip(clean, candidates, strict=True)])
    p = np.exp(mixed(log_alpha, log_q))
    if mixture.guard is not None:
        k = mixture.guard.candidate
        half = np.where(usable[:, [k]], 0.5, 0.0)
        p = (1 - half) * p + half * np.exp(calibrated(clean[k], prior, mixture.guard))
    return p, weights, energies


def log_softmax(scores: Array) -> Array:
    """Along the last axis, the largest subtracted first."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def gate_scores(gate: GateWeights, features: NDArray[np.floating]) -> Array:
    """r(x), (n, M), of the pooled and flattened inputs (n, F), in float64."""
    hidden = features.astype(np.float64) @ np.asarray(gate.hidden_weight, np.float64).T + gate.hidden_bias
    scores: Array = np.maximum(hidden, 0) @ np.asarray(gate.out_weight, np.float64).T + gate.out_bias
    return scores


def gate_features(inputs: NDArray[np.floating], kernel: tuple[int, int]) -> Array:
    """The gate's inputs (n, F): means over the complete windows of `kernel`, flattened."""
    x: Array = inputs.astype(np.float64)
    if kernel != (1, 1):
        n, channels, height, width = x.shape
        rows, columns = height // kernel[0], width // kernel[1]
        cropped = x[:, :, : rows * kernel[0], : columns * kernel[1]]
        x = cropped.reshape(n, channels, rows, kernel[0], columns, kernel[1]).mean(axis=(3, 5))
    return x.reshape(len(x), -1)
