"""Waiting for what nothing tells: files of another process, the state of an object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 300.0


async def until(condition: Callable[[], object], *, within_s: float = WAIT_S, every_s: float = 0.005) -> None:
    """Ask again and again until it holds.

    Raises:
        TimeoutError: it never does.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - that is what this module is for
            await asyncio.sleep(every_s)
