"""What a person should look at: each item says what is wrong, since when, and what to do.

The items follow from the summary alone. Page, `fedge status`, metrics, Home Assistant, webhooks and commands show the
same ones. An item that rests on a source that is silent is left out, since nobody knows whether it still holds; the
silence of the source is an item itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from coordinator.watch.words import describe_drift, format_duration
from fedge.system.text import format_time

NAMED: Final = 3
"""Most devices of which the same is said in a text; further ones are only counted."""
FAILURES: Final = 3
"""Orders in a row that a device has failed before somebody should look."""
REFUSED_S: Final = 24 * 3600.0
"""Time after which a refusal that was not repeated is forgotten."""
HABIT_S: Final = 600.0
"""Longest absence of a device whose habit is unknown."""
DISK_GB: Final = 0.5
"""Free space on a device below which its disk counts as near full: what the models of an order may need."""
SERVER_DISK_GB: Final = 1.0
"""As `DISK_GB`, for the coordinator's own disk."""


class Severity(StrEnum):
    """How much an item matters."""

    ERROR = "error"  # something does not work
    WARNING = "warning"  # it will not work for long, or works worse than before


class Kind(StrEnum):
    """What is wrong, the most important first."""

    COORDINATOR_SILENT = "coordinator-silent"
    BROKER_UNREACHABLE = "broker-unreachable"
    RUN_FAILED = "run-failed"
    SECOND_COORDINATOR = "second-coordinator"
    TWO_PROCESSES = "two-processes"
    SERVE_DOWN = "serve-down"
    ROLLOUT_ABORTED = "rollout-aborted"
    INTRODUCTION_ABORTED = "introduction-aborted"
    REFUSED = "refused"
    FAILED_REPEATEDLY = "failed-repeatedly"
    BUNDLE_REFUSED = "bundle-refused"
    WAITING = "waiting"
    QUARANTINED = "quarantined"
    EXPIRING = "expiring"
    DISK_NEAR_FULL = "disk-near-full"
    OFFLINE = "offline"
    DRIFTING = "drifting"
    WRONG_CLOCK = "wrong-clock"


class Attention(Struct, frozen=True, kw_only=True):
    """One item. device: the device's id; empty if it concerns the server. since: seconds since the epoch, if known.

    `text` and `do` are sentences without ages, which change only if the item does.
    """

    kind: Kind
    device: str = ""
    since: float | None = None
    severity: Severity
    text: str
    do: str


RANK: Final = {kind: number for number, kind in enumerate(Kind)}


def list_attention(summary: Mapping[str, Any], now: float) -> list[Attention]:
    """List what needs attention, errors first, then by kind and device.

    Args:
        summary: as `coordinator.watch.state.read_summary` makes it.
        now: seconds since the epoch.
    """
    found = [item for check in CHECKS for item in check(summary, now)]
    return sorted(found, key=lambda item: (item.severity is not Severity.ERROR, RANK[item.kind], item.device))


def describe_attention(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe items (as JSON values) in lines: what, since when, and what to do. Many of one kind become one."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for item in items:
        kinds.setdefault(item["kind"], []).append(item)
    lines = []
    for found in kinds.values():
        for item in found[: NAMED if len(found) > NAMED + 1 else None]:
            since = "" if item["since"] is None else f" (since {format_duration(max(time.time() - item['since'], 0))})"
            about = f"{item['device']}: " if item["device"] else ""
            lines += [f"{item['severity']:<9} {about}{item['text']}{since}", f"{'':<9} {item['do']}"]
        if len(found) > NAMED + 1:
            lines.append(f"{found[0]['severity']:<9} {len(found) - NAMED} more devices: {found[0]['kind']}")
    return lines


def is_heard(summary: Mapping[str, Any]) -> bool:
    """Return whether somebody listens to the devices: the coordinator runs and reaches the broker."""
    return summary["coordinator"]["state"] == "running" and not _find_broker_loss(summary)


def _find_broker_loss(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    broker: Mapping[str, Any] = summary.get("broker") or {}
    return broker if not broker.get("connected", True) else None


def _check_server(summary: Mapping[str, Any], now: float) -> Iterator[Attention]:
    state = summary["coordinator"]
    if state["state"] == "silent":
        yield Attention(
            kind=Kind.COORDINATOR_SILENT,
            since=now - state["age_s"],
            severity=Severity.ERROR,
            text="the coordinator gives no sign of life, so nobody knows how its devices are",
            do="start it again with the same --home: it continues where it was",
        )
    elif lost := _find_broker_loss(summary):
        yield Attention(
            kind=Kind.BROKER_UNREACHABLE,
            since=lost.get("since"),
            severity=Severity.ERROR,
            text=f"the coordinator does not reach the broker {lost.get('address', '')}".rstrip()
            + ", so nobody knows how its devices are",
            do="start the broker, or mend the network between them: all connect again by themselves",
        )
    if failed := summary.get("failed"):
        yield Attention(
            kind=Kind.RUN_FAILED,
            since=summary["at"],
            severity=Severity.ERROR,
            text=f"the run failed: {failed}",
            do="put that right, then start the coordinator with more --rounds",
        )
    if second := summary.get("second"):
        yield Attention(
            kind=Kind.SECOND_COORDINATOR,
            since=second["at"],
            severity=Severity.ERROR,
            text=f"a second coordinator of this federation came from {second['where']}, and was told to end",
            do="see who starts it there, perhaps a copy or a restored backup of this home, and stop that",
        )
    free_gb = summary.get("free_disk_gb")
    if free_gb is not None and free_gb < SERVER_DISK_GB:
        yield _make_disk_item("", free_gb, "the coordinator's disk", "make room on the coordinator's machine")


def _check_expiring(summary: Mapping[str, Any], now: float) -> Iterator[Attention]:
    retired = summary.get("retired", ())
    for item in (*summary.get("expiring", ()), *summary.get("signatures", ())):
        if isinstance(item, Mapping) and item["device"] not in retired:  # an earlier version wrote texts
            until = item["until"]
            over = until is None or now >= until
            date = "" if until is None else f" {'expired' if over else 'expires'} on {format_time(until)}"
            yield Attention(
                kind=Kind.EXPIRING,
                device=item["device"],
                since=item["since"],
                severity=Severity.ERROR if over else Severity.WARNING,
                text=f"{item['what']}{date}",
                do=item["do"],
            )


def _check_releases(summary: Mapping[str, Any], _now: float) -> Iterator[Attention]:
    for name, kind in (("rollout", Kind.ROLLOUT_ABORTED), ("introduction", Kind.INTRODUCTION_ABORTED)):
        found = summary.get(name) or {}
        if found.get("state") != "aborted":
            continue
        if kind is Kind.ROLLOUT_ABORTED:
            what, do = f"the rollout of release {found['release']}", "mend the release, and roll out a newer one"
        else:
            what = f"the introduction of campaign {found['campaign']}"
            do = "see the reasons; the devices keep their earlier bundles, and the next campaign makes new ones"
        reasons = "; ".join(found.get("reasons") or ())
        text = f"{what} was aborted" + (f": {reasons}" if reasons else "")
        yield Attention(kind=kind, since=found.get("since"), severity=Severity.ERROR, text=text, do=do)


def _check_presence(summary: Mapping[str, Any], now: float) -> Iterator[Attention]:
    """Look at what is only known while somebody listens to the devices."""
    if not is_heard(summary):
        return
    for i, device in _iterate_devices(summary):
        since = device.get("since") or {}
        presence, gone = device["presence"], since.get("presence")
        if presence == "online":
            yield from _check_waiting(i, device, summary)
            if device.get("serving") == "down":
                yield Attention(
                    kind=Kind.SERVE_DOWN,
                    device=i,
                    since=since.get("serving"),
                    severity=Severity.ERROR,
                    text="its fedge serve is down while its agent lives: it answers nobody",
                    do=f"on {i} look at the log of fedge serve (journalctl -u fedge-serve), and start it again",
                )
            continue
        habit_s = device.get("habit_s") or HABIT_S
        if gone is not None and now - gone > habit_s:
            usual = format_duration(habit_s)
            yield Attention(
                kind=Kind.OFFLINE,
                device=i,
                since=gone,
                severity=Severity.WARNING,
                text=f"it is {presence}, for longer than is usual for it ({usual})",
                do=f"see whether {i} has power and network, and whether its agent runs (systemctl status fedge-agent)",
            )


def _check_waiting(i: str, device: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[Attention]:
    """Look at a bundle that waits on a connected device, although the introduction has admitted it."""
    introduction = summary.get("introduction") or {}
    since = introduction.get("silent", {}).get(i)
    new, running = summary.get("installed", {}).get(i, {}), device.get("health") or {}
    is_newer = new.get("release", 0) > running.get("release", 0)
    if since is not None and device.get("serving") == "serving" and is_newer:
        yield Attention(
            kind=Kind.WAITING,
            device=i,
            since=since,
            severity=Severity.WARNING,
            text=f"its new bundle waits, although the introduction of campaign {introduction['campaign']} admits it",
            do="if the broker has an access list of an earlier version, it hides the introduction from devices: run "
            f"`fedge provision broker` again where the broker is; else see the log of fedge serve on {i}",
        )


def _check_devices(summary: Mapping[str, Any], _now: float) -> Iterator[Attention]:
    for i, device in _iterate_devices(summary):
        since, health = device.get("since") or {}, device.get("health") or {}
        if twins := device.get("twins"):
            yield Attention(
                kind=Kind.TWO_PROCESSES,
                device=i,
                since=max(twins.values()),
                severity=Severity.ERROR,
                text=f"two processes speak as {i} and take turns: "
                + ", ".join(f"incarnation {name} since {format_time(at)}" for name, at in sorted(twins.items())),
                do="end one of them: a copied card or container, or a second agent of this --id; if it is a stolen "
                f"identity, run `fedge provision revoke {i}`",
            )
        if health.get("drift") or device.get("drift"):  # behind a relay there is no health
            yield Attention(
                kind=Kind.DRIFTING,
                device=i,
                since=since.get("drift"),
                severity=Severity.WARNING,
                text=describe_drift(device.get("drift_kind")),
                do="look at what the device sees; give it labelled samples of it, for the next campaign",
            )
        if (phase := health.get("phase")) in BUNDLE_PHASES:
            reason = f": {health['reason']}" if health.get("reason") else ""
            yield Attention(
                kind=Kind.BUNDLE_REFUSED,
                device=i,
                since=since.get("phase"),
                severity=Severity.WARNING,
                text=f"{BUNDLE_PHASES[phase]}{reason}",
                do="it goes on answering with the bundle before; mend what the reason names",
            )
        free_gb = (device.get("context") or {}).get("free_disk_gb")
        if free_gb is not None and free_gb < DISK_GB:
            yield _make_disk_item(i, free_gb, "its disk", f"make room on {i}, or lower the limits of its sample store")


BUNDLE_PHASES: Final = {
    "refused": "it refused a bundle",
    "rolled_back": "it went back to its bundle before",
    "failed": "it could not fetch or store a bundle",
}


def _make_disk_item(device: str, free_gb: float, what: str, do: str) -> Attention:
    text = f"{what} is nearly full: less than {1000 * (DISK_GB if device else SERVER_DISK_GB):.0f} MB are free"
    severity = Severity.ERROR if free_gb < 0.1 else Severity.WARNING
    return Attention(kind=Kind.DISK_NEAR_FULL, device=device, severity=severity, text=text, do=do)


def _check_orders(summary: Mapping[str, Any], now: float) -> Iterator[Attention]:
    retired = summary.get("retired", ())
    for i, refusal in summary.get("refusals", {}).items():
        if i not in retired and now - refusal["last"] < REFUSED_S:
            yield Attention(
                kind=Kind.REFUSED,
                device=i,
                since=refusal["since"],
                severity=Severity.ERROR,
                text=f"what it sends is refused: {refusal['reason']}",
                do=REFUSALS.get(
                    refusal["name"], "see the coordinator's log (event=refused), and who speaks as this device"
                ),
            )
    for i, streak in summary.get("failing", {}).items():
        if i not in retired and streak["count"] >= FAILURES:
            yield Attention(
                kind=Kind.FAILED_REPEATEDLY,
                device=i,
                since=streak["since"],
                severity=Severity.ERROR,
                text=f"its orders fail one after the other; the last: {streak['reason']}",
                do=f"run `fedge why {i}`; the log of its agent says more",
            )
    for i, out in summary.get("quarantined", {}).items():
        if i not in retired:
            names = ", ".join(sorted({each["name"] for each in out["evidence"]}))
            yield Attention(
                kind=Kind.QUARANTINED,
                device=i,
                severity=Severity.WARNING,
                text=f"it is in quarantine until round {out['until']}: {names}",
                do=f"see what it sends; --readmit {i} ends the quarantine",
            )
    for i, ahead_s in summary.get("clocks", {}).items():
        if i not in retired:
            yield Attention(
                kind=Kind.WRONG_CLOCK,
                device=i,
                severity=Severity.WARNING,
                text=f"its clock is {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's",
                do="set the wrong one of the two",
            )


REFUSALS: Final = {
    "task-mismatch": "give its agent the task.json of the coordinator's home; another task is another federation",
    "version": "update fedge on the older side",
    "revoked": "its certificate was revoked: end its agent, or enrol the device anew with `fedge provision device`",
    "certificate": "enrol the device anew with `fedge provision device`, and check the clocks of both machines",
    "no-relays": "connect its devices to this broker directly, or choose another --method",
    "too-many-devices": "revoke names that are not yours",
}
"""What to do about a refusal, by its name."""

CHECKS: Final[tuple[Callable[[Mapping[str, Any], float], Iterator[Attention]], ...]] = (
    _check_server,
    _check_expiring,
    _check_releases,
    _check_presence,
    _check_devices,
    _check_orders,
)


def _iterate_devices(summary: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    retired = summary.get("retired", ())
    return ((i, device) for i, device in summary.get("fleet", {}).items() if i not in retired)
