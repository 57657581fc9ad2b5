"""Choices made once from sums over all devices, because single devices have too few validation samples.

Source: docs/methods/fedge.md, sections 7 to 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from coordinator.aggregation.rules import FEWEST, bounded, factors

K = TypeVar("K")

MARGIN = 1e-9
"""A choice must be better by more than this, so that rounding decides no tie (section 2)."""


def pooled_choice(losses: Sequence[Sequence[float]]) -> int:
    """Position of the choice with the smallest total loss; the first on a tie.

    With three devices or more, no device's influence exceeds twice the median. A device's losses count relative to its
    best choice, and the largest of these is its influence.

    `losses`: (n_devices, n_choices), sums of validation losses, by ascending device id; finite; at least one device.

    Example:
        >>> pooled_choice([[3.0, 1.0, 2.0], [1.0, 3.0, 1.0]])
        2
    """
    worse = np.asarray(losses, np.float64)
    if len(worse) >= FEWEST:
        worse = worse - worse.min(axis=1, keepdims=True)
        worse = worse * np.asarray(factors(worse.max(axis=1).tolist()))[:, None]
    totals = np.sum(worse, axis=0)
    best = 0
    for choice, total in enumerate(totals):
        if total < totals[best] - MARGIN:
            best = choice
    return best


def pooled_weights(weights: Sequence[tuple[Mapping[K, float], int]]) -> dict[K, float]:
    """Mean of the devices' mixture weights, u = sum m_i omega_i / sum m_i; no m_i counts more than twice the median.

    `weights`: (omega_i, m_i) of at least one device, by ascending id; omega_i sums to 1, m_i validation samples. A
    candidate that a device does not have weighs 0 there. If no device has validation samples, all count alike.

    Example:
        >>> pooled_weights([({"private": 0.2, "global": 0.8}, 10), ({"private": 0.6, "global": 0.4}, 30)])
        {'private': 0.5, 'global': 0.5}
    """
    shares = bounded([float(m) for _, m in weights])
    if not sum(shares):
        shares = [1.0] * len(weights)
    candidates = list(dict.fromkeys(candidate for omega, _ in weights for candidate in omega))
    return {
        candidate: sum(share * omega.get(candidate, 0.0) for (omega, _), share in zip(weights, shares, strict=True))
        / sum(shares)
        for candidate in candidates
    }
