"""Rules of averaging that withstand a minority of hostile devices.

Source: median and trimmed mean: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018; multi-Krum: Blanchard
et al., "Machine Learning with Adversaries", NeurIPS 2017; centred clipping: Karimireddy, He, Jaggi, "Learning from
History for Byzantine Robust Optimization", ICML 2021. Its radius comes from the cohort: no constant fits all networks.
A rule counts every device once, because a device's number of samples is only its own claim. Clipping keeps the weights,
and bounds them (`bound_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.mean import BLOCK
from fedge.tensors.layout import Floats

FACTOR: Final = 2.0
"""Most weight of a device in an average, and farthest that a device moves it, in multiples of the cluster's median. The
limit rarely acts if sizes are alike (docs/results/attacks.md)."""
FEWEST: Final = 3
"""Fewest numbers whose median says what is usual."""
ITERATIONS: Final = 3
"""L, the number of iterations of centred clipping."""

Vector = NDArray[np.float64]


def compute_typical(values: Sequence[float], *, zeros: bool = False) -> float:
    """Return the median of what devices report; infinite for fewer than three values, or if all are 0.

    `zeros`: a 0 counts as any other number. Otherwise zeros are ignored, and of one or two positive values the smaller
    is returned.

    Example:
        >>> compute_typical([0.0, 1.0, 1e6]), compute_typical([1.0, 2.0, 9.0, 0.0]), compute_typical([1.0, 9.0])
        (1.0, 2.0, inf)
        >>> compute_typical([0.0, 0.0, 1e6], zeros=True)
        0.0
    """
    positive = [value for value in values if value > 0]
    if len(values) < FEWEST or not positive:
        return math.inf
    if zeros or len(positive) >= FEWEST:
        return float(np.median(values if zeros else positive))
    return min(positive)


def compute_factors(shares: Sequence[float], times: float = FACTOR, *, zeros: bool = False) -> list[float]:
    """Return the factor of each update, min(1, 2 median / share); all 1 for fewer than three.

    `shares`: how far each update moves the sum, its weight times its norm. `times`: what the median is multiplied by.
    `zeros`: as in `compute_typical`.

    Example:
        >>> compute_factors([1.0, 2.0, 1.0, 10.0])
        [1.0, 1.0, 1.0, 0.3]
    """
    bound = times * compute_typical(shares, zeros=zeros)
    return [bound / share if share > bound else 1.0 for share in shares]


def bound_sizes(sizes: Sequence[float], times: float = FACTOR) -> list[float]:
    """Limit weights to twice the median, so that no single claim decides an average.

    Example:
        >>> bound_sizes([10, 20, 10, 1000])
        [10, 20, 10, 30.0]
    """
    most = times * compute_typical(sizes)
    return [min(size, most) for size in sizes]


def count_hostile(n: int, share: float) -> int:
    """Return f, the hostile devices assumed in a cohort of n: the share, rounded up, but a minority.

    Example:
        >>> count_hostile(10, 0.2), count_hostile(4, 0.2), count_hostile(3, 0.4), count_hostile(10, 0.0)
        (2, 1, 1, 0)
    """
    return min(math.ceil(share * n - 1e-9), (n - 1) // 2)


def median(rows: Sequence[Floats]) -> Vector:
    """Compute the median of each coordinate, (d,). Cost: O(n d log n) time, 8 n * BLOCK bytes."""
    found = np.empty(len(rows[0]))
    for block in _make_blocks(len(found)):
        found[block] = np.median(_stack_rows(rows, block), axis=0)
    return found


def trimmed_mean(rows: Sequence[Floats], f: int) -> Vector:
    """Compute each coordinate's mean without its f largest and f smallest values, (d,); 2 f < n (`count_hostile`).

    Example:
        >>> trimmed_mean([np.float32([v]) for v in (1, 2, 3, 100)], 1)
        array([2.5])
    """
    found = np.empty(len(rows[0]))
    for block in _make_blocks(len(found)):
        found[block] = np.sort(_stack_rows(rows, block), axis=0)[f : len(rows) - f].mean(axis=0)
    return found


def multi_krum(rows: Sequence[Floats], f: int) -> list[int]:
    """Return the positions of the n - f vectors whose mean is multi-Krum's, ascending.

    The score of a vector is the sum of the squared distances to its n - f - 1 nearest others. The vectors with the
    lowest scores are chosen, the first on a tie. Departure: the paper and ByzFL take n - f - 2. f < n - 1, as
    `count_hostile` returns.

    Cost: O(n^2 d) time, 8 n (n + BLOCK) bytes.
    """
    n = len(rows)
    squares = np.zeros((n, n))
    for block in _make_blocks(len(rows[0])):
        part = _stack_rows(rows, block)
        gram = part @ part.T
        own = np.diag(gram)
        squares += np.maximum(own[:, None] + own[None] - 2 * gram, 0.0)
    np.fill_diagonal(squares, np.inf)
    scores = np.sort(squares, axis=1)[:, : n - f - 1].sum(axis=1)
    return sorted(np.argsort(scores, kind="stable")[: n - f].tolist())


def centred_clipping(rows: Sequence[Floats], radius: float | None = None, iterations: int = ITERATIONS) -> Vector:
    """Iterate v <- v + mean of (x_i - v) min(1, tau / |x_i - v|) from v = 0, the model as it is, (d,).

    Args:
        rows: x_i, changes of a model.
        radius: tau; if None, in each iteration the median distance from v.
        iterations: L >= 1.

    Cost: O(L n d) time, 8 d bytes.
    """
    v = np.zeros(len(rows[0]))
    for _ in range(iterations):
        distances = [
            math.sqrt(sum(float(np.square(row[b] - v[b]).sum()) for b in _make_blocks(len(v)))) for row in rows
        ]
        tau = float(np.median(distances)) if radius is None else radius
        step = np.zeros(len(v))
        for row, distance in zip(rows, distances, strict=True):
            share = min(1.0, tau / distance) / len(rows) if distance > 0 else 0.0
            for block in _make_blocks(len(v)):
                step[block] += share * (row[block] - v[block])
        v += step
    return v


def _make_blocks(d: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, d, BLOCK)]


def _stack_rows(rows: Sequence[Floats], block: slice) -> Vector:
    return np.stack([row[block] for row in rows]).astype(np.float64)
