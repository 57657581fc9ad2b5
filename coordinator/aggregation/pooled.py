"""Choices made once for all devices, because single devices have too few validation samples.

Source: docs/methods/fedge.md, sections 5 and 7 to 9. The trial says whether experts for clusters are worth having
(section 5, steps 2 and 5). Label skew alone causes no split, because the trial's losses include the device's class
prior, so that the global model already explains the skew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.rules import FEWEST, bound_sizes, compute_factors
from fedge.data.problems.maths import minimise_on_simplex

K = TypeVar("K")

MARGIN = 1e-9
"""A choice must be better by more than this, so that rounding decides no tie (section 2)."""

ENOUGH_DEVICES = 4
"""Fewest devices for a split; with fewer, t has no meaning (section 12)."""

Z, ETA_0, SLOPE = 1.0, 0.70, 20.0  # section 13


def compute_trial_statistic(deltas: Sequence[float]) -> float | None:
    """Compute t = mean(delta) / (sd(delta)/sqrt(n) + 1e-9), sd with n - 1, of bounded deltas (`clip_outliers`).

    `deltas`: loss(G) - loss(E_k) of each device that has validation samples, finite, by ascending device id. None for
    fewer than two devices.

    Example:
        >>> round(compute_trial_statistic([0.3, 0.2, 0.0, 0.3]), 6)
        2.828427
    """
    if len(deltas) < 2:
        return None
    deltas = clip_outliers(deltas)
    spread = float(np.std(deltas, ddof=1)) / math.sqrt(len(deltas))
    return float(np.mean(deltas)) / (spread + 1e-9)


def clip_outliers(deltas: Sequence[float]) -> Sequence[float]:
    """Move outliers to 6 median deviations from the median; three or fewer deltas stay unchanged.

    6 median deviations are 4 standard deviations of a normal sample. If most deltas are equal, none is moved.

    Example:
        >>> clip_outliers([1.0, 2.0, 3.0, 2.0, 50.0])
        [1.0, 2.0, 3.0, 2.0, 8.0]
    """
    values = np.asarray(deltas, np.float64)
    middle = float(np.median(values))
    reach = 6 * float(np.median(np.abs(values - middle)))
    if len(values) < ENOUGH_DEVICES or not reach:
        return deltas
    return [min(max(delta, middle - reach), middle + reach) for delta in deltas]


def wants_split(statistic: float | None, separability: float, n_devices: int) -> bool:
    """Return whether the trial speaks for a split: t + 20 (eta - 0.70) > 1.

    Clear groups (eta >= 0.9) are split unless the trial speaks strongly against; similarities without structure
    (eta about 0.62) need t > 2.6.

    Args:
        statistic: t; None if fewer than two devices answered.
        separability: eta, in [0, 1].
        n_devices: devices that take part in the method; fewer than four are never split.
    """
    if statistic is None or n_devices < ENOUGH_DEVICES:
        return False
    return statistic + SLOPE * (separability - ETA_0) > Z


def choose_pooled(losses: Sequence[Sequence[float]]) -> int:
    """Return the position of the choice with the smallest total loss; the first on a tie.

    With three devices or more, no device's influence exceeds twice the median. A device's losses count relative to its
    best choice, and the largest of these is its influence.

    `losses`: (n_devices, n_choices), sums of validation losses, by ascending device id; finite; at least one device.

    Example:
        >>> choose_pooled([[3.0, 1.0, 2.0], [1.0, 3.0, 1.0]])
        2
    """
    worse = np.asarray(losses, np.float64)
    if len(worse) >= FEWEST:
        worse = worse - worse.min(axis=1, keepdims=True)
        worse = worse * np.asarray(compute_factors(worse.max(axis=1).tolist()))[:, None]
    totals = np.sum(worse, axis=0)
    best = 0
    for choice, total in enumerate(totals):
        if total < totals[best] - MARGIN:
            best = choice
    return best


def pool_weights(weights: Sequence[tuple[Mapping[K, float], int]]) -> dict[K, float]:
    """Compute the mean mixture weights, u = sum m_i omega_i / sum m_i; no m_i exceeds twice the median.

    `weights`: (omega_i, m_i) of at least one device, by ascending id; omega_i sums to 1, m_i validation samples. A
    candidate that a device lacks weighs 0 on that device. If no device has validation samples, all devices count alike.

    Example:
        >>> pool_weights([({"private": 0.2, "global": 0.8}, 10), ({"private": 0.6, "global": 0.4}, 30)])
        {'private': 0.5, 'global': 0.5}
    """
    shares = bound_sizes([float(m) for _, m in weights])
    if not sum(shares):
        shares = [1.0] * len(weights)
    candidates = list(dict.fromkeys(candidate for omega, _ in weights for candidate in omega))
    return {
        candidate: sum(share * omega.get(candidate, 0.0) for (omega, _), share in zip(weights, shares, strict=True))
        / sum(shares)
        for candidate in candidates
    }


def pool_means(sums: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Compute the means over the samples of all devices, (S,), of sums (N, S) over each device's samples.

    No device counts as more than twice the median of the samples, and what its samples say is moved to within 6 median
    deviations of the median (`clip_outliers`). Zeros without samples.

    Example:
        >>> pool_means(np.array([[2.0, 4.0], [6.0, 0.0]]), [1, 3]).tolist()
        [2.0, 1.0]
    """
    shares = np.array(bound_sizes([float(m) for m in sizes]))
    if not shares.sum():
        return np.zeros(sums.shape[1])
    there = np.flatnonzero(shares)
    means = sums[there] / np.array(sizes, np.float64)[there, np.newaxis]
    bounded = np.array([clip_outliers(column.tolist()) for column in means.T])
    return np.asarray(bounded @ shares[there] / shares.sum())


def pool_products(
    products: Sequence[tuple[Mapping[K, Mapping[K, float]], int]],
) -> dict[K, dict[K, float]]:
    """Compute the means over the samples of all devices of what devices sum over theirs, for each pair of candidates.

    `products`: sums and numbers of samples by device, as for `pool_means`; a pair counts over the devices that have it.
    """
    candidates = list(dict.fromkeys(candidate for own, _ in products for candidate in own))
    found: dict[K, dict[K, float]] = {}
    for a in candidates:
        for b in candidates:
            there = [(own[a][b], m) for own, m in products if b in own.get(a, {})]
            if there:
                value = pool_means(np.array([[value] for value, _ in there]), [m for _, m in there])
                found.setdefault(a, {})[b] = float(value[0])
    return found


def stack_weights(products: Mapping[K, Mapping[K, float]], candidates: Sequence[K]) -> dict[K, float]:
    """Return the weights of a stack of these candidates, of sum 1, with the smallest mean squared error.

    Candidates whose products are unknown get none; all are equal if no product is known.
    """
    known = [a for a in candidates if a in products and all(b in products[a] for b in products)]
    if not known:
        return {candidate: 1 / len(candidates) for candidate in candidates}
    matrix = np.array([[products[a][b] for b in known] for a in known])
    own = dict(zip(known, minimise_on_simplex(matrix).tolist(), strict=True))
    return {candidate: min(own.get(candidate, 0.0), 1.0) for candidate in candidates}
