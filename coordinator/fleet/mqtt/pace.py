"""Estimates a device's time for an order from earlier ones, so that no order expires that would be answered.

Work is counted in forward passes of one sample (`Action.passes`). A device reports only how many samples it shares, so
all three of its sets count as that many. A device's pace is that of the largest order it has answered, since the time
of small orders is mostly that of the network and the start of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Final

from fedge.steps.contract import Action
from fedge.wire.messages import MAX_LEFT_S

ROOM: Final = 4.0
"""Factor over the predicted time, because we know only a part of a device's samples, and the device may be busy."""
SLOWEST: Final = 30.0
"""Factor over the typical device's time, so that a device that delays each answer does not get ever more time."""
EXPORT: Final = 5.0
"""Factor over the least time for a bundle on a device of unknown speed. Loading torch's exporter, the export and the
parity check take a small board longer than any earlier step."""
A_BATCH: Final = 32
"""Assumed number of samples of a device that shares none, since it may have sensitive ones."""


def compute_work(action: Action, n_samples: int) -> float:
    """Compute the forward passes of an order on a device with `n_samples` non-sensitive samples."""
    n = n_samples or A_BATCH
    return action.passes(n, n, n)


class Paces:
    """The paces of devices, which `record` learns from answers and `compute_allowed_s` uses."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}  # device -> work, seconds

    def record(self, device_id: str, work: float, seconds: float) -> None:
        """Record the time for an amount of work."""
        if seconds > 0 and work > 0 and work >= self._known.get(device_id, (0.0, 0.0))[0]:
            self._known[device_id] = work, seconds

    def compute_allowed_s(
        self, works: Mapping[str, float], *, least_s: float, exporting: Collection[str] = ()
    ) -> dict[str, float]:
        """Compute the seconds that each device may take, at least `least_s`; an unknown device counts as typical.

        No device counts as more than `SLOWEST` times slower than the typical one; no order may take more than a day.
        `exporting`: devices whose work ends in a bundle (`Action.EXPORTS`).
        """
        rates = {i: seconds / work for i, (work, seconds) in self._known.items()}
        typical = median(rates.values()) if rates else 0.0
        least = {i: least_s * (EXPORT if i in exporting and i not in rates else 1.0) for i in works}
        believed = {i: min(rates.get(i, typical), SLOWEST * typical) for i in works}
        wished = {i: max(least[i], ROOM * believed[i] * work) for i, work in works.items()}
        return {i: min(seconds, MAX_LEFT_S) for i, seconds in wished.items()}
