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

from coordinator.store.records import OrderStatus
from coordinator.store.store import Entry, Event, Store
from fedge.errors import ConfigError, StoreError
from fedge.wire.messages import Outcome, Presence, Why

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
                self._passed |= dict(_passed_over(fields))
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
        rows = [_entry(entry) for entry in entries]
        stored = {row["device"] for row in rows}
        passed: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for event in self._events_of(number, device):
            match event.name:
                case "answer" | "closed" if event.device not in stored and device in {None, event.device}:
                    rows.append(_ended(event))
                case "chosen":
                    passed |= dict(_passed_over(event.fields))
                    chosen |= dict(_taken(event.fields))
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
                yield _told_of(i, "", "not asked", why=passed[i]) | {"chosen": ""}

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


def headline(summary: Mapping[str, Any]) -> str:
    """The run's progress in one line."""
    number, rounds = summary["round"], summary["rounds"]
    if summary.get("failed"):
        return f"failed: {summary['failed']}"
    if summary["done"]:
        return f"done after {rounds} rounds, {len(summary['installed'])} bundles installed"
    if summary["paused"]:
        return f"paused after round {number} of {rounds}"
    if summary["waiting"]:
        return f"waiting until {summary['waiting']} devices are there"
    if number >= rounds:
        return "the end is under way: devices write their bundles"
    return f"round {number + 1} of {rounds} is under way"


def trouble_of(i: str, summary: Mapping[str, Any], since: int = 0) -> str:
    """Why a device takes no part, or its last problem, from round `since` on; empty: nothing."""
    known = summary["fleet"].get(i)
    if i in summary["retired"]:
        return "retired: it gets no more orders"
    if out := summary["quarantined"].get(i):
        names = ", ".join(f"{each['name']} in round {each['round']}" for each in out["evidence"])
        return f"in quarantine until round {out['until']}: {names}"
    if known is not None and known["presence"] != Presence.ONLINE:
        return f"it is {known['presence']}"
    if (problem := summary["problems"].get(i)) and problem["round"] >= since:
        return f"round {problem['round']}: {problem['reason']}"
    if i in summary["clocks"]:
        return "its clock differs from ours"
    return ""


def without_bundle_because(summary: Mapping[str, Any]) -> dict[str, str]:
    """Why each device that should have a bundle has none, by ascending id."""
    return {i: trouble_of(i, summary) or "it did not say why" for i in summary["without_bundle"]}


def _told_of(
    device: str, step: str, outcome: str, *, seconds: float = 0.0, size_bytes: int | None = None, why: str = ""
) -> dict[str, Any]:
    """An order as people see it."""
    return {"device": device, "step": step, "outcome": outcome, "seconds": seconds, "bytes": size_bytes, "why": why}


def _entry(entry: Entry) -> dict[str, Any]:
    """An order that is stored."""
    device, step, report = entry.order.device_id, entry.order.label, entry.report
    if report is None:
        outcome = "late" if entry.status is OrderStatus.EXPIRED else str(entry.status)
        return _told_of(device, step, outcome, why=entry.reason)
    done = report.outcome is Outcome.DONE
    outcome, why = ("answered", "") if done else (str(report.outcome), (report.why or Why.OTHER).words)
    size_bytes = sum(ref.size_bytes for ref in report.blobs)
    return _told_of(device, step, outcome, seconds=report.seconds, size_bytes=size_bytes, why=why)


def _ended(event: Event) -> dict[str, Any]:
    """An order that is no longer stored, by the event that told how it ended."""
    f = event.fields
    if event.name == "closed":
        return _told_of(event.device, f["label"], "late" if f["late"] else "rejected", why=f["reason"])
    outcome = "answered" if f["result"] == Outcome.DONE else f["result"]
    return _told_of(event.device, f["label"], outcome, seconds=f.get("seconds", 0.0))


def _passed_over(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why devices were not chosen to train, by id."""
    chosen, deadline = set(fields["ids"]), fields["deadline_s"]
    for i, seconds in fields["seconds"].items():
        if i in chosen:
            continue
        if deadline is not None and seconds > deadline:
            yield i, f"not chosen: it would take about {seconds:.3g} s, and the deadline is {deadline:.3g} s"
        else:
            how = f", at about {seconds:.3g} s" if seconds else ""
            others = "1 other" if len(chosen) == 1 else f"{len(chosen)} others"
            yield i, f"not chosen: the selection took {others}{how}{_estimate(fields, i)}"


def _taken(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why devices were chosen to train, by id."""
    for i in fields["ids"]:
        if i in fields["overdue"]:
            yield i, "chosen: it had waited long"
            continue
        how = ""
        if seconds := fields["seconds"].get(i):
            limit = "" if fields["deadline_s"] is None else f", within the deadline of {fields['deadline_s']:.3g} s"
            how = f": it would take about {seconds:.3g} s{limit}"
        yield i, f"chosen among {len(fields['seconds'])}{how}{_estimate(fields, i)}"


def _estimate(fields: Mapping[str, Any], i: str) -> str:
    """What the bandit expected of a device; empty where another rule chose."""
    if i not in fields.get("estimates", {}):  # events of an earlier fedge have none
        return ""
    gain, bonus = fields["estimates"][i]
    return f"; expected gain {gain:.3f}, exploration bonus {bonus:.3f}"


def sentence(row: Mapping[str, Any]) -> str:
    """A device's order and its outcome in words."""
    step = f"{row['step']}: " if row["step"] else ""
    took = f" after {row['seconds']:.1f} s" if row["seconds"] else ""
    return f"{step}{row['outcome']}{took}" + (f", {row['why']}" if row["why"] else "")


def told(event: Event) -> dict[str, Any]:
    """An event for people, as JSON values."""
    return {
        "number": event.number,
        "at": event.at,
        "round": event.round,
        "name": event.name,
        "device": event.device,
        "text": text_of(event),
    }


def count_devices(n: int) -> str:
    """A number of devices in words."""
    return "1 device" if n == 1 else f"{n} devices"


def text_of(event: Event) -> str:
    """An event in words."""
    f = event.fields
    took = f" after {f['seconds']:.1f} s" if f.get("seconds") and event.name == "answer" else ""
    match event.name:
        case "waiting":
            text = f"until {f['devices']} devices are there"
        case "round_begun":
            text = count_devices(f["devices"])
        case "asked":
            text = f"{f['label']}: {count_devices(f['devices'])}"
        case "answer":
            text = f"{f['label']}: {f['result']}{took}"
        case "chosen":
            late = f", {len(f['overdue'])} of them since they had waited long" if f["overdue"] else ""
            text = f"{len(f['ids'])} of {len(f['seconds'])} devices chosen{late}"
        case "closed":
            text = f"{f['label']}: {f['reason']}"
        case "round_done":
            text = "" if f["accuracy"] is None else f"accuracy {100 * f['accuracy']:.1f} %"
        case _:
            text = ", ".join(str(value) for value in f.values() if value != "")
    return text
