"""The label shares of D_L, exact or with noise.

Source: Wolfrath et al., "HACCS", IPDPS 2022, section IV-A; baselines.md section 26.
"""

from __future__ import annotations

import numpy as np
from msgspec import UNSET
from numpy.typing import ArrayLike, NDArray

from edge_agent.device.device import Device
from edge_agent.privacy.answers import take_noise
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.label_shares import LabelShares, LabelSharesMeasured
from fedge.wire.messages import Why


def run(device: Device, action: LabelShares) -> Result:
    """Return the shares of the classes in D_L, (C,)."""
    exact, n = device.data.count_shared_classes(device.task.n_classes), device.data.n_shared
    if not n:
        return Declined(why=Why.NO_DATA)
    told: ArrayLike = exact
    if action.privacy is not UNSET:
        noise = take_noise(device, action.privacy, "training")
        if isinstance(noise, Declined):
            return noise
        told = noise.add_to_counts(exact)
    return LabelSharesMeasured(shares=tuple(compute_shares(told).tolist()), n_samples=n)


def compute_shares(counts: ArrayLike) -> NDArray[np.float64]:
    """Compute shares of noisy counts, (C,) of any sign, C >= 1: counts below 0 are 0; equal shares if none is above.

    Example:
        >>> compute_shares([3, -1, 1]).tolist(), compute_shares([-2, -1]).tolist()
        ([0.75, 0.0, 0.25], [0.5, 0.5])
    """
    known = np.maximum(np.asarray(counts, np.float64), 0.0)
    return known / known.sum() if known.any() else np.full(len(known), 1 / len(known))
