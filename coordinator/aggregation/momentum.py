"""Server momentum: the step of the global model and of the experts. gamma = 0 is FedAvg.

Source: docs/methods/fedge.md, sections 4 and 5. The step has no fixed length, so nothing depends on the network's
scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedge.tensors.layout import Floats
from fedge.tensors.rounding import map_blocks


@dataclass(frozen=True, slots=True)
class ServerStep:
    """A model and its velocity (None without momentum) after a step, (d,) float32. `diverged`: see `apply_momentum`."""

    w: Floats
    v: Floats | None
    diverged: bool = False


def apply_momentum(w: Floats, v: Floats | None, change: NDArray[np.floating], *, gamma: float) -> ServerStep:
    """Move the global model or an expert: v <- gamma v + change;  w <- w + v.

    Args:
        w: model, (d,) float32, finite; e_k for an expert.
        v: velocity, (d,); zero if None.
        change: sum of (n_i / sum n) Delta_i, (d,), with Delta_i = W_i - its own start. An expert's members may have
            started from other experts, so changes are averaged, not models.
        gamma: momentum, in [0, 1).

    Returns:
        The step. If w or v would become non-finite: the old w, v = 0 and `diverged`, which the caller logs.

    Raises:
        ValueError: gamma is out of range.
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma {gamma} is not in [0, 1)")
    new, kept = np.empty_like(w), np.empty_like(w) if gamma else None

    def move(block: slice) -> bool:
        moved = change[block] if v is None or not gamma else gamma * v[block].astype(np.float64) + change[block]
        after = w[block].astype(np.float64)  # an addition that casts is slower than both
        after += moved
        new[block] = after
        if kept is not None:
            kept[block] = moved
        return bool(np.isfinite(new[block]).all() and (kept is None or np.isfinite(kept[block]).all()))

    if not all(map_blocks(len(w), move, threaded=True)):
        return ServerStep(w, np.zeros_like(w), diverged=True)
    return ServerStep(new, kept)
