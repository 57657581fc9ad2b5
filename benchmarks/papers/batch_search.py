"""FedEPC's other search for a cohort (fedepc.md section 5.4): devices one by one, each conditioned on those before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.selection.reward_model import NOISE, TIE, Column, Vectors


def greedy_batch(
    mean: Vectors,
    variance: Vectors,
    column: Column,
    beta: float,
    *,
    first: Sequence[int],
    allowed: Sequence[int],
    size: int,
    seconds: Vectors,
    budget_s: float,
) -> list[int]:
    """As `select_greedily`: the largest mean_i + sqrt(beta cov_ii), cov is conditioned on it; spreads over contexts.

    Cost: as `select_greedily`, and O(size * n) memory.
    """
    chosen: list[int] = []
    factors = np.zeros((max(size, len(first)), len(mean)))  # outer products that sum to the reduction of cov
    left, left_s = variance.copy(), budget_s

    def take(device: int) -> None:
        nonlocal left_s
        left_s -= float(seconds[device])
        known = factors[: len(chosen)]
        factors[len(chosen)] = (column(device) - known[:, device] @ known) / math.sqrt(left[device] + NOISE)
        left[:] -= factors[len(chosen)] ** 2
        chosen.append(device)

    for overdue in first:
        take(overdue)
    remaining = np.array(sorted(set(allowed) - set(first)), np.intp)
    while len(chosen) < size and len(remaining := remaining[seconds[remaining] <= left_s * (1 + TIE)]):
        scores = mean[remaining] + np.sqrt(beta * np.maximum(left[remaining], 0.0))
        best = int(np.argmax(scores >= scores.max() - TIE))
        take(int(remaining[best]))
        remaining = np.delete(remaining, best)
    return chosen
