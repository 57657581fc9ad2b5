"""Boards that a demo's devices stand for: each device gets the share of a processor that its board's speed says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

import numpy as np

from coordinator.demo.processes import Child
from coordinator.fleet.simulated.devices import JETSON_NANO, JETSON_ORIN_NANO, PI_4, PI_5, PI_ZERO_2_W, Hardware

PERIOD_S: Final = 0.2
"""Time in which a slowed device runs once; as short as sleeping and signals are still exact."""


BOARDS: Final = (JETSON_ORIN_NANO, PI_5, PI_5, PI_4, JETSON_NANO, PI_ZERO_2_W)
"""A slow board among faster ones, in equal parts."""


def choose_boards(ids: Iterable[str], seed: int) -> dict[str, Hardware]:
    """Choose each device's board by lot; the numbers of two of `BOARDS` differ by at most one."""
    ordered = sorted(ids)
    places = np.random.default_rng([seed, len(ordered)]).permutation(len(ordered))
    return {i: BOARDS[int(place) % len(BOARDS)] for i, place in zip(ordered, places, strict=True)}


def compute_share(board: Hardware) -> float:
    """Compute the share of a processor's time that a board gets, (0, 1]; 1 for the fastest."""
    return board.speed / max(each.speed for each in BOARDS)


@contextlib.asynccontextmanager
async def limit_shares(shares: Mapping[Child, float]) -> AsyncIterator[None]:
    """Let each of these processes, with its own children, run only for this share of the time, (0, 1]."""
    tasks = [asyncio.create_task(_run_in_turns(child, share)) for child, share in shares.items() if share < 1]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_in_turns(child: Child, share: float) -> None:
    """Stop the process and let it go on, in turns; when cancelled, let it go on."""
    await asyncio.sleep(random.uniform(0, PERIOD_S))  # noqa: S311 - so that not all run at the same moment
    try:
        while child.running:
            _send(child, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - share))
            _send(child, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S * share)
    finally:
        _send(child, signal.SIGCONT)


def _send(child: Child, number: signal.Signals) -> None:
    if child.running:
        with contextlib.suppress(ProcessLookupError):  # it ends this moment
            os.killpg(child.process.pid, number)
