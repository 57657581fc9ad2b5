"""Whether the coordinator runs: what it wrote of its fleet is the present only as long as it does.

A running coordinator touches HOME/alive every two seconds. Whoever shows its summary says how old that sign of life
is, and that devices are in an unknown state once it is missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from coordinator.watch.words import format_duration
from fedge.wire.messages import Presence

BEAT_S: Final = 2.0
"""Time between two signs of life."""
SILENT_S: Final = 8.0
"""Time without a sign of life after which the coordinator counts as silent."""
UNKNOWN: Final = "unknown"
"""The presence of a device that nobody listens to."""


@contextlib.contextmanager
def show_life(home: Path) -> Iterator[None]:
    """Give signs of life while the context is open, from a thread: a loop that is busy for long is not dead."""
    ended = Event()

    def touch_endlessly() -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk is told by whoever must write
                (home / "alive").touch()
            if ended.wait(BEAT_S):
                return

    thread = Thread(target=touch_endlessly, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


def refresh_presence(summary: dict[str, Any], now: float) -> None:
    """Set when connected devices were last heard to the coordinator's last sign of life.

    Until then it knew of their connections, which the broker checks, even if they had nothing to say.
    """
    for device in summary.get("fleet", {}).values():
        if device["presence"] == Presence.ONLINE:
            device["seen_at"] = max(device["seen_at"] or 0.0, now - summary["coordinator"]["age_s"])


def forget_presence(summary: dict[str, Any]) -> None:
    """Replace the presence of all devices by "unknown"; "was" keeps the last one that the coordinator saw."""
    for device in summary.get("fleet", {}).values():
        if presence := device.get("presence"):
            device["was"], device["presence"] = presence, UNKNOWN
        if device.get("serving", "none") != "none":
            device["serving"] = UNKNOWN
