"""The Jensen-Shannon-type divergence of two sparsity profiles (FedEPC, fedepc.md section 4.1).

Both sides use it. The coordinator clusters by it (AIDC); a device measures the divergence between two halves of its own
data, which calibrates the scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def compute_divergence(s: ArrayLike, r: ArrayLike) -> NDArray[np.float64]:
    """Compute D_raw(s, r) = sum_c h(p_c, o_c) + mean_c h(s_c, r_c), where p and o are the normalised profiles.

    Only the second term depends on the overall level of sparsity. D_raw is symmetric, 0 for equal profiles, and at most
    2 ln 2; its root obeys the triangle inequality.

    Args:
        s: profile (..., q), shares in [0, 1]; leading axes broadcast against those of `r`.
        r: profile (..., q) with the same q >= 1.

    Returns:
        The divergence (...), float64, in nats.

    Raises:
        ValueError: the profiles differ in length, are empty, not finite, or outside [0, 1].

    Source: fedepc.md section 4.1, Eq. (3)-(4).

    >>> round(float(compute_divergence([1, 0], [0, 1])), 6)
    1.039721
    """
    first, second = _require_profiles(s), _require_profiles(r)
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(f"profiles of {first.shape[-1]} and {second.shape[-1]} units cannot be compared")
    pattern = _compute_elements(_normalise(first), _normalise(second)).sum(axis=-1)
    level = _compute_elements(first, second).mean(axis=-1)
    return np.asarray(pattern + level)


def _require_profiles(values: ArrayLike) -> NDArray[np.float64]:
    profiles = np.asarray(values, dtype=np.float64)
    if profiles.ndim == 0 or profiles.shape[-1] == 0:
        raise ValueError("a profile needs at least one unit")
    if not ((profiles >= 0) & (profiles <= 1)).all():
        raise ValueError("a profile holds shares in [0, 1]")
    return profiles


def _normalise(profiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide profiles by their sums; an all-zero profile becomes uniform."""
    total = profiles.sum(axis=-1, keepdims=True)
    return np.where(total > 0, profiles / np.where(total > 0, total, 1.0), 1.0 / profiles.shape[-1])


def _compute_elements(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute h(a, b) elementwise, at least 0, since rounding may push it below."""
    return np.maximum(0.5 * (_compute_weighted_log(a, a + b) + _compute_weighted_log(b, a + b)), 0.0)


def _compute_weighted_log(a: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    positive = a > 0
    ratio = np.where(positive, 2.0 * a, 1.0) / np.where(positive, total, 1.0)
    return np.where(positive, a, 0.0) * np.log(ratio)
