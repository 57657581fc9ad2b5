"""The course of one rollout or introduction: plan, progress, devices and events, written before they are published."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from coordinator.rollout.decision import (
    DeviceHealth,
    Plan,
    Progress,
    abort,
    decide,
    has_kept,
    is_running,
    list_members,
)
from coordinator.rollout.folder import DeviceLine, Folder, Record, Request, RolloutEvent
from coordinator.store.registry import MAX_DEVICES
from fedge.errors import ConfigError, ProtocolError
from fedge.membership.signed_messages import Plain, Signed
from fedge.wire.messages import Health, RolloutState

log = logging.getLogger("fedge.rollout")

WRITE_S: Final = 5.0
"""Shortest time between two writes of device reports, unless the rollout itself advances."""
MAX_NEWS: Final = 200
"""Most events of a rollout that are kept."""
MAX_EARLIER: Final = 20
"""Most earlier rollouts whose outcome is kept."""

Observer = Callable[[str, dict[str, Any]], None]


class Course:
    """The course of a rollout. Its owner holds the folder's lock.

    `fleet`: the devices that count, with their last messages. `version`: the version of the last announcement.
    `members`: as in `Record`.

    Args:
        folder: the durable state.
        plan: how to roll out; a rollout already begun with the same plan is continued.
        signed: our identity, whose counts of devices' messages are written, too.
        observe: called with events.

    Raises:
        ConfigError: another rollout is in progress.
    """

    def __init__(self, folder: Folder, plan: Plan, signed: Plain | Signed, observe: Observer) -> None:
        self._folder, self._signed = folder, signed
        record = folder.read()
        self.version = 0 if record is None else record.version
        self.plan, self.progress = start_rollout(folder, plan, time.time())
        news, self._earlier = ((), ()) if record is None else (record.events, record.earlier)
        if record is not None and record.plan.id != self.plan.id:
            news, self._earlier = (), (*record.earlier, record.to_earlier())[-MAX_EARLIER:]
        self._happened = deque(news, MAX_NEWS)
        self.members = frozenset[str]()
        self.fleet: dict[str, DeviceHealth] = {}
        self._observe = observe
        self._started = time.time()
        self._written_at = 0.0
        self._unwritten = False

    def advance(self) -> None:
        """Process a request and decide; what changes is written."""
        now = time.time()
        request = self._folder.take_request()
        progress = decide(self.plan, apply_request(self.progress, request, now), self.fleet, now)
        if progress != self.progress or (self._unwritten and time.monotonic() - self._written_at > WRITE_S):
            self.save(progress)
        if request is not None:
            self._folder.finish_request()

    def raise_version(self) -> int:
        """Return the version of the next announcement, once it is written."""
        self.version = max(self.version + 1, int(1000 * time.time()))  # rises even if an earlier folder is lost
        self.save(self.progress)
        return self.version

    def record_health(self, device: str, health: Health, *, retained: bool) -> bool:
        """Record a device's message; return whether it holds news.

        Raises:
            ProtocolError: the message speaks for another device, or there are too many devices.
        """
        if health.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {health.device_id}")
        if device not in self.fleet and len(self.fleet) >= MAX_DEVICES:
            raise ProtocolError("too-many-devices", f"{device} is one more than {MAX_DEVICES}")
        if not health.serving and device in self.fleet:  # it stands where it stood, and says so when it runs again
            return False
        before, self._unwritten = self.fleet.get(device), True
        self.fleet[device] = DeviceHealth(health=health, at=self._started if retained else time.time())
        if before is not None and _select_shown(before.health) == _select_shown(health):
            return False
        fields = {"device": device, "phase": str(health.phase), "release": health.release, "reason": health.reason}
        self._record_event("device", fields)
        self._observe("device", fields)
        return True

    def save(self, progress: Progress) -> None:
        """Write the state, and tell of a stage or an end.

        Raises:
            StoreError: the disk is full or broken.
        """
        before, self.progress = self.progress, progress
        self._written_at, self._unwritten = time.monotonic(), False
        goes_on = (before.state, before.stage) != (progress.state, progress.stage)
        if goes_on or not self._happened:
            self._record_event("rollout", self.summarise())
        taking_part = set(list_members(self.plan, progress, self.fleet))
        lines = {device: _make_line(seen, takes_part=device in taking_part) for device, seen in self.fleet.items()}
        self._folder.write(
            Record(
                plan=self.plan,
                progress=progress,
                version=self.version,
                members=tuple(sorted(self.members)),
                devices=lines,
                events=tuple(self._happened),
                earlier=self._earlier,
            )
        )
        if isinstance(self._signed, Signed):
            self._folder.write_heard(self._signed.heard)
        if goes_on:
            log.info("event=rollout id=%s state=%s stage=%d", self.plan.id, progress.state, progress.stage)
            self._observe("rollout", self.summarise())

    def _record_event(self, event: str, fields: dict[str, Any]) -> None:
        self._happened.append(
            RolloutEvent(at=time.time(), device=fields.get("device", ""), text=describe_event(event, fields))
        )

    def summarise(self) -> dict[str, Any]:
        """Return the state in figures, as JSON values."""
        plan, progress = self.plan, self.progress
        healths = {device: seen.health for device, seen in sorted(self.fleet.items())}
        return {
            "id": plan.id,
            "state": str(progress.state),
            "stage": progress.stage + 1,
            "stages": len(plan.stages),
            "share": progress.share,
            "devices": len(healths),
            "running": sum(is_running(plan, health) for health in healths.values()),
            "kept": sum(has_kept(plan, health) for health in healths.values()),
            "reasons": list(progress.reasons),
        }


def _select_shown(health: Health) -> tuple[object, ...]:
    """Return the part whose changes are shown to people."""
    return health.phase, health.release, health.reason


def start_rollout(folder: Folder, plan: Plan, now: float) -> tuple[Plan, Progress]:
    """Return the rollout begun with these settings, or a new one; a pending request is kept only for the former.

    Raises:
        ConfigError: another rollout is in progress.
    """
    record = folder.read()
    if record is not None:
        if replace(record.plan, id=plan.id) == plan:
            return record.plan, record.progress
        if record.progress.state in {RolloutState.RUNNING, RolloutState.PAUSED}:
            raise ConfigError(
                f"a rollout of {record.plan.target} is {record.progress.state}, with other settings or another target:"
                " start it as it was, or abort it first"
            )
    while folder.take_request() is not None:
        folder.finish_request()
    return plan, Progress(began=now)


def apply_request(progress: Progress, request: Request | None, now: float) -> Progress:
    """Return the rollout after a user's request; a request that does not fit the rollout's state changes nothing."""
    match request, progress.state:
        case Request.PAUSE, RolloutState.RUNNING:
            return replace(progress, state=RolloutState.PAUSED)
        case Request.RESUME, RolloutState.PAUSED:
            return replace(progress, state=RolloutState.RUNNING, began=now, good_since=None)
        case Request.ABORT, RolloutState.RUNNING | RolloutState.PAUSED | RolloutState.DONE:
            return abort(progress, ["asked for"], now)
        case _:
            return progress


def explain_misfit(request: Request, record: Record) -> str:
    """Explain why a request to a rollout would change nothing; empty if it fits."""
    plan, progress = record.plan, record.progress
    if progress.state is RolloutState.ABORTED:
        why = f" ({'; '.join(progress.reasons)})" if progress.reasons else ""
        return f"{plan.id} cannot be asked to {request}: it was aborted{why}"
    if progress.state is RolloutState.DONE and request is not Request.ABORT:
        return f"{plan.id} cannot be asked to {request}: it is done"
    return ""


def _make_line(seen: DeviceHealth, *, takes_part: bool) -> DeviceLine:
    fields = {
        name: getattr(seen.health, name)
        for name in DeviceLine.__struct_fields__
        if name not in {"takes_part", "seen_at"}
    }
    return DeviceLine(**fields, takes_part=takes_part, seen_at=seen.at)


def describe_event(event: str, fields: dict[str, Any]) -> str:
    """Describe an event in words."""
    if event == "device":
        why = f" ({fields['reason']})" if fields["reason"] else ""
        return f"{fields['phase']}, release {fields['release']}{why}"
    return (
        f"{fields['state']}: stage {fields['stage']} of {fields['stages']}, "
        f"{fields['running']} of {fields['devices']} devices run it"
    )
