"""Split conformal prediction: the threshold of a promised coverage, from scores on validation samples (conformal.md).

A score is what `Problem.compute_nonconformity` returns: how badly an answer fits its target. Scores are sorted. A
target belongs to a sample's set if its score is at most the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.data.problems.maths import Floats
from fedge.data.problems.problem import Problem

GAMMA: Final = 0.02
"""Step of the adaptive level after each label, γ in equation 6."""
DIGITS: Final = 6
"""Decimal places to which scores are rounded up, since engines differ in later ones."""
LARGEST: Final = 1e9
"""Bound of a score."""


def summarise_scores(problem: Problem, answers: Sequence[Floats], targets: NDArray[Any]) -> tuple[float, ...]:
    """Return the sorted scores of answers (n, ...) to samples with these targets; () if the problem has no sets.

    A score that is not finite counts as `LARGEST`.
    """
    if not problem.SETS:
        return ()
    found = np.nan_to_num(problem.compute_nonconformity(answers, targets), nan=LARGEST, posinf=LARGEST)
    rounded = np.ceil(np.minimum(np.sort(found), LARGEST) * 10**DIGITS) / 10**DIGITS
    return tuple(rounded.tolist())


def compute_threshold(scores: Sequence[float], alpha: float) -> float:
    """Return q, the k-th smallest of n sorted scores, k = ceil((n + 1)(1 - alpha)) (equation 2).

    It is infinite if k > n, since n samples then promise no such coverage, and -infinite if k < 1.

    >>> compute_threshold([0.1, 0.2, 0.3, 0.4], 0.4), compute_threshold([0.1, 0.2, 0.3, 0.4], 0.1)
    (0.3, inf)
    """
    n = len(scores)
    k = math.ceil((n + 1) * (1 - alpha) - 1e-9)  # 0.9 * 10 is 9
    if k > n:
        return math.inf
    return scores[k - 1] if k >= 1 else -math.inf


def count_needed(coverage: float) -> int:
    """Return the fewest samples that promise this coverage.

    >>> [count_needed(coverage) for coverage in (0.9, 0.95, 0.99)]
    [9, 19, 99]
    """
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def adapt_level(alpha: float, coverage: float, *, missed: bool) -> float:
    """Return the level after one more label, alpha + γ (1 - coverage - missed) (equation 6).

    `missed` is whether the target's score was above the threshold of `alpha`. The level stays
    within [-γ, 1 + γ], as `compute_threshold` misses nothing below 0 and everything above 1.
    """
    return alpha + GAMMA * (1 - coverage - missed)
