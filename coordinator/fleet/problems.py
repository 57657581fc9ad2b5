"""Why devices brought nothing: the latest reason of each, and what people read of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

NAMED: Final = 2
"""Devices with one reason that are named; the others are counted."""
REASONS: Final = 3
"""Reasons that are told, those of most devices first."""
LONGEST: Final = 300
"""Characters of a reason that are told: it may hold what a user's network raised."""


class Problem(Struct, frozen=True, kw_only=True):
    """A failure on a device, and its round (0: before the first)."""

    round: int
    reason: str


def select_reasons(problems: Mapping[str, Problem], since: int = 0) -> dict[str, str]:
    """Return the reasons by device id, those of rounds from `since` on."""
    return {i: problem.reason for i, problem in problems.items() if problem.round >= since}


def describe_reasons(reasons: Mapping[str, str]) -> str:
    """Describe the reasons by device id in a line, devices with the same one together; empty without any."""
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
