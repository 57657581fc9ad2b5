"""Excludes devices from rounds for a while if they repeatedly send what no honest device would.

One piece of evidence proves nothing, because training diverges and disks break. Three rounds with evidence within
twenty are a pattern, and the device is excluded for twenty rounds. Afterwards it takes part again, and another round
with evidence excludes it for twice as long. A person may readmit it at once (`fedge coordinator --readmit`), with a
clean slate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from coordinator.store.records import Offence

OFFENCES: Final = 3
"""Number of rounds with evidence, among the last `WITHIN`, that make a pattern."""
WITHIN: Final = 20
"""Number of rounds within which a pattern must lie."""
REST: Final = 20
"""Rounds of the first quarantine; each further one lasts twice as long."""
LONG_UPDATE: Final = "long-update"
"""Name of the evidence of a suspiciously long update (`coordinator.fleet.update_norms`)."""
READMITTED: Final = "readmitted"
"""Name of the entry that is recorded when a person readmits a device."""


class Quarantine(Struct, frozen=True, kw_only=True):
    """A device's quarantine. `until`: the last round without the device; `evidence`: what led to the quarantine."""

    until: int
    evidence: tuple[Offence, ...]


def find_quarantined(offences: Iterable[Offence], number: int) -> dict[str, Quarantine]:
    """Return the devices excluded from round `number`, by ascending id.

    Args:
        offences: all recorded offences, in any order; those of round `number` and later do not count yet.
        number: the number of the round.

    Example:
        >>> found = [Offence(device_id="d", round=r, name="long-update", detail="") for r in (1, 2, 3)]
        >>> [find_quarantined(found, r).keys() for r in (3, 4, 23, 24)]
        [dict_keys([]), dict_keys(['d']), dict_keys(['d']), dict_keys([])]
    """
    of_device: dict[str, list[Offence]] = defaultdict(list)
    for offence in sorted(offences, key=lambda o: (o.round, o.name == READMITTED, o.name)):
        if offence.round < number:
            of_device[offence.device_id].append(offence)
    found = {i: _find_quarantine(own) for i, own in sorted(of_device.items())}
    return {i: quarantine for i, quarantine in found.items() if quarantine is not None and number <= quarantine.until}


def _find_quarantine(offences: Iterable[Offence]) -> Quarantine | None:
    """Find the latest quarantine that a device's offences, by round, lead to; None without one."""
    last: Quarantine | None = None
    recent: list[Offence] = []
    times = 0
    for offence in offences:
        if offence.name == READMITTED:
            last, recent, times = None, [], 0
            continue
        if last is not None and offence.round <= last.until:
            continue  # the device was asked before it was excluded
        recent = [o for o in recent if offence.round - o.round < WITHIN] + [offence]
        if len({o.round for o in recent}) >= (1 if times else OFFENCES):
            last = Quarantine(until=offence.round + REST * 2**times, evidence=tuple(recent))
            recent, times = [], times + 1
    return last
