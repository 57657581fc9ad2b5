"""What runs beside the rounds: tasks at intervals, and work that must not fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from fedge.errors import FedgeError

log = logging.getLogger("fedge.coordinator")
T = TypeVar("T")

RARELY: Final = 50
"""Shortest time between two writes, in multiples of the time that one write takes."""


class Throttle:
    """A throttle, which runs a task immediately on request, then at most once per interval."""

    def __init__(self, act: Callable[[], object], every_s: float) -> None:
        self._act = act
        self._every_s = every_s
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def trigger(self) -> None:
        """Run the task now, or as soon as permitted."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next:
            self._run()
        else:
            self._timer = loop.call_at(self._next, self._run)

    def _run(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._act()
        self._next = loop.time() + max(self._every_s, RARELY * (loop.time() - began))

    async def aclose(self) -> None:
        """Stop the throttle."""
        if self._timer is not None:
            self._timer.cancel()


@contextlib.asynccontextmanager
async def repeat(act: Callable[[], object], every_s: float) -> AsyncIterator[None]:
    """Run a task again and again while the context is open."""

    async def repeat_endlessly() -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                act()
            except FedgeError as error:  # such as a full disk, which ends the coordinator when a round is stored
                log.error("event=not_written reason=%r", str(error))  # noqa: TRY400 - the text says it all

    running = asyncio.create_task(repeat_endlessly())
    try:
        yield
    finally:
        running.cancel()


async def run_beside(work: Coroutine[Any, Any, T], helper: Coroutine[Any, Any, None]) -> T:
    """Do the work; an error of the helper, which never ends by itself, ends the work, too, and is raised."""
    main, other = asyncio.create_task(work), asyncio.create_task(helper)
    try:
        await asyncio.wait((main, other), return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            other.result()
        return await main
    finally:
        for task in (main, other):
            task.cancel()
        await asyncio.gather(main, other, return_exceptions=True)
