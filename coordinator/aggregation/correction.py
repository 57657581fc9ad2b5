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

from fedge.tensors import Floats

STILL = 1e-12
"""A cluster that moved by no more than this has no direction."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Corrected:
    """A model and its memory after a step, both (d,) float32. `diverged`: see `correction_step`."""

    w: Floats
    h: Floats
    diverged: bool = False


def correction_step(
    w: Floats,
    h: Floats | None,
    mean: Vector,
    directions: Sequence[Vector],
    sizes: Sequence[int],
    *,
    alpha: float,
    beta: float,
    relative: bool = False,
    tensors: Sequence[int] | None = None,
) -> Corrected:
    """Move the global model: h <- alpha h - beta dir;  w <- avg - h.

    Args:
        w: model, (d,) float32, finite.
        h: memory, (d,); None is zero. -h is a velocity.
        mean: avg - w, (d,): mean change of all clients of the round, weighted by samples.
        directions: d_i = g_i - w, (d,), mean change of each cluster that has clients in the round; at least one.
        sizes: n_i > 0, samples of each of these clusters in the round.
        alpha: memory, in [0, 1). alpha = beta = 0 is FedAvg.
        beta: length of the correction, >= 0.
        relative: the length is beta sum_i (n_i/n) |d_i| instead of beta.
        tensors: sizes of the parameter tensors, sum d, for a norm of each of them; None: one norm, of the whole vector.

    Returns:
        The step; |h| <= beta / (1 - alpha) unless `relative`. Where w would become non-finite, the old w, h = 0 and
        `diverged`: the caller logs it.

    Raises:
        ValueError: alpha or beta is out of range.

    Cost: O(number of clusters * d).
    """
    if not 0 <= alpha < 1 or not 0 <= beta < np.inf:
        raise ValueError(f"alpha {alpha} is not in [0, 1), or beta {beta} is negative or not finite")
    memory = np.zeros(len(w)) if h is None else h.astype(np.float64)
    ends = [len(w)] if tensors is None else np.cumsum(tensors).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        memory *= alpha
        for start, end in zip([0, *ends], ends, strict=False):
            parts = [d[start:end] for d in directions]
            memory[start:end] -= beta * mean_direction(parts, sizes, relative=relative)
        new, kept = (w + mean - memory).astype(np.float32), memory.astype(np.float32)
    if not (np.isfinite(new).all() and np.isfinite(kept).all()):
        return Corrected(w, np.zeros_like(w), diverged=True)
    return Corrected(new, kept)


def mean_direction(directions: Sequence[Vector], sizes: Sequence[int], *, relative: bool = False) -> Vector:
    """Mean of the clusters' unit directions, dir = sum_i (n_i/n) d_i/|d_i|, (d,), |dir| <= 1.

    A cluster with |d_i| <= 1e-12 contributes 0. `relative`: times the mean length, sum_i (n_i/n) |d_i|.

    Example:
        >>> mean_direction([np.array([3.0, 4.0]), np.array([0.0, 2.0])], [10, 30])
        array([0.15, 0.95])
    """
    n = sum(sizes)
    lengths = [float(np.linalg.norm(d)) for d in directions]
    direction = np.zeros(len(directions[0]))
    for d, length, size in zip(directions, lengths, sizes, strict=True):
        if length > STILL:
            direction += size / n / length * d
    if relative:
        direction *= sum(size / n * length for length, size in zip(lengths, sizes, strict=True))
    return direction
