"""Draws of samples that are stratified by class."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

VALIDATION_SHARE: Final = 0.2  # fedge.md section 3: 15-20 %


def draw_stratified(y: NDArray[np.int64], n_drawn: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw positions of `n_drawn` samples, stratified by class (systematic sampling).

    Samples are sorted by class, shuffled within each class, and drawn at equal distances from a random start. So each
    class gets its share of the draw, give or take one.

    Args:
        y: labels (n,).
        n_drawn: 0 <= n_drawn <= n.
        rng: random numbers of the shuffle and the start.

    Returns:
        Distinct positions (n_drawn,), ascending.
    """
    order = np.lexsort((rng.random(len(y)), y))
    places = np.floor((np.arange(n_drawn) + rng.random()) * (len(y) / max(n_drawn, 1))).astype(np.int64)
    return np.sort(order[np.minimum(places, len(y) - 1)])


def count_validation(n_samples: int) -> int:
    """Return the size of a device's hold-out: a fifth, at least 2 of 10 samples, 1 of 2."""
    least = 2 if n_samples >= 10 else min(1, n_samples // 2)
    return max(least, round(VALIDATION_SHARE * n_samples))
