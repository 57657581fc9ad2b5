"""Uniform selection: every client is as likely as any other.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1; the size of the cohort is that of CFIC (docs/methods/cfic.md, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def cohort_size(n_clients: int, share: float) -> int:
    """n_s = min(K, max(1, floor(K gamma + 0.5 + 1e-9))): rounded half up; 0 of 0 clients.

    Args:
        n_clients: K >= 0.
        share: gamma, in (0, 1].

    Example:
        >>> [cohort_size(n, 0.3) for n in (0, 1, 5, 100)]
        [0, 1, 2, 30]
    """
    return min(n_clients, max(1, math.floor(n_clients * share + 0.5 + 1e-9)))


def uniform(ids: Sequence[str], n: int, rng: np.random.Generator) -> list[str]:
    """min(n, len(ids)) different clients, drawn uniformly without replacement; by ascending id."""
    return sorted(rng.permutation(ids)[:n].tolist()) if ids else []
