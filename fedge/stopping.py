"""How long-running work is asked to end early."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]
"""Asked between two batches: whether to stop."""


class StoppedError(Exception):
    """The work was stopped from outside; nothing came of it."""


def never() -> bool:
    """Nobody asks to stop."""
    return False
