"""The fastest devices: a baseline for other selections (docs/methods/fedepc.md, section 8.3), not a recommendation.

Rounds are short, and slow devices never train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def fastest(ids: Sequence[str], n: int, seconds: Mapping[str, float], cpu_ghz: Mapping[str, float]) -> list[str]:
    """The min(n, len(ids)) devices with the shortest rounds; by ascending id, the lowest id on a tie.

    A device that was never measured is assumed to need c / f seconds, with c the median cycles of the measured devices
    (1 without any) and f its clock; one with an unknown clock comes last but one. A device that did not answer its last
    order (infinity) comes last.

    Args:
        ids: the devices to choose from.
        n: >= 0.
        seconds: time of each device's last round, >= 0, if there was one; infinity if it did not answer.
        cpu_ghz: clock f of each device, > 0, if known.

    Example:
        >>> fastest(["a", "b", "c"], 2, {"a": 9.0, "b": 4.0}, {"a": 1.0, "b": 2.0, "c": 4.0})
        ['b', 'c']
    """
    cycles = [seconds[i] * cpu_ghz[i] for i in ids if i in cpu_ghz and math.isfinite(seconds.get(i, math.inf))]
    typical = float(np.median(cycles)) if cycles else 1.0

    def expected(device: str) -> tuple[bool, float, str]:
        guess = typical / cpu_ghz[device] if device in cpu_ghz else math.inf
        return seconds.get(device) == math.inf, seconds.get(device, guess), device

    return sorted(sorted(ids, key=expected)[:n])
