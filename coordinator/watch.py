"""A federation for people to look at: its devices, its rounds, and the reasons behind them.

Everything is read from the coordinator's home: its latest `summary.json`, and its store's events. Nothing here changes
anything, and nothing waits for the coordinator.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.fleet.orders import OrderStatus
from coordinator.store import Entry, Event, Store
from fedge.errors import ConfigError, StoreError
from fedge.messages import Outcome, Presence, Why

POINTS: Final = 500
"""Accuracies that are kept of a device."""
ROUNDS: Final = 1000
"""Rounds that are told of."""
MAX_OF_ROUND: Final = 50_000
"""Events of one round that are looked at."""
OF_AN_ORDER: Final = frozenset({"answer", "closed"})
"""Events that say how an order ended; they stay when the order is deleted (`--keep-rounds`)."""
PASSED: Final = frozenset({"chosen", "left_out", "problem"})
"""Events that say why a device was not asked."""
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
        self._accuracy: defaultdict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=POINTS))
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
                    self._accuracy[event.device].append((event.round, share))
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
        return self._rounds.setdefault(
            event.round, {"round": event.round, "begun_at": event.at, "done_at": None, **_nothing()}
        )

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
        return {
            "id": i,
            **known,
            "n_samples": None if "count" in known["withholds"] else known["n_samples"],
            "trained": summary["selection"].get(i, 0),
            "bundle": i in summary["installed"],
            "quarantine": summary["quarantined"].get(i),
            "retired": i in summary["retired"],
            "clusters": clusters,
            "accuracy": list(self._accuracy.get(i, ())),
            "now": self._now.get(i, ""),
            "why": self._trouble(i, summary) or (self._passed.get(i, "") if self._now.get(i) == "not asked" else ""),
        }

    def _trouble(self, i: str, summary: Mapping[str, Any]) -> str:
        """As `trouble_of`, without problems before its last answer."""
        return trouble_of(i, summary, self._answered.get(i, 0))

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
        text = "" if row is None else f"{row['asked']} orders, {row['answered']} answered, {row['late']} late"
        return {"round": number, "text": text, "devices": list(self.asked(number))}

    def asked(self, number: int, device: str | None = None) -> Iterator[dict[str, Any]]:
        """By device: its order in a round and the outcome; or why it was not chosen or absent."""
        entries = [e for e in self._store.entries(number) if device in {None, e.order.device_id}]
        events = [e for e in self._store.events(round=number, limit=MAX_OF_ROUND) if e.name in OF_AN_ORDER | PASSED]
        stored = {entry.order.device_id for entry in entries}
        ended = [
            _ended(e) for e in events if e.name in OF_AN_ORDER and e.device not in stored and device in {None, e.device}
        ]
        asked = stored | {row["device"] for row in ended}
        passed: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for event in events:
            match event.name:
                case "chosen":
                    passed |= dict(_passed_over(event.fields))
                    chosen |= dict(_taken(event.fields))
                case "left_out":
                    passed[event.device] = event.fields["reason"]
                case "problem" if event.device not in passed:
                    passed[event.device] = event.fields["reason"]
        rows = [row | {"chosen": chosen.get(row["device"], "")} for row in (*map(_entry, entries), *ended)]
        yield from sorted(rows, key=lambda row: (row["device"], row["step"]))
        for i in sorted(passed.keys() - asked):
            if device in {None, i}:
                yield NOT_ASKED | {"device": i, "why": passed[i]}

    def why(self, i: str, number: int | None = None) -> list[str]:
        """In words: a device's state, and what became of it in a round (None: its last one).

        Raises:
            ConfigError: the device is unknown.
        """
        self.update()
        summary = read_summary(self._home)
        known = summary["fleet"].get(i)
        events = self._store.events(device=i, last=1)
        if known is None and not events and not self._trouble(i, summary) and i not in summary["selection"]:
            raise ConfigError(f"no device {i} was ever heard of in {self._home}; fedge devices lists them")
        lines = [
            f"{i} {'was' if summary['done'] else 'is'} {known['presence'] if known else 'away'}"
            + (" when the run ended" if summary["done"] else "")
            + (f": {t}" if (t := self._trouble(i, summary)) else "")
        ]
        if number is not None and number not in self._rounds:
            raise ConfigError(f"nothing is known of round {number}: fedge rounds lists those that are")
        rounds = [number] if number is not None else list(reversed(list(self._rounds)[-ROUNDS:]))
        for r in rounds:
            rows = list(self.asked(r, i))
            lines += [f"round {r}: {sentence(row)}" for row in rows]
            lines += [f"round {r}: {rows[0]['chosen']}"] if rows and rows[0]["chosen"] else []
            if rows:
                break
        else:
            there = "" if number is None else f" in round {number}"
            lines.append(f"it was asked nothing{there}, and no reason was written down: it was not there when it began")
        return lines


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


NOT_ASKED: Final[dict[str, Any]] = {
    "step": "",
    "outcome": "not asked",
    "seconds": 0.0,
    "bytes": None,
    "chosen": "",
}


def _nothing() -> dict[str, Any]:
    return {
        "labels": {},
        "asked": 0,
        "answered": 0,
        "late": 0,
        "failed": 0,
        "accuracy": None,
        "bytes_up": None,
        "bytes_down": None,
    }


def _open(row: Mapping[str, Any]) -> int:
    closed: int = row["answered"] + row["late"] + row["failed"]
    return max(int(row["asked"]) - closed, 0)


def headline(summary: Mapping[str, Any]) -> str:
    """The run's progress in one line."""
    number, rounds = summary["round"], summary["rounds"]
    if summary["done"]:
        return f"done after {rounds} rounds, {len(summary['installed'])} bundles installed"
    if summary["paused"]:
        return f"paused after round {number} of {rounds}"
    if summary["waiting"]:
        return f"waiting until {summary['waiting']} devices are there"
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


def _entry(entry: Entry) -> dict[str, Any]:
    """An order as people see it."""
    report = entry.report
    outcome, why = str(entry.status), entry.reason
    if entry.status is OrderStatus.EXPIRED:
        outcome = "late"
    if report is not None:
        outcome = "answered" if report.outcome is Outcome.DONE else str(report.outcome)
        why = "" if report.outcome is Outcome.DONE else (report.why or Why.OTHER).words
    seconds = report.seconds if report else 0.0
    return {
        "device": entry.order.device_id,
        "step": entry.order.label,
        "outcome": outcome,
        "seconds": seconds,
        "bytes": None if report is None else sum(ref.size_bytes for ref in report.blobs),
        "why": why,
    }


def _ended(event: Event) -> dict[str, Any]:
    """An order that is no longer stored, as `_entry`, from the event that told how it ended."""
    f = event.fields
    if event.name == "closed":
        outcome, why = "late" if f["late"] else "rejected", f["reason"]
    else:
        outcome, why = "answered" if f["result"] == Outcome.DONE else f["result"], ""
    return {
        "device": event.device,
        "step": f["label"],
        "outcome": outcome,
        "seconds": f.get("seconds", 0.0),
        "bytes": None,
        "why": why,
    }


def _passed_over(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why devices were not chosen to train, by id."""
    chosen, deadline = set(fields["ids"]), fields["deadline_s"]
    for i, seconds in fields["seconds"].items():
        if i in chosen:
            continue
        if deadline is not None and seconds > deadline:
            yield i, f"not chosen: it would take about {seconds:.1f} s, and the deadline is {deadline:.1f} s"
        else:
            how = f", at about {seconds:.1f} s" if seconds else ""
            yield i, f"not chosen: the selection took {len(chosen)} others{how}"


def _taken(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why devices were chosen to train, by id."""
    for i in fields["ids"]:
        if i in fields["overdue"]:
            yield i, "chosen: it had waited long"
        elif not (seconds := fields["seconds"].get(i)):
            yield i, f"chosen among {len(fields['seconds'])}"
        else:
            limit = "" if fields["deadline_s"] is None else f", within the deadline of {fields['deadline_s']:.1f} s"
            yield i, f"chosen among {len(fields['seconds'])}: it would take about {seconds:.1f} s{limit}"


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


def text_of(event: Event) -> str:
    """An event in words."""
    f = event.fields
    took = f" after {f['seconds']:.1f} s" if f.get("seconds") and event.name == "answer" else ""
    match event.name:
        case "waiting":
            text = f"until {f['devices']} devices are there"
        case "round_begun":
            text = f"{f['devices']} devices"
        case "asked":
            text = f"{f['label']}: {f['devices']} devices"
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
