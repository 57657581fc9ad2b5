"""Early termination of long-running work."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]
"""Asked between two batches: whether to stop."""


class StoppedError(Exception):
    """The work was stopped from outside, without a result."""


def never() -> bool:
    """Nobody asks to stop."""
    return False
