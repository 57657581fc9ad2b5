"""Tasks that run beside the main work of an event loop. None of them may fail unnoticed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from fedge.system.stopping import INTERRUPTED

T = TypeVar("T")


STOP_S: Final = 4.0
"""Seconds in which a process must stop. What it has accepted is durable, so it may end at any point."""


def on_signal(act: Callable[[], object], *, within_s: float | None = None) -> None:
    """Make SIGINT and SIGTERM call `act` in this event loop.

    If `within_s` is given, the process exits with `INTERRUPTED` when it has not ended that many seconds after the first
    signal, or at the second signal. A thread may not check whether to stop, a broker may hang, and a user who asks
    twice is in a hurry. This holds even after the loop has ended.
    """
    loop = asyncio.get_running_loop()

    def handle_signal(_number: int, _frame: object) -> None:
        if within_s is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: os._exit(INTERRUPTED))
            end = threading.Timer(within_s, os._exit, (INTERRUPTED,))
            end.daemon = True
            end.start()
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle_signal)


async def run_until_stopped(work: Coroutine[Any, Any, T]) -> T | None:
    """Return a task's result, or None if SIGINT or SIGTERM cancelled it (within `STOP_S`)."""
    running = asyncio.ensure_future(work)
    on_signal(running.cancel, within_s=STOP_S)
    try:
        return await running
    except asyncio.CancelledError:
        return None


def run_in_daemon(work: Callable[[], T], orphaned: Callable[[], None] = lambda: None) -> asyncio.Future[T]:
    """Run blocking work in a thread for which neither the loop nor the process waits on exit.

    `orphaned` is called in that thread if the loop has ended meanwhile.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            finish: Callable[[], None] = functools.partial(done.set_result, work())
        except Exception as error:  # noqa: BLE001 - whoever waits gets the error
            finish = functools.partial(done.set_exception, error)
        try:
            loop.call_soon_threadsafe(lambda: None if done.done() else finish())
        except RuntimeError:
            orphaned()

    threading.Thread(target=run, name="connecting", daemon=True).start()
    return done


class Background:
    """Tasks that are kept until they end. `fail` gets the exception of a task that fails, but no cancellation."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._fail = fail

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def cancel(self) -> None:
        """Ask all tasks to end."""
        for task in self.tasks:
            task.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


@contextmanager
def raise_first_failure() -> Iterator[None]:
    """Raise only the first failure of a task group inside the `with` block, as if there were no group."""
    try:
        yield
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
        raise first from first.__cause__
