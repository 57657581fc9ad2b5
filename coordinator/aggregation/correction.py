"""CFIC's server step: the weighted mean, and a momentum step along the mean of the clusters' unit directions.

Source: Yang et al., "Cluster Federated Learning with Intra-Cluster Correction" (CFIC), CMC 2025, Eq. 3-5;
specification docs/methods/cfic.md, section 6. Departure: cluster models are means over their own members of the round
(section 9, point 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedge.tensors.layout import Floats

STILL = 1e-12
"""Longest change, as an L2 norm, of a cluster that counts as still and has no direction."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CorrectedModel:
    """A model and its memory after a step, both (d,) float32. `diverged`: see `apply_correction`."""

    w: Floats
    h: Floats
    diverged: bool = False


def apply_correction(
    w: Floats,
    h: Floats | None,
    mean: Vector,
    direction: Vector,
    *,
    alpha: float,
    beta: float,
) -> CorrectedModel:
    """Move the global model: h <- alpha h - beta dir;  w <- avg - h.

    Args:
        w: model, (d,) float32, finite.
        h: memory, (d,); None is zero. -h is a velocity.
        mean: avg - w, (d,): mean change of all clients of the round, weighted by samples.
        direction: dir, (d,), of `compute_mean_direction`.
        alpha: memory, in [0, 1). alpha = beta = 0 is FedAvg.
        beta: length of the correction, >= 0.

    Returns:
        The step; |h| <= beta / (1 - alpha) if |dir| <= 1. If w or h would become non-finite: the old w, h = 0 and
        `diverged`, which the caller logs.

    Raises:
        ValueError: alpha or beta is out of range.

    Cost: O(d).
    """
    if not 0 <= alpha < 1 or not 0 <= beta < np.inf:
        raise ValueError(f"alpha {alpha} is not in [0, 1), or beta {beta} is negative or not finite")
    memory = np.zeros(len(w)) if h is None else h.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        memory = alpha * memory - beta * direction
        new, kept = (w + mean - memory).astype(np.float32), memory.astype(np.float32)
    if not (np.isfinite(new).all() and np.isfinite(kept).all()):
        return CorrectedModel(w, np.zeros_like(w), diverged=True)
    return CorrectedModel(new, kept)


def compute_mean_direction(changes: Sequence[Vector], sizes: Sequence[float]) -> Vector:
    """Compute the mean of the clusters' unit directions, dir = sum_i (n_i/n) d_i/|d_i|, (d,), |dir| <= 1.

    A cluster with |d_i| <= 1e-12 contributes 0.

    Args:
        changes: d_i = g_i - w, (d,), mean change of each cluster that has clients in the round; at least one.
        sizes: n_i > 0, weight of each of these clusters in the round.

    Cost: O(number of clusters * d).

    Example:
        >>> compute_mean_direction([np.array([3.0, 4.0]), np.array([0.0, 2.0])], [10, 30])
        array([0.15, 0.95])
    """
    n = sum(sizes)
    direction = np.zeros(len(changes[0]))
    with np.errstate(over="ignore", invalid="ignore"):
        for d, size in zip(changes, sizes, strict=True):
            if (length := float(np.linalg.norm(d))) > STILL:
                direction += size / n / length * d
    return direction
