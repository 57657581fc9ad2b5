"""FedEPC's other search for a cohort (fedepc.md section 5.4): devices one by one, each conditioned on those before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.selection.ccmab import NOISE, TIE, Column, Purse, Vectors


def greedy_batch(
    mean: Vectors,
    variance: Vectors,
    column: Column,
    beta: float,
    *,
    first: Sequence[int],
    allowed: Sequence[int],
    size: int,
    purse: Purse,
) -> list[int]:
    """As `greedy`: the largest mean_i + sqrt(beta cov_ii), then cov is conditioned on it; spreads over contexts.

    Cost: as `greedy`, and O(size * n) memory.
    """
    chosen: list[int] = []
    factors = np.zeros((max(size, len(first)), len(mean)))  # outer products that sum to the reduction of cov
    left = variance.copy()

    def take(device: int) -> None:
        known = factors[: len(chosen)]
        factors[len(chosen)] = (column(device) - known[:, device] @ known) / math.sqrt(left[device] + NOISE)
        left[:] -= factors[len(chosen)] ** 2
        chosen.append(device)

    remaining = purse.pays(np.array(sorted(set(allowed) - set(first)), np.intp))
    for overdue in first:
        take(overdue)
    while len(chosen) < size and len(remaining):
        scores = mean[remaining] + np.sqrt(beta * np.maximum(left[remaining], 0.0))
        best = int(np.argmax(scores >= scores.max() - TIE))
        take(int(remaining[best]))
        purse = purse.after(chosen[-1])
        remaining = purse.pays(np.delete(remaining, best))
    return chosen
