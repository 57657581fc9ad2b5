"""Since when a device is as it is, and which absences are usual for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

REMEMBERED: Final = 8
"""Latest absences that show a device's habit."""
USUAL_S: Final = 600.0
"""Absence that is usual for every device: a restart, a network that is away for a while."""
SLEEP_S: Final = 24 * 3600.0
"""Sleep that is usual for a device of which no longer one is known."""
SPARE: Final = 1.5
"""How much longer than the longest known one an absence may be without being unusual."""


class Change(Struct, frozen=True, kw_only=True):
    """The present value of something, and when it was first seen (seconds since the epoch, our clock)."""

    value: str
    at: float


class Changes(Struct, frozen=True, kw_only=True):
    """The last change of each thing that is watched on a device, by name, and the device's latest absences."""

    last: Mapping[str, Change] = {}
    absences_s: tuple[float, ...] = ()


PRESENCE: Final = "presence"
HERE: Final = "online"


def record_change(changes: Changes, name: str, value: str, now: float) -> Changes:
    """Return the changes with this value; the end of an absence is recorded, too."""
    before = changes.last.get(name)
    if before is not None and before.value == value:
        return changes
    later = replace(changes, last={**changes.last, name: Change(value=value, at=now)})
    if name == PRESENCE and value == HERE and before is not None:
        return replace(later, absences_s=(*changes.absences_s, max(now - before.at, 0.0))[-REMEMBERED:])
    return later


def compute_habit_s(changes: Changes) -> float:
    """Compute how long the device may be away without being away for unusually long."""
    now = changes.last.get(PRESENCE)
    usual_s = SLEEP_S if now is not None and now.value == "sleeping" and not changes.absences_s else USUAL_S
    return max([usual_s, *(SPARE * absence_s for absence_s in changes.absences_s)])
