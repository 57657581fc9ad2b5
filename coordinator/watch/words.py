"""A federation in words: its progress, its orders and events, and its devices' troubles."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.store.records import Entry, Event, OrderStatus
from coordinator.watch.accuracy import find_figure
from fedge.wire.messages import Outcome, Presence, Why


def format_duration(seconds: float) -> str:
    """Format a time in words, in its largest unit."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    unit, name = next((n, name) for n, name in units if seconds >= n or n == 1)
    return f"{seconds / unit:.0f} {name}"


def format_age(at: float | None) -> str:
    """Format the time since something (seconds since the epoch) in words."""
    return "-" if at is None else f"{format_duration(max(time.time() - at, 0))} ago"


def describe_progress(summary: Mapping[str, Any]) -> str:
    """Describe the run's progress in one line."""
    number, rounds = summary["round"], summary["rounds"]
    if summary.get("failed"):
        return f"failed: {summary['failed']}"
    stopped = summary.get("stopped")
    early = "" if stopped is None else f"; it stopped early, and devices get the models of round {summary['best']}"
    if summary["done"]:
        return f"done after {stopped or rounds} rounds, {len(summary['installed'])} bundles installed{early}"
    if summary["paused"]:
        return f"paused after round {number} of {rounds}"
    if summary["waiting"]:
        return f"waiting until {summary['waiting']} devices are there"
    if number >= rounds:
        return f"the end is under way: devices write their bundles{early}"
    return f"round {number + 1} of {rounds} is under way"


def describe_experts(summary: Mapping[str, Any]) -> str:
    """Describe the experts that all devices have together, without clusters; empty if there is one model for all."""
    experts, top = summary.get("experts", 1), summary.get("top", 1)
    if summary["split"] or experts < 2:
        return ""
    best = "the best answers" if top < 2 else f"the best {top} answer"
    return (
        f"{experts} experts and a gate, of which {best} each input: a device that does not train gets them, or a mix "
        "for its own samples"
    )


def describe_campaign(campaign: Mapping[str, Any]) -> str:
    """Describe the present campaign, or the rest after it, in one line. `campaign`: as in HOME/summary.json."""
    why = f": {campaign['why']}" if campaign["why"] else ""
    if campaign["ended_at"] is None:
        paused = ", paused" if campaign["state"] == "paused" else ""
        return f"{campaign['number']}{paused}, since {format_age(campaign['began_at'])}{why}"
    next_at = campaign["next_at"]
    when = "" if next_at is None else f"; the next look is in {format_duration(max(next_at - time.time(), 0))}"
    paused = "; paused" if campaign["state"] == "paused" else ""
    return f"{campaign['number']} ended {format_age(campaign['ended_at'])}{why}{when}{paused}"


def explain_trouble(i: str, summary: Mapping[str, Any], since: int = 0) -> str:
    """Explain why a device takes no part, or its last problem, from round `since` on; empty without any."""
    known = summary["fleet"].get(i)
    if i in summary["retired"]:
        return "retired: it gets no more orders"
    if out := summary["quarantined"].get(i):
        names = ", ".join(f"{each['name']} in round {each['round']}" for each in out["evidence"])
        return f"in quarantine until round {out['until']}: {names}"
    if known is not None and known.get("was", known["presence"]) != Presence.ONLINE:
        return f"it was {known['was']}" if "was" in known else f"it is {known['presence']}"
    if (problem := summary["problems"].get(i)) and problem["round"] >= since:
        return f"round {problem['round']}: {problem['reason']}"
    if i in summary["clocks"]:
        return "its clock differs from ours"
    return ""


def explain_no_bundle(summary: Mapping[str, Any]) -> dict[str, str]:
    """Explain why each device that should have a bundle has none, by ascending id."""
    return {i: explain_trouble(i, summary) or "it did not say why" for i in summary["without_bundle"]}


def make_row(
    device: str, step: str, outcome: str, *, seconds: float = 0.0, size_bytes: int | None = None, why: str = ""
) -> dict[str, Any]:
    """Return an order's figures as people see them."""
    return {"device": device, "step": step, "outcome": outcome, "seconds": seconds, "bytes": size_bytes, "why": why}


def make_entry_row(entry: Entry) -> dict[str, Any]:
    """Return an order that is stored, as people see it."""
    device, step, report = entry.order.device_id, entry.order.label, entry.report
    if report is None:
        outcome = "late" if entry.status is OrderStatus.EXPIRED else str(entry.status)
        return make_row(device, step, outcome, why=entry.reason)
    done = report.outcome is Outcome.DONE
    outcome, why = ("answered", "") if done else (str(report.outcome), (report.why or Why.OTHER).words)
    size_bytes = sum(ref.size_bytes for ref in report.blobs)
    return make_row(device, step, outcome, seconds=report.seconds, size_bytes=size_bytes, why=why)


def make_end_row(event: Event) -> dict[str, Any]:
    """Return an order that is no longer stored, as people see it, from the event of its end."""
    f = event.fields
    if event.name == "closed":
        return make_row(event.device, f["label"], "late" if f["late"] else "rejected", why=f["reason"])
    outcome = "answered" if f["result"] == Outcome.DONE else f["result"]
    return make_row(event.device, f["label"], outcome, seconds=f.get("seconds", 0.0))


def explain_passed_over(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Explain why devices were not chosen to train, by id."""
    chosen, deadline = set(fields["ids"]), fields["deadline_s"]
    for i, seconds in fields["seconds"].items():
        if i in chosen:
            continue
        if deadline is not None and seconds > deadline:
            yield i, f"not chosen: it would take about {seconds:.3g} s, and the deadline is {deadline:.3g} s"
        else:
            how = f", at about {seconds:.3g} s" if seconds else ""
            others = "1 other" if len(chosen) == 1 else f"{len(chosen)} others"
            yield i, f"not chosen: the selection took {others}{how}{_describe_estimate(fields, i)}"


def explain_chosen(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Explain why devices were chosen to train, by id."""
    for i in fields["ids"]:
        if i in fields["overdue"]:
            yield i, "chosen: it had waited long"
            continue
        how = ""
        if seconds := fields["seconds"].get(i):
            limit = "" if fields["deadline_s"] is None else f", within the deadline of {fields['deadline_s']:.3g} s"
            how = f": it would take about {seconds:.3g} s{limit}"
        yield i, f"chosen among {len(fields['seconds'])}{how}{_describe_estimate(fields, i)}"


def _describe_estimate(fields: Mapping[str, Any], i: str) -> str:
    """Describe what the bandit expected of a device; empty if another rule chose."""
    if i not in fields.get("estimates", {}):  # events of an earlier fedge have none
        return ""
    gain, bonus = fields["estimates"][i]
    return f"; expected gain {gain:.3f}, exploration bonus {bonus:.3f}"


def describe_row(row: Mapping[str, Any]) -> str:
    """Describe a device's order and its outcome in words."""
    step = f"{row['step']}: " if row["step"] else ""
    took = f" after {row['seconds']:.1f} s" if row["seconds"] else ""
    return f"{step}{row['outcome']}{took}" + (f", {row['why']}" if row["why"] else "")


def make_event_values(event: Event) -> dict[str, Any]:
    """Return an event for people, as JSON values."""
    return {
        "number": event.number,
        "at": event.at,
        "round": event.round,
        "name": event.name,
        "device": event.device,
        "text": describe_event(event),
    }


def _describe_campaign_event(name: str, f: Mapping[str, Any]) -> str:
    """Describe an event of a campaign, or of the introduction of its bundles."""
    match name:
        case "campaign_begun":
            return f"campaign {f['number']}: {f['reason']}"
        case "campaign_ended":
            share = "" if f["accuracy"] is None else f", {_format_score(f)}"
            return f"campaign {f['number']}: {f['rounds']} rounds{share}"
        case "introduction":
            why = f": {'; '.join(f['reasons'])}" if f["reasons"] else ""
            runs = f"{f['running']} of {format_devices(f['devices'])}"
            return f"new bundles {f['state']}, stage {f['stage']} of {f['stages']}, on {runs}{why}"
        case _:
            return f"its new bundle: {f['phase'].replace('_', ' ')}" + (f" ({f['reason']})" if f["reason"] else "")


def _format_score(f: Mapping[str, Any]) -> str:
    """Format the score in an event's fields."""
    figure = find_figure(f)
    return f"{figure.words} {figure.format(f['accuracy'])}"


def format_devices(n: int) -> str:
    """Format a number of devices in words."""
    return "1 device" if n == 1 else f"{n} devices"


def describe_drift(kind: str | None) -> str:
    """Describe in which way a device drifts; an older runtime tells no kind."""
    what = {
        "shares": "its classes come in other shares than those that its bundle learned",
        "labels": "its labelled samples contradict its bundle",
    }
    return what.get(kind or "", "its inputs are unlike those that its bundle learned")


def describe_event(event: Event) -> str:
    """Describe an event in words."""
    f = event.fields
    took = f" after {f['seconds']:.1f} s" if f.get("seconds") and event.name == "answer" else ""
    match event.name:
        case "waiting":
            text = f"until {f['devices']} devices are there"
        case "round_begun":
            text = format_devices(f["devices"])
        case "asked":
            text = f"{f['label']}: {format_devices(f['devices'])}"
        case "answer":
            text = f"{f['label']}: {f['result']}{took}"
        case "chosen":
            late = f", {len(f['overdue'])} of them since they had waited long" if f["overdue"] else ""
            text = f"{len(f['ids'])} of {len(f['seconds'])} devices chosen{late}"
        case "closed":
            text = f"{f['label']}: {f['reason']}"
        case "health":
            drift = f", {describe_drift(f.get('kind'))}" if f["drift"] else ""
            text = ("fedge serve is down" if f["serving"] == "down" else f"bundle {f['phase']}{drift}") + (
                f": {f['reason']}" if f["reason"] else ""
            )
        case "campaign_begun" | "campaign_ended" | "introduction" | "introduced":
            text = _describe_campaign_event(event.name, f)
        case "resting":
            text = "the coordinator watches the devices"
        case "round_done":
            text = "" if f["accuracy"] is None else _format_score(f)
        case _:
            text = ", ".join(str(value) for value in f.values() if value != "")
    return text
