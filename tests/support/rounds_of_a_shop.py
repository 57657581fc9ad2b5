"""Rounds of the shop that go on while somebody looks at its page."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from threading import Event as Flag
from threading import Thread

from coordinator.store.records import Event
from coordinator.store.store import Store
from fedge.system.files import write_atomically


def play_round(store: Store, number: int, rng: random.Random) -> None:
    """Let every device of the shop answer in a round, and change whatever a round can change of it."""
    summary = json.loads((store.home / "summary.json").read_text())
    now, ids = time.time(), sorted(summary["fleet"])
    for i in ids:
        known = summary["fleet"][i]
        known["seen_at"] = now - rng.random()
        if "load" not in known["withholds"]:
            known["context"] |= {"load": 2 * rng.random(), "free_ram_gb": 4 * rng.random(), "at": now}
        summary["selection"][i] += 1
    summary |= {"round": number, "at": now}
    summary["history"].append({"round": number, "asked": len(ids), "answered": len(ids), "accuracy": 0.8, "loss": None})
    store.record_events(
        Event(at=now, round=number, name="round_begun", fields={"devices": len(ids)}),
        Event(at=now, round=number, name="asked", fields={"label": "train", "devices": len(ids)}),
        *(Event(at=now, round=number, name="answer", device=i, fields=_answer(rng)) for i in ids),
        Event(at=now, round=number, name="round_done", fields={"accuracy": 0.8, "bytes_up": 1, "bytes_down": 1}),
    ).result()
    write_atomically(store.home / "summary.json", json.dumps(summary).encode())


def _answer(rng: random.Random) -> dict[str, object]:
    return {"label": "train", "result": "done", "seconds": 1.0, "accuracy": rng.random()}


@contextlib.contextmanager
def play_rounds(store: Store, pause_s: float = 0.3) -> Iterator[None]:
    """Play one round after the other while the context is open."""
    ended = Flag()

    def play_endlessly() -> None:
        rng, number = random.Random(0), 4
        while not ended.wait(pause_s):
            play_round(store, number, rng)
            number += 1

    thread = Thread(target=play_endlessly, name="rounds")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
