"""A coordinator's home as a run leaves it, with what a hostile device may have put into it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from coordinator.store.records import Event
from coordinator.store.store import Store

EVIL = "<img src=x onerror=\"document.title='taken'\">\x1b[31m"
"""What would run in a page, or colour a terminal."""
NOW = 1_790_000_000.0
DAY_S = 86400.0


QUALITY = {"n": 40, "accuracy": 0.93, "gate_entropy": 0.2, "free_energy": 0.4, "latency_ms": 1.7}
HEALTH = {
    "phase": "serving",
    "release": 1,
    "reason": "",
    "now": QUALITY,
    "n_predictions": 1200,
    "n_failed": 0,
    "outliers": {"seen": 1200, "flagged": 30},
    "drift": False,
}


def device(n_samples: int = 100, **changes: Any) -> dict[str, Any]:
    """What is said of a device in the summary."""
    context = {
        "type": "context",
        "device_id": "d",
        "load": 0.5,
        "free_ram_gb": 1.5,
        "free_disk_gb": 9.0,
        "temperature_c": 51.0,
    }
    known = {
        "presence": "online",
        "seen_at": NOW,
        "context": context,
        "release": 1,
        "n_samples": n_samples,
        "withholds": [],
        "health": None,
    }
    return known | changes


def make_shop(home: Path, n_devices: int = 12, **changes: Any) -> Store:
    """The store, open: three clusters, a device in all of them, one that is ill, one whose owner tells little."""
    ids = [f"cam{k + 1}" for k in range(n_devices)]
    store = Store(home)
    for r in (1, 2, 3):
        store.start_round(r, [], NOW + 10 * r)
        _note(store, r, "round_begun", devices=n_devices)
        store.record_events(
            Event(at=NOW + 10 * r, round=r, name="asked", fields={"label": "train", "devices": n_devices})
        )
        seconds = {i: 1.0 + k for k, i in enumerate(ids)} | {"cam99": 99.0}
        estimates = {i: (0.3 / r - 0.02 * k, 0.5 / r) for k, i in enumerate(seconds)}
        told = {"seconds": seconds, "estimates": estimates, "deadline_s": 20.0}
        _note(store, r, "chosen", ids=ids, overdue=[ids[4]], **told)
        for k, i in enumerate(ids[:-1]):
            told = {"label": "train", "result": "done", "seconds": 1.0 + k}
            told |= {} if k == 1 else {"accuracy": 0.2 * r + 0.02 * k}
            store.record_events(Event(at=NOW + 10 * r + k, round=r, name="answer", device=i, fields=told))
        late = {"label": "train", "reason": EVIL, "late": True}
        store.record_events(Event(at=NOW + 10 * r + 9, round=r, name="closed", device=ids[-1], fields=late)).result()
        store.record_events(
            Event(at=NOW + 10 * r + 9, round=r, name="problem", device=ids[-1], fields={"reason": EVIL})
        ).result()
        _note(store, r, "round_done", accuracy=0.2 * r, bytes_up=400_000 * r, bytes_down=2_000_000 * r)
    clusters = {str(k): [i for n, i in enumerate(ids) if n % 3 == k or n == 5] for k in range(3)}
    summary = {
        "federation": "shop",
        "method": "fedge",
        "round": 3,
        "rounds": 30,
        "done": False,
        "paused": False,
        "waiting": 0,
        "retired": [],
        "history": [{"round": r, "asked": 12, "answered": 11, "accuracy": 0.2 * r, "loss": None} for r in (1, 2, 3)],
        "selection": dict.fromkeys(ids, 3),
        "installed": {},
        "split": True,
        "clusters": clusters,
        "bytes_up": 1_234_567,
        "bytes_down": 7_654_321,
        "wall_s": 30.0,
        "at": NOW,
        "fleet": {i: device(100 + k) for k, i in enumerate(ids)}
        | {
            ids[0]: device(health=HEALTH, of_bundle={"accuracy": 0.93, "n": 40, "release": 1}),
            ids[1]: device(
                0, context={"type": "context", "device_id": "d"}, withholds=["count", "load", "loss", "use"]
            ),
            ids[2]: device(presence="offline"),
            ids[3]: device(health=HEALTH | {"drift": True, "n_failed": 3, "reason": EVIL}),
        },
        "quarantined": {},
        "problems": {ids[-1]: {"round": 3, "reason": EVIL}},
        "clocks": {},
        "devices": dict.fromkeys(ids, "online"),
        "without_bundle": [],
        "refused": {"forged": 2, "replayed": 7},
        "last_refused": {"forged": f"cam12: {EVIL}"},
        **changes,
    }
    (home / "summary.json").write_text(json.dumps(summary))
    set_last_sign(home, -DAY_S)  # its coordinator lives as long as the test lasts
    return store


def set_last_sign(home: Path, age_s: float) -> None:
    """Let the coordinator's last sign of life be so long ago."""
    (home / "alive").touch()
    os.utime(home / "alive", (time.time() - age_s,) * 2)


def _note(store: Store, r: int, name: str, **fields: Any) -> None:
    store.record_events(Event(at=NOW + 10 * r, round=r, name=name, fields=fields)).result()
