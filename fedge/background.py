"""Tasks that run beside the main work of an event loop, none of which may fail unseen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def on_signal(act: Callable[[], object], *, again: int | None = None) -> None:
    """Have SIGINT and SIGTERM call `act` in this event loop.

    `again`: who asks twice is in a hurry, and ends the process at once with this exit code; None: `act` once more.
    """
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        act()
        if again is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, os._exit, again)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)


async def until_stopped(work: Coroutine[Any, Any, T]) -> T | None:
    """Its result; None if SIGINT or SIGTERM has cancelled it."""
    running = asyncio.ensure_future(work)
    on_signal(running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return None


class Background:
    """Tasks that are kept until they end; `fail` is told the exception of one that fails (a cancellation is none)."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._fail = fail

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask all tasks to end."""
        for task in self.tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


@contextmanager
def first_failure() -> Iterator[None]:
    """Of what has failed in a group of tasks within, only the first is raised, as if there were no group."""
    try:
        yield
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
        raise first from first.__cause__
