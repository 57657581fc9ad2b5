"""The trial: whether experts for clusters are worth having.

Source: docs/methods/fedge.md, section 5, steps 2 and 5. Label skew alone causes no split: the trial's losses include
the device's class prior, so the global model already explains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

ENOUGH_DEVICES = 4
"""With fewer, t has no meaning and nothing is split (section 12)."""

Z, ETA_0, SLOPE = 1.0, 0.70, 20.0  # section 13


def trial_statistic(deltas: Sequence[float]) -> float | None:
    """Trial statistic t = mean(delta) / (sd(delta)/sqrt(n) + 1e-9), sd with n - 1, of bounded deltas (`within`).

    `deltas`: loss(G) - loss(E_k) of each device that has validation samples, finite, by ascending device id. None for
    fewer than two devices.

    Example:
        >>> round(trial_statistic([0.3, 0.2, 0.0, 0.3]), 6)
        2.828427
    """
    if len(deltas) < 2:
        return None
    deltas = within(deltas)
    spread = float(np.std(deltas, ddof=1)) / math.sqrt(len(deltas))
    return float(np.mean(deltas)) / (spread + 1e-9)


def within(deltas: Sequence[float]) -> Sequence[float]:
    """The deltas, with outliers moved to 6 median deviations from the median; three or fewer stay unchanged.

    6 median deviations are 4 standard deviations of a normal sample. Where most deltas are equal, none is moved.

    Example:
        >>> within([1.0, 2.0, 3.0, 2.0, 50.0])
        [1.0, 2.0, 3.0, 2.0, 8.0]
    """
    told = np.asarray(deltas, np.float64)
    middle = float(np.median(told))
    reach = 6 * float(np.median(np.abs(told - middle)))
    if len(told) < ENOUGH_DEVICES or not reach:
        return deltas
    return [min(max(delta, middle - reach), middle + reach) for delta in deltas]


def wants_split(statistic: float | None, separability: float, n_devices: int) -> bool:
    """Whether t + 20 (eta - 0.70) > 1.

    Clear groups (eta >= 0.9) are split unless the trial speaks strongly against; similarities without structure
    (eta about 0.62) need t > 2.6.

    Args:
        statistic: t; None: fewer than two devices answered.
        separability: eta, in [0, 1].
        n_devices: devices that take part in the method; fewer than four are never split.
    """
    if statistic is None or n_devices < ENOUGH_DEVICES:
        return False
    return statistic + SLOPE * (separability - ETA_0) > Z
