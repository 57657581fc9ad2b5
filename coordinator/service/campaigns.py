"""When a campaign begins, and why: decisions without IO and clock, and the record of the campaigns so far.

A campaign is a number of rounds of training and a last one that leaves bundles; it goes on from what the last campaign
has learned. One begins when a person asks for it, or when what devices report calls for it: samples that came since
the last campaign, bundles that no longer fit, answers that turned out wrong. A schedule begins one only if any of these
calls for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from coordinator.store.records import DeviceFacts
from coordinator.watch.words import format_devices, format_duration
from fedge.data.problems.problem import Problem
from fedge.errors import ConfigError

PAST: Final = 100
"""Most campaigns that are remembered."""
PAUSE_S: Final = 3600.0
"""Longest time after a campaign in which nothing but a person or the schedule begins the next. It is as long as the
campaign took, so that devices do not train without a break."""
ENOUGH_ANSWERS: Final = 20
"""Fewest answers labelled later, over all devices, from which a fall of the score at work is concluded."""
NAMED: Final = 3
"""Most devices that a reason names."""
UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Conditions(Struct, frozen=True, kw_only=True):
    """What begins a campaign without a person; None: it does not.

    every_s: time since the last one began. new_samples: samples that came since then. drift: share of the present
    devices whose bundle drifts. fall: of the score at work.
    """

    every_s: float | None = None
    new_samples: int | None = None
    drift: float | None = None
    fall: float | None = None


class Campaign(Struct, frozen=True, kw_only=True):
    """A campaign. first: the round after which its rounds are counted. planned: its rounds, as planned.

    changed: devices whose samples changed since the last campaign. added: classes that joined with it. The figures
    after `ended_at` are those at its end: rounds of training, validation accuracy, experts, and what became of experts
    (in sentences).
    """

    number: Annotated[int, Meta(ge=1)] = 1
    began_at: float
    why: str = ""
    first: int = 0
    planned: int = 0
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    ended_at: float | None = None
    rounds: int = 0
    accuracy: float | None = None
    experts: int | None = None
    lineage: tuple[str, ...] = ()


class Seen(Struct, frozen=True, kw_only=True):
    """What a device said when it first took part in `campaign`, the last one in which it did."""

    campaign: int
    data_version: int
    n_arrived: int
    drift: bool


class Campaigns(Struct, frozen=True, kw_only=True):
    """The campaigns so far: durable, so that a killed coordinator decides as one that was not.

    best_at_work: highest score at work since the last campaign ended. skipped_at: when the schedule last found
    nothing that calls for a campaign.
    """

    now: Campaign
    past: tuple[Campaign, ...] = ()
    seen: dict[str, Seen] = {}
    best_at_work: float | None = None
    skipped_at: float | None = None


class Decision(Struct, frozen=True):
    """Whether a campaign begins now, or the schedule skips one, and why."""

    begins: bool
    why: str


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as 90, 15m, 6h or 1d.

    Raises:
        ConfigError: it is no duration above 0.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    try:
        seconds = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"every: {text!r} is no time; write 90s, 15m, 6h or 1d")
    return seconds


def parse_conditions(every: str | None, when: Collection[str]) -> Conditions:
    """Return the conditions that settings name, such as "1d" and "new-samples=500".

    Raises:
        ConfigError: a condition is unknown, or its value makes no sense.
    """
    found = Conditions(every_s=None if every is None else parse_duration(every))
    for text in when:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        match name.strip():
            case "new-samples" if number >= 1 and number == int(number):
                found = replace(found, new_samples=int(number))
            case "drift" if 0 < number <= 1:
                found = replace(found, drift=number)
            case "score-at-work" if -1 <= number < 0:
                found = replace(found, fall=-number)
            case _:
                raise ConfigError(
                    f"when: {text!r} is no condition; there are new-samples=500 (a whole number), drift=0.1 (a share "
                    "of the devices) and score-at-work=-0.05 (a fall)"
                )
    return found


def require_counted(conditions: Conditions, problem: Problem) -> None:
    """Raise ConfigError if a fall of the score at work begins campaigns, and this problem's answers are not counted."""
    if conditions.fall is not None and not problem.COUNTED:
        raise ConfigError(
            f"when: score-at-work counts answers that are right or wrong, and those of {problem.NAME} are neither; let "
            "drift=0.1 or new-samples=500 begin a campaign"
        )


# -------------------------------------------------------------------------------------------------------- decisions


def decide(conditions: Conditions, campaigns: Campaigns, facts: Collection[DeviceFacts], now: float) -> Decision | None:
    """Decide whether a campaign begins now, or whether the schedule skips one; None if neither.

    Args:
        conditions: what begins a campaign.
        campaigns: the campaigns so far, the last one ended.
        facts: what the devices report; the absent ones do not count.
        now: seconds since the epoch.
    """
    present = [device for device in facts if device.online]
    if not present:
        return None
    if (why := _find_reason(conditions, campaigns, present)) and now >= _get_rested_at(campaigns.now):
        return Decision(True, why)
    if conditions.every_s is None or now < (compute_next_at(conditions, campaigns) or now):
        return None
    every = f"{format_duration(conditions.every_s)} after the last one"
    calls = list_calls(campaigns, present)
    if calls:
        return Decision(True, f"{every}: {', '.join(calls)}")
    return Decision(False, f"{every}, nothing calls for a campaign: no samples came, no bundle drifts")


def compute_next_at(conditions: Conditions, campaigns: Campaigns) -> float | None:
    """Return when the schedule looks next, in seconds since the epoch; None without a schedule."""
    if conditions.every_s is None:
        return None
    return max(campaigns.now.began_at, campaigns.skipped_at or 0.0) + conditions.every_s


def list_calls(campaigns: Campaigns, present: Iterable[DeviceFacts]) -> list[str]:
    """List what calls for a campaign at all, in words."""
    devices = list(present)
    samples, of = count_new_samples(campaigns.seen, devices)
    changed = [d.id for d in devices if d.id in campaigns.seen and _has_changed(campaigns.seen[d.id], d)]
    new = [d.id for d in devices if d.id not in campaigns.seen]
    drifting = list_drifting(campaigns.seen, devices)
    calls = [f"{_format_samples(samples)} on {format_devices(of)}"] if samples else []
    calls += [f"the samples of {format_devices(len(changed))} have changed"] if changed and not samples else []
    calls += [f"{format_devices(len(new))} took part in none yet"] if new else []
    return calls + ([f"{format_devices(len(drifting))} with drift"] if drifting else [])


def _find_reason(conditions: Conditions, campaigns: Campaigns, present: Collection[DeviceFacts]) -> str:
    """Return why a campaign begins without a schedule; empty if no condition holds."""
    samples, of = count_new_samples(campaigns.seen, present)
    if conditions.new_samples is not None and samples >= conditions.new_samples:
        return f"{_format_samples(samples)} on {format_devices(of)}"
    drifting = list_drifting(campaigns.seen, present)
    if conditions.drift is not None and drifting and len(drifting) >= conditions.drift * len(present):
        names = ", ".join(drifting[:NAMED]) + (", ..." if len(drifting) > NAMED else "")
        return f"{len(drifting)} of {format_devices(len(present))} with drift: {names}"
    best, at_work = campaigns.best_at_work, compute_at_work(present)
    if conditions.fall is not None and at_work is not None and best is not None and best - at_work >= conditions.fall:
        return f"score at work fell from {best:.3f} to {at_work:.3f}"
    return ""


def _format_samples(n: int) -> str:
    return "1 new sample" if n == 1 else f"{n} new samples"


def _get_rested_at(campaign: Campaign) -> float:
    """Return when the pause after a campaign is over."""
    ended_at = campaign.began_at if campaign.ended_at is None else campaign.ended_at
    return ended_at + min(ended_at - campaign.began_at, PAUSE_S)


def _has_changed(seen: Seen, device: DeviceFacts) -> bool:
    return device.data_version > seen.data_version


def count_new_samples(seen: Mapping[str, Seen], devices: Iterable[DeviceFacts]) -> tuple[int, int]:
    """Count the samples that came since each device took part, and the devices that have such samples."""
    came = [d.n_arrived - (seen[d.id].n_arrived if d.id in seen else 0) for d in devices]
    return sum(n for n in came if n > 0), sum(n > 0 for n in came)


def list_drifting(seen: Mapping[str, Seen], devices: Iterable[DeviceFacts]) -> list[str]:
    """List the devices with drift that a campaign could do something about.

    A device that drifted before the last campaign and has no other samples since calls for nothing: its alarm goes out
    when inputs come that fit the new bundle. Nor does one whose present bundle has not been judged yet.
    """
    return [
        d.id
        for d in devices
        if d.drift and not d.held and (d.id not in seen or not seen[d.id].drift or _has_changed(seen[d.id], d))
    ]


def compute_at_work(devices: Iterable[DeviceFacts]) -> float | None:
    """Compute the mean score at work of the devices that report one; None if too few answers were labelled."""
    known = [(d.at_work, d.n_answers) for d in devices if d.at_work is not None]
    if sum(n for _, n in known) < ENOUGH_ANSWERS:
        return None
    return sum(share for share, _ in known) / len(known)


# ---------------------------------------------------------------------------------------------------- the record


def record_participants(campaigns: Campaigns, facts: Iterable[DeviceFacts]) -> Campaigns:
    """Return the record after these devices took part in a round of the present campaign."""
    number = campaigns.now.number
    new = {
        d.id: Seen(campaign=number, data_version=d.data_version, n_arrived=d.n_arrived, drift=d.drift)
        for d in facts
        if d.id not in campaigns.seen or campaigns.seen[d.id].campaign < number
    }
    return replace(campaigns, seen=dict(sorted((campaigns.seen | new).items()))) if new else campaigns


def record_rest(campaigns: Campaigns, facts: Collection[DeviceFacts]) -> Campaigns:
    """Return the record after a look at the devices at rest: alarms that went out, and a better score at work."""
    clear = {d.id for d in facts if d.online and not d.drift and d.id in campaigns.seen and campaigns.seen[d.id].drift}
    if clear:
        seen = {i: replace(seen, drift=seen.drift and i not in clear) for i, seen in campaigns.seen.items()}
        campaigns = replace(campaigns, seen=seen)
    return record_best(campaigns, facts)


def record_best(campaigns: Campaigns, facts: Iterable[DeviceFacts]) -> Campaigns:
    """Return the record with the score at work of now if it is the best since the last campaign."""
    at_work = compute_at_work(d for d in facts if d.online)
    if at_work is not None and (campaigns.best_at_work is None or at_work > campaigns.best_at_work):
        campaigns = replace(campaigns, best_at_work=at_work)
    return campaigns


def end_campaign(campaigns: Campaigns, summary: Mapping[str, Any], now: float) -> Campaigns:
    """Return the record after the present campaign's last round. `summary`: the method's."""
    accuracy = next((r["accuracy"] for r in reversed(summary["history"]) if r["accuracy"] is not None), None)
    ended = replace(
        campaigns.now,
        ended_at=now,
        rounds=summary["rounds"] - summary["first"],
        accuracy=accuracy,
        experts=len(summary["clusters"]) if summary["split"] else summary["experts"],
        lineage=tuple(summary.get("lineage", ())),
    )
    return replace(campaigns, now=ended, best_at_work=None)


def begin_next(
    campaigns: Campaigns,
    why: str,
    facts: Iterable[DeviceFacts],
    *,
    first: int,
    planned: int,
    now: float,
    added: tuple[str, ...] = (),
) -> Campaigns:
    """Return the record with the next campaign. Arguments as in `Campaign`; `facts`: of all known devices."""
    changed = sorted(d.id for d in facts if d.id in campaigns.seen and _has_changed(campaigns.seen[d.id], d))
    next_ = Campaign(
        number=campaigns.now.number + 1,
        began_at=now,
        why=why,
        first=first,
        planned=planned,
        changed=tuple(changed),
        added=added,
    )
    past = (*campaigns.past, replace(campaigns.now, changed=()))[-PAST:]
    return replace(campaigns, now=next_, past=past, best_at_work=None, skipped_at=None)


def describe_campaigns(campaigns: Campaigns, conditions: Conditions, *, paused: bool) -> dict[str, Any]:
    """Describe the campaigns for HOME/summary.json."""
    now, running = campaigns.now, campaigns.now.ended_at is None
    ended = [each for each in (*campaigns.past, now) if each.ended_at is not None]
    shown = ("number", "began_at", "ended_at", "why", "rounds", "accuracy", "experts", "lineage")
    return {
        "number": now.number,
        "state": "paused" if paused else "running" if running else "resting",
        "began_at": now.began_at,
        "ended_at": now.ended_at,
        "why": now.why,
        "next_at": None if running else compute_next_at(conditions, campaigns),
        "history": [{name: msgspec.to_builtins(getattr(each, name)) for name in shown} for each in ended],
    }
