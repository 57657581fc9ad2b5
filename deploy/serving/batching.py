"""Batches concurrent requests: requests that wait while the graph is busy share its next call.

The graph runs in its own thread, so it never blocks the event loop. The queue is bounded; when it is full, requests are
refused at once and may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deploy.inference.prediction import Prediction
from deploy.inference.runtime import Runtime
from deploy.serving.statistics import Statistics
from fedge.errors import ConfigError

MAX_WAITING_BYTES: Final = 64 << 20
"""Most bytes of all waiting samples together. If no samples wait, a single larger request is accepted."""

Answer = tuple[Runtime, Prediction]


class BusyError(Exception):
    """The queue is full."""


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    x: NDArray[Any]
    arrived: float
    arrived_ns: int
    answer: asyncio.Future[Answer]


@dataclass(eq=False)
class Batcher:
    """Gathers a model's requests into calls of the graph. A batcher belongs to one event loop.

    Args:
        answer: function that predicts samples (n, ...) and also returns the bundle used. The pool runs it.
        pool: executor with one thread, which several batchers may share.
        max_batch: most samples per call; a larger request gets its own call.
        max_delay_s: longest time that a request waits for others while the graph is idle.
        max_waiting: most waiting requests, not counting those that the graph is predicting.
    """

    answer: Callable[[NDArray[Any]], Answer]
    pool: Executor
    _: KW_ONLY
    max_batch: int = 8
    max_delay_s: float = 0.0
    max_waiting: int = 64

    def __post_init__(self) -> None:
        self.statistics = Statistics()
        self._waiting: deque[_WaitingRequest] = deque()
        self._arrival = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    async def predict(self, x: NDArray[Any]) -> Answer:
        """Predict samples (n, ...), perhaps in one call with those of other requests.

        Raises:
            BusyError: too many requests, or too large ones, are waiting.
            ConfigError: the samples have another shape than the task's.
        """
        held = sum(waiting.x.nbytes for waiting in self._waiting)
        if len(self._waiting) >= self.max_waiting or (held and held + x.nbytes > MAX_WAITING_BYTES):
            raise BusyError(f"{len(self._waiting)} requests wait already; try again in a second")
        loop = asyncio.get_running_loop()
        waiting = _WaitingRequest(x, loop.time(), time.perf_counter_ns(), loop.create_future())
        self._waiting.append(waiting)
        self._arrival.set()
        if self._work is None:
            self._work = loop.create_task(self._answer_all(), name="batching")
        return await waiting.answer

    async def _answer_all(self) -> None:
        while self._waiting:
            await self._wait_for_batch()
            group = self._take_group()
            if group:
                await self._answer_group(group)
        self._work = None

    async def _wait_for_batch(self) -> None:
        """Wait for a full call, or until the first request has waited long enough."""
        until = self._waiting[0].arrived + self.max_delay_s
        try:
            async with asyncio.timeout_at(until if self.max_delay_s else None):
                while self.max_delay_s and sum(len(waiting.x) for waiting in self._waiting) < self.max_batch:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            pass

    def _take_group(self) -> list[_WaitingRequest]:
        """Remove and return the first requests that fit into one call; skip requests whose clients have gone."""
        group: list[_WaitingRequest] = []
        n = 0
        while self._waiting:
            first = self._waiting[0]
            if group and (first.x.shape[1:] != group[0].x.shape[1:] or n + len(first.x) > self.max_batch):
                break
            self._waiting.popleft()
            if not first.answer.done():
                group.append(first)
                n += len(first.x)
        return group

    async def _answer_group(self, group: list[_WaitingRequest]) -> None:
        loop = asyncio.get_running_loop()
        begin = time.perf_counter_ns()
        try:
            x = group[0].x if len(group) == 1 else np.concatenate([waiting.x for waiting in group])
            runtime, prediction = await loop.run_in_executor(self.pool, self.answer, x)
        except Exception as error:  # noqa: BLE001 - each request gets the error
            if isinstance(error, ConfigError) and len(group) > 1:  # one request has wrong samples; answer the others
                for waiting in group:
                    await self._answer_group([waiting])
                return
            for waiting in group:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        self.statistics.record_call(len(x), len(group), time.perf_counter_ns() - begin)
        self.statistics.n_outliers += int(prediction.outlier.sum())
        start = 0
        for waiting in group:
            self.statistics.queue.add(begin - waiting.arrived_ns)
            stop = start + len(waiting.x)
            if not waiting.answer.done():
                waiting.answer.set_result((runtime, prediction.select_rows(start, stop)))
            start = stop
