"""The mixture's formula in float64 numpy: the oracle that the ONNX graph is compared with (fedge.md sections 9, 11).

Written for reading, from the specification, independently of the graph.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from export.mixture import MIN_ENERGY_STD, Array, GateWeights, Mixture

ZERO_WEIGHT = -2e38
"""log ω of a candidate without weight: a share only where no other candidate is usable; finite in float32."""


def reference(
    mixture: Mixture, logits: NDArray[np.floating], gate_scores: NDArray[np.floating]
) -> tuple[Array, Array, Array]:
    """Fuse the candidates' logits.

    Args:
        mixture: M candidates of C classes.
        logits: (M, n, C).
        gate_scores: (n, M), r_k(x).

    Returns:
        p: (n, C) class probabilities, each row sums to 1. weights: (n, M) α of the mixture (before the guard), 0 for a
        candidate that is dropped. energies: (n, M) standardised, before the clip; NaN for a dropped candidate.
    """
    logits = np.asarray(logits, np.float64)
    usable = np.isfinite(logits).all(axis=2).T & np.isfinite(gate_scores)
    clean = np.where(usable.T[:, :, None], logits, 0.0)
    scores, energies = _scores(mixture, clean, np.where(usable, gate_scores, 0.0))
    weights = _weights(mixture, np.where(usable, scores, -np.inf))
    temperature = [c.temperature for c in mixture.candidates]
    kappa = [c.kappa for c in mixture.candidates]
    if mixture.space == "logit":
        p = _softmax(np.einsum("nm,mnc->nc", weights, clean))
        return p, weights, np.where(usable, energies, np.nan)
    q = np.stack([_probabilities(row, t, k, mixture) for row, t, k in zip(clean, temperature, kappa, strict=True)])
    p = np.einsum("nm,mnc->nc", weights, q)
    p[~usable.any(axis=1)] = 1.0 / p.shape[1]
    if mixture.guard is not None:
        guard = mixture.guard
        half = np.where(usable[:, [guard.candidate]], 0.5, 0.0)
        p = (1 - half) * p + half * _probabilities(clean[guard.candidate], guard.temperature, guard.kappa, mixture)
    return p, weights, np.where(usable, energies, np.nan)


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


def _scores(mixture: Mixture, logits: Array, gate: NDArray[np.floating]) -> tuple[Array, Array]:
    """s_k = log ω_k + β clip(ẽ_k) + r_k and ẽ_k, both (n, M)."""
    mean = np.array([c.energy_mean for c in mixture.candidates])
    std = np.array([c.energy_std for c in mixture.candidates])
    energies = (np.logaddexp.reduce(logits / mixture.energy_temperature, axis=2).T - mean) / np.maximum(
        std, MIN_ENERGY_STD
    )
    clipped = np.clip(energies, -mixture.energy_clip, mixture.energy_clip)
    log_weight = np.array([np.log(c.weight) if c.weight > 0 else ZERO_WEIGHT for c in mixture.candidates])
    return log_weight + mixture.beta * clipped + gate, energies


def _weights(mixture: Mixture, scores: Array) -> Array:
    """α: softmax over the selected candidates; of the experts the `top` largest, the lower index on a tie."""
    experts = list(mixture.experts)
    if len(experts) > mixture.top:
        order = np.argsort(-scores[:, experts], axis=1, kind="stable")[:, mixture.top :]
        np.put_along_axis(scores, np.array(experts)[order], -np.inf, axis=1)
    largest = scores.max(axis=1, keepdims=True)
    shares = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = shares.sum(axis=1, keepdims=True)
    weights: Array = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
    return weights


def _probabilities(logits: Array, temperature: float, kappa: float, mixture: Mixture) -> Array:
    """The candidate's exp q_k = softmax(l / T + κ π), (n, C)."""
    return _softmax(logits / temperature + kappa * np.asarray(mixture.log_prior, np.float64))


def _softmax(z: Array) -> Array:
    """Along the last axis."""
    z = np.exp(z - z.max(axis=1, keepdims=True))
    p: Array = z / z.sum(axis=1, keepdims=True)
    return p
