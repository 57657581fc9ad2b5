"""The reasons why devices brought no result: the latest of each device, and their description for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

NAMED: Final = 2
"""Most devices named for one reason; further ones are only counted."""
REASONS: Final = 3
"""Most reasons that are reported, those of most devices first."""
LONGEST: Final = 300
"""Most characters of a reason that are reported, since it may quote an error of a user's network."""


class Problem(Struct, frozen=True, kw_only=True):
    """A failure on a device, and its round (0 if before the first round)."""

    round: int
    reason: str


class Streak(Struct, frozen=True, kw_only=True):
    """Equal troubles in a row. `since`, `last`: when the first and the last came, in seconds since the epoch.

    `reason`: of the last one. `name`: of a refusal.
    """

    count: int
    since: float
    last: float
    reason: str
    name: str = ""


def prolong_streak(before: Streak | None, reason: str, now: float, name: str = "") -> Streak:
    """Return the streak with one more; a refusal by another name begins anew."""
    if before is None or before.name != name:
        return Streak(count=1, since=now, last=now, reason=reason, name=name)
    return Streak(count=before.count + 1, since=before.since, last=now, reason=reason, name=name)


def select_reasons(problems: Mapping[str, Problem], since: int = 0) -> dict[str, str]:
    """Return the reasons by device id, those of rounds from `since` on."""
    return {i: problem.reason for i, problem in problems.items() if problem.round >= since}


def describe_reasons(reasons: Mapping[str, str]) -> str:
    """Describe the reasons by device id in a line, devices with the same reason together; empty without any."""
    having = defaultdict[str, list[str]](list)
    for i, reason in sorted(reasons.items()):
        having[" ".join(reason.split())[:LONGEST]].append(i)
    ranked = sorted(having.items(), key=lambda each: -len(each[1]))
    lines = [f"{_format_names(ids)}: {reason}" for reason, ids in ranked[:REASONS]]
    rest = sum(len(ids) for _, ids in ranked[REASONS:])
    return "; ".join([*lines, *([f"{rest} more for other reasons"] if rest else [])])


def _format_names(ids: list[str]) -> str:
    rest = len(ids) - NAMED
    names = ", ".join(ids if rest == 1 else ids[:NAMED])
    return f"{names} and {rest} more" if rest > 1 else names
