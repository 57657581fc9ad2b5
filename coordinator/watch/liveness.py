"""Whether the coordinator runs: what it wrote of its fleet is the present only as long as it does.

A running coordinator touches HOME/alive every few seconds, from the loop that carries out its rounds. Whoever shows
its summary says how old that sign of life is, and that devices are in an unknown state once it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.watch.words import format_duration

BEAT_S: Final = 2.0
"""Time between two signs of life."""
SILENT_S: Final = 12.0
"""Time without a sign of life after which the coordinator counts as silent."""
UNKNOWN: Final = "unknown"
"""The presence of a device that nobody listens to."""


@contextlib.asynccontextmanager
async def show_life(home: Path) -> AsyncIterator[None]:
    """Give signs of life while the context is open."""

    async def touch_endlessly() -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk is told by whoever must write
                (home / "alive").touch()
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(touch_endlessly())
    try:
        yield
    finally:
        task.cancel()


def describe_coordinator(home: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Describe whether the coordinator runs.

    Returns: "state" ("running", "ended": it came to the end of its run, "silent": it gives no sign of life), "age_s"
        (seconds since its last sign of life) and "text" (a sentence; empty while it runs).
    """
    last = summary["at"]
    if not summary.get("ended"):
        with contextlib.suppress(OSError):
            last = max(last, (home / "alive").stat().st_mtime)
    age_s = max(time.time() - last, 0.0)
    if summary.get("ended"):
        return {"state": "ended", "age_s": age_s, "text": f"the run ended {format_duration(age_s)} ago"}
    if age_s <= SILENT_S:
        return {"state": "running", "age_s": age_s, "text": ""}
    text = (
        f"the coordinator has been silent for {format_duration(age_s)}: what is shown is that old. Start it again with "
        f"the same --home {home}, and it continues"
    )
    return {"state": "silent", "age_s": age_s, "text": text}


def forget_presence(summary: dict[str, Any]) -> None:
    """Replace the presence of all devices by "unknown"; "was" keeps the last one that the coordinator saw."""
    for device in summary["fleet"].values():
        device["was"], device["presence"] = device["presence"], UNKNOWN
