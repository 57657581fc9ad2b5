"""A federation for people to look at: its devices, its rounds, and the reasons behind them.

Everything is read from the coordinator's home: its latest `summary.json`, and its store's events. Nothing here changes
anything, and nothing waits for the coordinator.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from coordinator.store.records import Event
from coordinator.store.store import Store
from coordinator.watch.words import (
    headline,
    passed_over,
    row_of,
    row_of_end,
    row_of_entry,
    sentence,
    taken,
    told,
    trouble_of,
)
from fedge.errors import ConfigError, StoreError
from fedge.wire.messages import Outcome

POINTS: Final = 200
"""Accuracies that are kept of a device: of more, every other one of those before the last goes."""
ROUNDS: Final = 1000
"""Rounds that are told of."""
MAX_OF_ROUND: Final = 50_000
"""Events of one round that are looked at."""
PAGE: Final = 5000
"""Events that are read at a time."""


def read_summary(home: Path) -> dict[str, Any]:
    """The coordinator's latest summary.

    Raises:
        ConfigError: there is none.
        StoreError: it cannot be read.
    """
    file = home / "summary.json"
    if not file.exists():
        raise ConfigError(f"{file} is not there: {home} is no coordinator's --home")
    try:
        summary: dict[str, Any] = json.loads(file.read_bytes())
        summary["age_s"] = max(time.time() - summary["at"], 0.0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{file} is damaged or of another version; the next round writes it anew: {error!r}"
        ) from error
    return summary


class Watch:
    """A federation as seen from its home. One thread at a time."""

    def __init__(self, home: Path, store: Store) -> None:
        self._home, self._store = home, store
        self._last = 0  # number of the last event that was read
        self._accuracy: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self._rounds: dict[int, dict[str, Any]] = {}
        self._now: dict[str, str] = {}  # outcome of the round under way
        self._answered: dict[str, int] = {}  # round of the last answer with a result
        self._passed: dict[str, str] = {}  # devices not chosen for it, and why
        self._bytes: tuple[int, int] | None = None  # up and down until the last round

    def update(self) -> list[Event]:
        """Read what has happened since the last call."""
        new: list[Event] = []
        while page := self._store.events(after=self._last, limit=PAGE):
            for event in page:
                self._take(event)
            self._last = page[-1].number
            new += page
        return new

    def _take(self, event: Event) -> None:
        fields = event.fields
        match event.name:
            case "round_begun":
                self._now, self._passed = {}, {}
                self._rounds.pop(event.round, None)
                self._row(event)
                for old in list(self._rounds)[:-ROUNDS]:
                    del self._rounds[old]
            case "chosen":
                self._passed |= dict(passed_over(fields))
                self._now = dict.fromkeys(self._passed, "not asked") | self._now | dict.fromkeys(fields["ids"], "asked")
            case "asked":  # again, if the coordinator was started again
                row = self._row(event)
                row["labels"][fields["label"]] = fields["devices"]
                row["asked"] = sum(row["labels"].values())
            case "answer":
                done = fields["result"] == Outcome.DONE
                self._row(event)["answered" if done else "failed"] += 1
                self._now[event.device] = "answered" if done else fields["result"]
                if done:
                    self._answered[event.device] = event.round
                if (share := fields.get("accuracy")) is not None:
                    points = self._accuracy[event.device]
                    points.append((event.round, round(share, 4)))
                    if len(points) > POINTS:
                        del points[1:-1:2]
            case "closed":
                self._row(event)["late" if fields["late"] else "failed"] += 1
                self._now[event.device] = "late" if fields["late"] else "rejected"
            case "round_done":
                total = fields["bytes_up"], fields["bytes_down"]
                before = (0, 0) if event.round == 1 else self._bytes
                self._bytes = total
                up, down = (None, None) if before is None else (total[0] - before[0], total[1] - before[1])
                self._row(event).update(done_at=event.at, accuracy=fields["accuracy"], bytes_up=up, bytes_down=down)

    def _row(self, event: Event) -> dict[str, Any]:
        row = {"round": event.round, "begun_at": event.at, "labels": {}} | COUNTED | UNTIL_DONE
        return self._rounds.setdefault(event.round, row)

    def state(self) -> dict[str, Any]:
        """The page's overview as JSON values."""
        self.update()
        summary = read_summary(self._home)
        clusters = {str(k): list(members) for k, members in summary["clusters"].items()}
        of: defaultdict[str, list[str]] = defaultdict(list)
        for name, members in clusters.items():
            for i in members:
                of[i].append(name)
        ids = sorted({*summary["fleet"], *summary["selection"], *summary["problems"], *summary["quarantined"]})
        rows = [row | {"open": _open(row)} for row in self._rounds.values()]
        return {
            **{name: summary[name] for name in KEPT},
            "accuracy": next((r["accuracy"] for r in reversed(summary["history"]) if r["accuracy"] is not None), None),
            "text": headline(summary),
            "clusters": [{"name": name, "members": members} for name, members in clusters.items()],
            "devices": [self._device(i, summary, of[i]) for i in ids],
            "rounds_list": rows,
        }

    def _device(self, i: str, summary: Mapping[str, Any], clusters: list[str]) -> dict[str, Any]:
        known = summary["fleet"].get(i) or NOBODY
        why = trouble_of(i, summary, self._answered.get(i, 0))
        if not why and self._now.get(i) == "not asked":
            why = self._passed.get(i, "")
        return {
            "id": i,
            **known,
            "n_samples": None if "count" in known["withholds"] else known["n_samples"],
            "outliers": _outlier_share(known["health"] or {}),
            "trained": summary["selection"].get(i, 0),
            "bundle": i in summary["installed"],
            "quarantine": summary["quarantined"].get(i),
            "retired": i in summary["retired"],
            "clusters": clusters,
            "accuracy": list(self._accuracy.get(i, ())),
            "now": self._now.get(i, ""),
            "why": why,
        }

    # ---------------------------------------------------------------------------------------------------------- why

    def device(self, i: str, n_rounds: int = 50) -> dict[str, Any]:
        """A device's recent orders with their outcome, and its events, as JSON values."""
        self.update()
        rounds = list(self._rounds)[-n_rounds:]
        rows = [row | {"round": r} for r in reversed(rounds) for row in self.asked(r, i)]
        return {"device": i, "rounds": rows, "events": [told(e) for e in self._store.events(device=i, last=100)]}

    def round(self, number: int) -> dict[str, Any]:
        """The orders of each device in a round, and why others got none, as JSON values."""
        self.update()
        row = self._rounds.get(number)
        text = "" if row is None else _counted(row)
        return {"round": number, "text": text, "devices": list(self.asked(number))}

    def asked(self, number: int, device: str | None = None) -> Iterator[dict[str, Any]]:
        """By device: its order in a round and the outcome; or why it was not chosen or absent."""
        entries = [e for e in self._store.entries(number) if device in {None, e.order.device_id}]
        rows = [row_of_entry(entry) for entry in entries]
        stored = {row["device"] for row in rows}
        passed: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for event in self._events_of(number, device):
            match event.name:
                case "answer" | "closed" if event.device not in stored and device in {None, event.device}:
                    rows.append(row_of_end(event))
                case "chosen":
                    passed |= dict(passed_over(event.fields))
                    chosen |= dict(taken(event.fields))
                case "left_out":
                    passed[event.device] = event.fields["reason"]
                case "problem" if event.device not in passed:
                    passed[event.device] = event.fields["reason"]
        asked = {row["device"] for row in rows}
        for row in sorted(rows, key=lambda row: (row["device"], row["step"])):
            why = "" if row["outcome"] == "answered" else row["why"] or passed.get(row["device"], "")
            yield row | {"chosen": chosen.get(row["device"], ""), "why": why}
        for i in sorted(passed.keys() - asked):
            if device in {None, i}:
                yield row_of(i, "", "not asked", why=passed[i]) | {"chosen": ""}

    def _events_of(self, number: int, device: str | None) -> list[Event]:
        """A round's events; of a device: its own, and those that are nobody's."""
        if device is None:
            return self._store.events(round=number, limit=MAX_OF_ROUND)
        told = (self._store.events(round=number, device=i, limit=MAX_OF_ROUND) for i in (device, ""))
        return sorted(chain(*told), key=lambda event: event.number)

    def why(self, i: str, number: int | None = None) -> list[str]:
        """In words: a device's state, and what became of it in a round (None: its last one).

        Raises:
            ConfigError: the device is unknown.
        """
        self.update()
        summary = read_summary(self._home)
        known = summary["fleet"].get(i)
        trouble = trouble_of(i, summary, self._answered.get(i, 0))
        if not (known or trouble or i in summary["selection"] or self._store.events(device=i, last=1)):
            raise ConfigError(f"no device {i} was ever heard of in {self._home}; fedge devices lists them")
        if number is not None and number not in self._rounds:
            raise ConfigError(f"nothing is known of round {number}: fedge rounds lists those that are")
        presence = known["presence"] if known else "away"
        state = f"was {presence} when the run ended" if summary["done"] else f"is {presence}"
        told = [f"{i} {state}" + (f": {trouble}" if trouble else "")]
        for r in [number] if number is not None else reversed(list(self._rounds)):
            if rows := list(self.asked(r, i)):
                chosen = [rows[0]["chosen"]] if rows[0]["chosen"] else []
                return told + [f"round {r}: {text}" for text in (*map(sentence, rows), *chosen)]
        there = "" if number is None else f" in round {number}"
        return [*told, f"it was asked nothing{there}, and no reason was written down: it was not there when it began"]


KEPT: Final = (
    "federation", "method", "round", "rounds", "done", "paused", "history", "bytes_up", "bytes_down", "wall_s", "age_s",
)  # fmt: skip
NOBODY: Final[Mapping[str, Any]] = {
    "presence": "not seen",
    "seen_at": None,
    "context": None,
    "release": 0,
    "n_samples": None,
    "withholds": [],
    "health": None,
}


COUNTED: Final = dict.fromkeys(("asked", "answered", "late", "failed"), 0)
UNTIL_DONE: Final = dict.fromkeys(("done_at", "accuracy", "bytes_up", "bytes_down"))
"""What is told of a round, and what is not known before its end."""


def _outlier_share(health: Mapping[str, Any]) -> float | None:
    """The share of a runtime's predictions that it flagged; None: nothing predicted, or not told."""
    counts = health.get("outliers") or {"seen": 0}
    return counts["flagged"] / counts["seen"] if counts["seen"] else None


def _open(row: Mapping[str, Any]) -> int:
    closed: int = row["answered"] + row["late"] + row["failed"]
    return max(int(row["asked"]) - closed, 0)


def _counted(row: Mapping[str, Any]) -> str:
    """The orders of a round in words, each in one of the counts."""
    counts = {"answered": row["answered"], "late": row["late"], "failed or declined": row["failed"], "open": _open(row)}
    asked = "1 order" if row["asked"] == 1 else f"{row['asked']} orders"
    return ", ".join([asked, *(f"{n} {name}" for name, n in counts.items() if n)])
