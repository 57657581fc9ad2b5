"""A view of a federation for people: its devices, its rounds, and the reasons behind them.

Everything is read from the coordinator's home: its latest `summary.json`, and its store's events. Nothing here changes
anything, and nothing waits for the coordinator.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.store.records import Event
from coordinator.store.store import Store
from coordinator.watch.accuracy import find_accuracy, find_trained, summarise_accuracy
from coordinator.watch.attention import describe_attention, is_heard, list_attention
from coordinator.watch.expiring import list_signatures
from coordinator.watch.liveness import describe_coordinator, forget_presence, refresh_presence
from coordinator.watch.words import (
    describe_experts,
    describe_progress,
    describe_row,
    explain_chosen,
    explain_passed_over,
    explain_trouble,
    make_end_row,
    make_entry_row,
    make_event_values,
    make_row,
)
from fedge.errors import ConfigError, StoreError
from fedge.wire.messages import Outcome

POINTS: Final = 200
"""Most accuracies that are kept of a device. Then every other accuracy between the first and the last is dropped."""
ROUNDS: Final = 1000
"""Most rounds that are reported, the last ones."""
MAX_OF_ROUND: Final = 50_000
"""Most events of one round that are read."""
PAGE: Final = 5000
"""Most events that are read at a time."""


def read_summary(home: Path) -> dict[str, Any]:
    """Read the coordinator's latest summary, whether it still runs, and what needs attention, as JSON values.

    If it does not run, or does not reach the broker, the devices' presence is "unknown" (`coordinator.watch.liveness`).

    Raises:
        ConfigError: there is no summary.
        StoreError: the summary cannot be read.
    """
    file = home / "summary.json"
    if not file.exists():
        raise ConfigError(f"{file} is not there: {home} is no coordinator's --home")
    try:
        summary: dict[str, Any] = json.loads(file.read_bytes())
        now = time.time()
        summary["age_s"] = max(now - summary["at"], 0.0)
        summary["coordinator"] = describe_coordinator(home, summary)
        summary["free_disk_gb"] = shutil.disk_usage(home).free / 1e9
        summary["signatures"] = msgspec.to_builtins(list_signatures(home, now))
        summary["attention"] = msgspec.to_builtins(list_attention(summary, now))
        if is_heard(summary):
            refresh_presence(summary, now)
        else:
            forget_presence(summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{file} is damaged or of another version; the next round writes it anew: {error!r}"
        ) from error
    return summary


class Watch:
    """The view of a federation from its home, for use by one thread at a time."""

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
        while page := self._store.get_events(after=self._last, limit=PAGE):
            for event in page:
                self._apply_event(event)
            self._last = page[-1].number
            new += page
        return new

    def _apply_event(self, event: Event) -> None:
        fields = event.fields
        match event.name:
            case "round_begun":
                self._now, self._passed = {}, {}
                self._rounds.pop(event.round, None)
                self._get_row(event)
                for old in list(self._rounds)[:-ROUNDS]:
                    del self._rounds[old]
            case "chosen":
                self._passed |= dict(explain_passed_over(fields))
                self._now = dict.fromkeys(self._passed, "not asked") | self._now | dict.fromkeys(fields["ids"], "asked")
            case "asked":  # again, if the coordinator was started again
                row = self._get_row(event)
                row["labels"][fields["label"]] = fields["devices"]
                row["asked"] = sum(row["labels"].values())
            case "answer":
                done = fields["result"] == Outcome.DONE
                self._get_row(event)["answered" if done else "failed"] += 1
                self._now[event.device] = "answered" if done else fields["result"]
                if done:
                    self._answered[event.device] = event.round
                if (share := fields.get("accuracy")) is not None:
                    points = self._accuracy[event.device]
                    points.append((event.round, round(share, 4)))
                    if len(points) > POINTS:
                        del points[1:-1:2]
            case "closed":
                self._get_row(event)["late" if fields["late"] else "failed"] += 1
                self._now[event.device] = "late" if fields["late"] else "rejected"
            case "round_done":
                total = fields["bytes_up"], fields["bytes_down"]
                before = (0, 0) if event.round == 1 else self._bytes
                self._bytes = total
                up, down = (None, None) if before is None else (total[0] - before[0], total[1] - before[1])
                self._get_row(event).update(done_at=event.at, accuracy=fields["accuracy"], bytes_up=up, bytes_down=down)

    def _get_row(self, event: Event) -> dict[str, Any]:
        row = {"round": event.round, "begun_at": event.at, "labels": {}} | COUNTED | UNTIL_DONE
        return self._rounds.setdefault(event.round, row)

    def get_state(self) -> dict[str, Any]:
        """Return the page's overview as JSON values."""
        self.update()
        summary = read_summary(self._home)
        clusters = {str(k): list(members) for k, members in summary["clusters"].items()}
        of: defaultdict[str, list[str]] = defaultdict(list)
        for name, members in clusters.items():
            for i in members:
                of[i].append(name)
        ids = sorted({*summary["fleet"], *summary["selection"], *summary["problems"], *summary["quarantined"]})
        rows = [row | {"open": _count_open(row)} for row in self._rounds.values()]
        return {
            **{name: summary[name] for name in (*KEPT, *(KEPT_IF_THERE & summary.keys()))},
            "coordinator": summary["coordinator"],
            "accuracy": (trained := find_trained(summary["history"])),
            "shown": msgspec.to_builtins(summarise_accuracy(summary["fleet"].values(), trained)),
            "text": describe_progress(summary),
            "experts": describe_experts(summary),
            "clusters": [{"name": name, "members": members} for name, members in clusters.items()],
            "devices": [self._describe_device(i, summary, of[i]) for i in ids],
            "rounds_list": rows,
        }

    def _describe_device(self, i: str, summary: Mapping[str, Any], clusters: list[str]) -> dict[str, Any]:
        known = {**NOBODY, **summary["fleet"].get(i, {})}
        why = explain_trouble(i, summary, self._answered.get(i, 0))
        if not why and self._now.get(i) == "not asked":
            why = self._passed.get(i, "")
        points = list(self._accuracy.get(i, ()))
        return {
            "id": i,
            **known,
            "n_samples": None if "count" in known["withholds"] else known["n_samples"],
            "outliers": _compute_outlier_share(known["health"] or {}),
            "trained": summary["selection"].get(i, 0),
            "bundle": i in summary["installed"],
            "quarantine": summary["quarantined"].get(i),
            "retired": i in summary["retired"],
            "clusters": clusters,
            "accuracy": points,
            "shown": msgspec.to_builtins(find_accuracy(known, points[-1][1] if points else None)),
            "now": self._now.get(i, ""),
            "why": why,
            "attention": [item["text"] for item in summary["attention"] if item["device"] == i],
        }

    # ---------------------------------------------------------------------------------------------------------- why

    def describe_device(self, i: str, n_rounds: int = 50) -> dict[str, Any]:
        """Return a device's recent orders with their outcome, and its events, as JSON values."""
        self.update()
        rounds = list(self._rounds)[-n_rounds:]
        rows = [row | {"round": r} for r in reversed(rounds) for row in self.iterate_orders(r, i)]
        return {
            "device": i,
            "rounds": rows,
            "events": [make_event_values(e) for e in self._store.get_events(device=i, last=100)],
        }

    def describe_round(self, number: int) -> dict[str, Any]:
        """Return the orders of each device in a round, and why others got none, as JSON values."""
        self.update()
        row = self._rounds.get(number)
        text = "" if row is None else _describe_counts(row)
        return {"round": number, "text": text, "devices": list(self.iterate_orders(number))}

    def iterate_orders(self, number: int, device: str | None = None) -> Iterator[dict[str, Any]]:
        """Iterate by device over its order in a round and the outcome, or why it was not chosen or absent."""
        entries = [e for e in self._store.get_entries(number) if device in {None, e.order.device_id}]
        rows = [make_entry_row(entry) for entry in entries]
        stored = {row["device"] for row in rows}
        passed: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for event in self._get_events(number, device):
            match event.name:
                case "answer" | "closed" if event.device not in stored and device in {None, event.device}:
                    rows.append(make_end_row(event))
                case "chosen":
                    passed |= dict(explain_passed_over(event.fields))
                    chosen |= dict(explain_chosen(event.fields))
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
                yield make_row(i, "", "not asked", why=passed[i]) | {"chosen": ""}

    def _get_events(self, number: int, device: str | None) -> list[Event]:
        """Return a round's events; if a device is given, only its own and those of no device."""
        if device is None:
            return self._store.get_events(round=number, limit=MAX_OF_ROUND)
        events = (self._store.get_events(round=number, device=i, limit=MAX_OF_ROUND) for i in (device, ""))
        return sorted(chain(*events), key=lambda event: event.number)

    def explain_device(self, i: str, number: int | None = None) -> list[str]:
        """Explain a device's state, and what it did in a round, by default its last.

        Raises:
            ConfigError: the device is unknown.
        """
        self.update()
        summary = read_summary(self._home)
        known = summary["fleet"].get(i)
        trouble = explain_trouble(i, summary, self._answered.get(i, 0))
        if not (known or trouble or i in summary["selection"] or self._store.get_events(device=i, last=1)):
            raise ConfigError(f"no device {i} was ever heard of in {self._home}; fedge devices lists them")
        if number is not None and number not in self._rounds:
            raise ConfigError(f"nothing is known of round {number}: fedge rounds lists those that are")
        presence = known.get("was", known["presence"]) if known else "away"
        state = STATES[summary["coordinator"]["state"]].format(presence)
        explanation = [f"{i} {state}" + (f": {trouble}" if trouble else "")]
        explanation += describe_attention([item for item in summary["attention"] if item["device"] == i])
        for r in [number] if number is not None else reversed(list(self._rounds)):
            if rows := list(self.iterate_orders(r, i)):
                chosen = [rows[0]["chosen"]] if rows[0]["chosen"] else []
                return explanation + [f"round {r}: {text}" for text in (*map(describe_row, rows), *chosen)]
        there = "" if number is None else f" in round {number}"
        return [
            *explanation,
            f"it was asked nothing{there}, and no reason was written down: it was not there when it began",
        ]


STATES: Final = {
    "running": "is {}",
    "ended": "was {} when the run ended",
    "silent": "was {} when the coordinator was last heard",
}
"""What the presence of a device means, by the coordinator's state."""
KEPT: Final = (
    "federation", "method", "round", "rounds", "done", "paused", "history", "bytes_up", "bytes_down", "wall_s", "age_s",
    "attention",
)  # fmt: skip
KEPT_IF_THERE: Final = frozenset({"best", "broker", "campaign", "introduction", "rollout", "score_name", "stopped"})
NOBODY: Final[Mapping[str, Any]] = {
    "presence": "not seen",
    "seen_at": None,
    "context": None,
    "release": 0,
    "n_samples": None,
    "withholds": [],
    "health": None,
    "serving": "none",
}


COUNTED: Final = dict.fromkeys(("asked", "answered", "late", "failed"), 0)
UNTIL_DONE: Final = dict.fromkeys(("done_at", "accuracy", "bytes_up", "bytes_down"))
"""Fields of a round that are None before its end."""


def _compute_outlier_share(health: Mapping[str, Any]) -> float | None:
    """Return a runtime's share of flagged predictions, in [0, 1]; None if nothing was predicted or reported."""
    counts = health.get("outliers") or {"seen": 0}
    return counts["flagged"] / counts["seen"] if counts["seen"] else None


def _count_open(row: Mapping[str, Any]) -> int:
    closed: int = row["answered"] + row["late"] + row["failed"]
    return max(int(row["asked"]) - closed, 0)


def _describe_counts(row: Mapping[str, Any]) -> str:
    """Describe the counts of a round's orders in words; each order is in one count."""
    counts = {
        "answered": row["answered"],
        "late": row["late"],
        "failed or declined": row["failed"],
        "open": _count_open(row),
    }
    asked = "1 order" if row["asked"] == 1 else f"{row['asked']} orders"
    return ", ".join([asked, *(f"{n} {name}" for name, n in counts.items() if n)])
