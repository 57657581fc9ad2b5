"""The devices of a federation, by their last status, context and health."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from coordinator.store.changes import PRESENCE, Changes, compute_habit_s, record_change
from coordinator.store.records import Device, DeviceFacts
from fedge.errors import ProtocolError
from fedge.settings import NAME
from fedge.wire.messages import Context, DriftKind, Health, Presence, Status

MAX_DEVICES: Final = 10_000
"""Most known ids, so that a client that invents names cannot fill the memory. Devices of the last round always have a
place."""
LOOK_AGAIN_S: Final = 0.05
"""Shortest pause between two looks at all devices while waiting for some, since thousands may come in a second."""
SHOWN: Final = ("phase", "release", "reason", "now", "n_predictions", "n_failed", "drift", "outliers")
"""Fields of a Health that are shown to people."""
GROWS_S: Final = 300.0
"""Time that a device has to take up a class that has joined, before it is told of as one with another task."""
CLOCKS_AGREE_S: Final = 60.0
"""Largest difference of clocks that is not shown. Rounds do not depend on clocks, but certificates, logs and signatures
do."""


class LastMessages(Struct, frozen=True, kw_only=True):
    """A device's last messages, and when they came (seconds since the epoch by our clock; 0 if never)."""

    seen_at: float
    context: Context | None = None
    health: Health | None = None
    changes: Changes = Changes()


UNHEARD: Final = LastMessages(seen_at=0.0)


@dataclass(slots=True)
class _KnownDevice:
    status: Status
    context: Context | None = None
    ahead_s: float = 0.0  # relative to our clock
    began_at: float = 0.0  # when this incarnation was heard first, by our clock
    before: str = ""  # the previous incarnation
    before_at: float = 0.0  # when the previous incarnation was heard first
    twice: bool = False  # two agents use this device's name
    seen_at: float = 0.0  # by our clock


class Registry:
    """The registry of all devices seen so far, in memory, since the broker retains and repeats each status.

    Args:
        task_fingerprint: the fingerprint of the federation's task; devices with another fingerprint do not take part.
        contexts: contexts of the last round's devices. After a restart they count until the devices send new ones.
        no_relays: why relays are not possible; empty if they are.
        kept: last messages from an earlier registry. After a restart they count until the devices send new ones.
        earlier: fingerprints of the task before further classes joined; devices that still have it take these up.
    """

    def __init__(
        self,
        task_fingerprint: str,
        contexts: Mapping[str, Context | None] | None = None,
        no_relays: str = "",
        kept: Mapping[str, LastMessages] | None = None,
        earlier: Collection[str] = (),
    ) -> None:
        self._fingerprint, self._earlier = task_fingerprint, frozenset(earlier)
        self._no_relays = no_relays
        self._contexts = dict(contexts or {})
        self._kept = dict(kept or {})
        self._known: dict[str, _KnownDevice] = {}
        self._mismatched: set[str] = set()  # devices with another task, and relays where none are possible
        self._behind: dict[str, float] = {}  # devices without a class that has joined, and since when we know
        self._health: dict[str, Health] = {}
        self._changes: dict[str, Changes] = {}
        self._left_out: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    def handle_status(self, topic_id: str, status: Status, now: float = 0.0) -> bool:
        """Handle a birth or death; return whether the device is present (again) and may lack earlier messages.

        It may be present again without a new incarnation, if its connection or ours was lost. A status that only
        announces a new bundle does not count. `now`: seconds since the epoch by our clock.

        Raises:
            ProtocolError: `foreign-id`, `no-relays`, `task-mismatch`, `task-behind` or `too-many-devices`; nothing
                changed.
        """
        if status.device_id != topic_id:
            raise ProtocolError("foreign-id", f"{topic_id} speaks for {status.device_id}")
        refused = status.site is not None and self._no_relays
        mismatched = status.presence is Presence.ONLINE and status.task_fingerprint != self._fingerprint
        if (refused or mismatched) and len(self._mismatched) < MAX_DEVICES:
            self._mismatched.add(topic_id)
        if refused:
            raise ProtocolError("no-relays", f"{topic_id} is a relay, and its devices are left out: {self._no_relays}")
        if mismatched and status.task_fingerprint in self._earlier:
            self._behind.setdefault(topic_id, now)
            raise ProtocolError("task-behind", f"{topic_id} does not have a class yet that has joined")
        self._behind.pop(topic_id, None)
        if mismatched:
            raise ProtocolError("task-mismatch", _explain_other_task(topic_id, status))
        self._mismatched.discard(topic_id)
        before = self._known.get(topic_id)
        if before is None and topic_id not in self._contexts and not self._has_room(status):
            raise ProtocolError("too-many-devices", f"{topic_id} is one more than {MAX_DEVICES}")
        another = before is not None and status.incarnation != before.status.incarnation
        if before and another and status.presence is Presence.OFFLINE and not before.twice:
            return False  # the last will of an earlier life
        self._known[topic_id] = known = _KnownDevice(status, began_at=now)
        if before is None:
            self._recall(topic_id, known)
        else:
            known.context, known.ahead_s, known.seen_at = before.context, before.ahead_s, before.seen_at
            known.before = before.status.incarnation if another else before.before
            known.before_at = before.began_at if another else before.before_at
            known.began_at = now if another else before.began_at
            known.twice = status.incarnation == before.before or (before.twice and not another)
        self._record_change(topic_id, PRESENCE, status.presence, now)
        self._changed.set()
        if before and before.status != status and _is_news_only(before.status, status):
            return False
        return status.presence is Presence.ONLINE

    def _record_change(self, device_id: str, name: str, value: str, now: float) -> bool:
        """Record a value of the device, whether it is known yet or not; return whether it is another than before."""
        kept = self._kept.get(device_id, UNHEARD).changes
        before = self._changes.get(device_id, kept)
        self._changes[device_id] = record_change(before, name, value, now)
        return self._changes[device_id] is not before

    def _recall(self, device_id: str, known: _KnownDevice) -> None:
        """Restore what the device said before our start."""
        kept = self._kept.pop(device_id, UNHEARD)
        self._changes.setdefault(device_id, kept.changes)
        found = [context for context in (kept.context, self._contexts.get(device_id)) if context is not None]
        known.context = max(found, key=lambda context: context.at or 0.0, default=None)
        known.seen_at = kept.seen_at
        if kept.health is not None:
            self._health.setdefault(device_id, kept.health)

    def export_messages(self) -> dict[str, LastMessages]:
        """Return what a later registry needs of each device."""
        own = {
            i: LastMessages(
                seen_at=known.seen_at,
                context=known.context,
                health=self._health.get(i),
                changes=self._changes.get(i, Changes()),
            )
            for i, known in self._known.items()
        }
        return dict(list((own | self._kept).items())[:MAX_DEVICES])

    def _has_room(self, status: Status) -> bool:
        """Return whether there is room, if need be in place of an absent device that was not in the last round."""
        if len(self._known) < MAX_DEVICES or status.presence is not Presence.ONLINE:
            return len(self._known) < MAX_DEVICES
        away = (i for i, known in self._known.items() if known.status.presence is not Presence.ONLINE)
        gone = next((i for i in away if i not in self._contexts), None)
        if gone is not None:
            del self._known[gone]
            self._changes.pop(gone, None)
        return gone is not None

    def handle_context(self, topic_id: str, context: Context, now: float) -> None:
        """Handle a device's context; `now`: seconds since the epoch by our clock.

        Raises:
            ProtocolError: `foreign-id` or `unknown-device`; nothing changed.
        """
        if context.device_id != topic_id:
            raise ProtocolError("foreign-id", f"{topic_id} speaks for {context.device_id}")
        if now - self._behind.get(topic_id, now) > GROWS_S:
            raise ProtocolError(
                "task-mismatch",
                f"{topic_id} does not take up the classes that have joined: update fedge there, or start its agent "
                "with the task.json of the coordinator's home",
            )
        if topic_id in self._mismatched:  # already logged with its status
            return
        if topic_id not in self._known:
            raise ProtocolError("unknown-device", f"{topic_id} has shown no status yet")
        known = self._known[topic_id]
        known.context = context
        known.ahead_s = 0.0 if context.at is None else context.at - now
        self._changed.set()

    def handle_health(self, topic_id: str, health: Health, now: float = 0.0) -> bool:
        """Handle a device's health; return whether something for people changed. Drift changes its incarnation.

        A runtime's last will says only that it is gone; the rest stays as it last was. `now`: as in `handle_status`.

        Raises:
            ProtocolError: `foreign-id` or `too-many-devices`; nothing changed.
        """
        if health.device_id != topic_id:
            raise ProtocolError("foreign-id", f"{topic_id} speaks for {health.device_id}")
        if topic_id not in self._health and len(self._health) >= MAX_DEVICES and not self.knows(topic_id):
            raise ProtocolError("too-many-devices", f"{topic_id} is one more than {MAX_DEVICES}")
        if not health.serving and (known := self._health.get(topic_id)) is not None:
            health = msgspec.structs.replace(known, serving=False)
        self._health[topic_id] = health
        if self._drifts(topic_id):
            self._changed.set()
        phase = f"{health.phase} {health.reason}"
        values = {"serving": health.serving, "drift": health.drift, "kind": health.drift_kind, "phase": phase}
        changed = [self._record_change(topic_id, name, str(value), now) for name, value in values.items()]
        return any(changed)

    def get_incarnation(self, device_id: str) -> str | None:
        """Return the incarnation of this device's agent; None if none was seen."""
        known = self._known.get(device_id)
        return known.status.incarnation if known else None

    def is_away(self, device_id: str) -> bool:
        """Return whether the device announced sleep, or the broker lost it."""
        known = self._known.get(device_id)
        return known is not None and known.status.presence is not Presence.ONLINE

    def is_twice(self, device_id: str) -> bool:
        """Return whether two agents use this device's name, since one returned after the other had come."""
        known = self._known.get(device_id)
        return known is not None and known.twice

    def get_twins(self, device_id: str) -> dict[str, float]:
        """Return the last two incarnations of this device, the present one first, with the time it was first heard."""
        known = self._known[device_id]
        return {known.status.incarnation: known.began_at} | ({known.before: known.before_at} if known.before else {})

    def record_outdated(self, device_id: str) -> None:
        """Record an outdated message from this device, since another agent may be using its name."""
        if device_id in self._known:
            self._known[device_id].twice = True

    def forget(self, device_id: str) -> None:
        """Forget a device that no longer belongs to the federation."""
        for known in (self._known, self._contexts, self._health, self._changes, self._kept):
            known.pop(device_id, None)
        self._changed.set()

    def knows(self, device_id: str) -> bool:
        """Return whether this is one of our devices."""
        return device_id in self._known or device_id in self._contexts

    def exclude(self, ids: Iterable[str]) -> None:
        """Exclude quarantined devices, whatever they announce. An excluded relay excludes the devices of its site."""
        self._left_out = frozenset(ids)
        self._changed.set()

    def list_presence(self) -> dict[str, Presence]:
        """List the presence of each known device, by id."""
        return {i: known.status.presence for i, known in sorted(self._known.items())}

    def list_behind_relays(self) -> dict[str, Presence]:
        """Return the present devices behind relays."""
        here = (*self.list_online(), *self.list_inference_only())
        return {device.id: Presence.ONLINE for device in here if device.via}

    def get_presence(self, device_id: str) -> Presence | None:
        """Return the presence of a device; None if it is unknown."""
        known = self._known.get(device_id)
        return known.status.presence if known else None

    def record_message(self, device_id: str, now: float) -> None:
        """Record a message of the device at `now` (seconds since the epoch by our clock)."""
        if device_id in self._known:
            self._known[device_id].seen_at = now

    def describe_devices(self) -> dict[str, dict[str, object]]:
        """Describe each known device for people, as JSON values; including devices behind relays."""
        found: dict[str, dict[str, object]] = {}
        for i, known in sorted(self._known.items()):
            seen = {"presence": str(known.status.presence), "seen_at": known.seen_at or None}
            facts = {each.id: each for each in self._list_facts_behind(i)}
            for d in self._iterate_behind(i):
                told = _describe(d.context, d.release, d.n_samples, d.withholds, None)
                found.setdefault(d.id, seen | told | (_describe_facts(facts[d.id]) if d.id in facts else {}))
            status = known.status
            found[i] = seen | _describe(
                known.context, status.release, status.n_samples, status.withholds, self._health.get(i)
            )
            found[i] |= {"data_version": status.data_version, "n_arrived": status.n_arrived}
            changes = self._changes.get(i, Changes())
            found[i]["since"] = {name: change.at or None for name, change in changes.last.items()}
            found[i]["habit_s"] = compute_habit_s(changes)
            if known.twice:
                found[i]["twins"] = self.get_twins(i)
        return found

    def list_facts(self) -> list[DeviceFacts]:
        """List what the known devices last said of their samples and bundles, without those left out.

        Of devices behind a relay its status tells the same, but not their score at work.
        """
        found = []
        for i, known in sorted(self._known.items()):
            if i in self._left_out:
                continue
            status, health = known.status, self._health.get(i)
            if status.site is not None:
                found += self._list_facts_behind(i)
                continue
            at_work = None if health is None else health.at_work
            found.append(
                DeviceFacts(
                    id=i,
                    online=status.presence is Presence.ONLINE,
                    data_version=status.data_version,
                    n_arrived=status.n_arrived,
                    drift=self._drifts(i),
                    drift_kind=None if health is None else health.drift_kind,
                    held=health is not None and _get_drift_release(health) != health.release,
                    at_work=None if at_work is None else at_work.recent,
                    n_answers=0 if at_work is None else at_work.right + at_work.wrong,
                )
            )
        return found

    def _list_facts_behind(self, relay: str) -> list[DeviceFacts]:
        """List what a relay says of the devices of its site."""
        of = {f"{relay}.{d.id}": d for d in self._known[relay].status.site or ()}
        online = self._known[relay].status.presence is Presence.ONLINE
        return [
            DeviceFacts(
                id=device.id,
                online=online,
                data_version=of[device.id].data_version,
                n_arrived=of[device.id].n_arrived,
                drift=device.drift,
                drift_kind=of[device.id].drift_kind,
            )
            for device in self._iterate_behind(relay)
            if device.id not in self._known and device.id not in self._left_out
        ]

    def find_wrong_clocks(self) -> dict[str, float]:
        """Return how many seconds devices' clocks are ahead of ours, for clocks that differ."""
        found = sorted(self._known.items())
        return {i: round(known.ahead_s) for i, known in found if abs(known.ahead_s) > CLOCKS_AGREE_S}

    def list_online(self) -> tuple[Device, ...]:
        """List the devices that can be asked now: online and able to train; by ascending id.

        A device without a context is included, since the context may take `context_interval_s` to arrive and is needed
        only when methods choose among devices.
        """
        return self._list_here(trains=True)

    def list_inference_only(self) -> tuple[Device, ...]:
        """List the devices that are online and cannot train; by ascending id."""
        return self._list_here(trains=False)

    def _list_here(self, *, trains: bool) -> tuple[Device, ...]:
        there = [i for i, known in self._known.items() if known.status.presence is Presence.ONLINE]
        return tuple(
            d for d in self.list_known(there) if d.trains == trains and self._left_out.isdisjoint({d.id, d.via})
        )

    def list_known(self, ids: Iterable[str] | None = None) -> tuple[Device, ...]:
        """List these devices, or all so far, by id and as of their last messages; relays expanded to their devices."""
        found: dict[str, Device] = {}
        for i in sorted(self._known if ids is None else ids):
            found |= {d.id: d for d in self._iterate_behind(i) if d.id not in self._known and d.id not in found}
            if (status := self._known[i].status).site is None:
                found[i] = Device(
                    i,
                    status.n_samples,
                    self._known[i].context,
                    self._make_incarnation(i),
                    _can_train(status),
                    self._drifts(i),
                    status.capabilities.steps if status.capabilities else None,
                    status.release,
                    status.withholds,
                )
        return tuple(found[i] for i in sorted(found))

    def _iterate_behind(self, relay: str) -> Iterator[Device]:
        """Iterate over the devices of a relay's site; their names begin with the relay's name."""
        for d in self._known[relay].status.site or ():
            name = f"{relay}.{d.id}"
            if re.match(NAME, name):
                parts = d.n_samples, d.context, d.incarnation, d.trains, d.drift, None, d.release, d.withholds
                yield Device(name, *parts, via=relay)

    def _make_incarnation(self, device_id: str) -> str:
        own = self._known[device_id].status.incarnation
        return f"{own}/{_get_drift_release(self._health[device_id])}" if self._drifts(device_id) else own

    def _drifts(self, device_id: str) -> bool:
        """Return whether a device needs another bundle; other class shares alone are answered on the device."""
        health = self._health.get(device_id)
        return health is not None and health.drift and health.drift_kind is not DriftKind.SHARES

    async def wait_for_devices(self, n: int) -> tuple[Device, ...]:
        """Wait until `n` devices can be asked."""
        await self._wait_until(lambda: len(self.list_online()) >= n)
        return self.list_online()

    async def wait_for_late_joiner(self, tried: Mapping[str, str], equipped: Container[str]) -> None:
        """Wait until a device, training or not, needs a bundle because it has none or its bundle drifts.

        tried: incarnation of each device asked before; a device is asked again under a new incarnation.
        equipped: ids of the devices with a bundle.
        """

        def is_new(device: Device) -> bool:
            needs = device.id not in equipped or device.drift
            return needs and tried.get(device.id) != device.incarnation

        await self._wait_until(lambda: any(map(is_new, (*self.list_online(), *self.list_inference_only()))))

    async def wait_for_status(self, ids: Collection[str]) -> None:
        """Wait for any status from each of these devices."""
        await self._wait_until(lambda: set(ids) <= self._known.keys())

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
            await asyncio.sleep(LOOK_AGAIN_S)


def _describe(
    context: Context | None, release: int, n_samples: int, withholds: tuple[str, ...], health: Health | None
) -> dict[str, object]:
    return {
        "context": None if context is None else msgspec.to_builtins(context),
        "release": release,
        "n_samples": n_samples,
        "withholds": list(withholds),
        "serving": "none" if health is None else "serving" if health.serving else "down",
        "health": None if health is None else {name: msgspec.to_builtins(getattr(health, name)) for name in SHOWN},
        "of_bundle": None if health is None else describe_accuracy(health),
        "drift": health is not None and health.drift,
        "drift_held": health is not None and health.drift and _get_drift_release(health) != health.release,
        "drift_kind": None if health is None or health.drift_kind is None else str(health.drift_kind),
        "at_work": None if health is None or health.at_work is None else msgspec.to_builtins(health.at_work),
    }


def describe_accuracy(health: Health) -> dict[str, object] | None:
    """Describe the accuracy of the bundle that answers on the device's validation samples; None if it is not told."""
    quality = health.in_service
    if quality is None or quality.accuracy is None:
        return None
    return {"accuracy": quality.accuracy, "n": quality.n, "release": health.release}


def _describe_facts(facts: DeviceFacts) -> dict[str, object]:
    """Describe what a relay says of a device's samples and bundle."""
    kind = None if facts.drift_kind is None else str(facts.drift_kind)
    samples = {"data_version": facts.data_version, "n_arrived": facts.n_arrived}
    return {**samples, "drift": facts.drift, "drift_kind": kind}


def _get_drift_release(health: Health) -> int:
    """Return the release whose answers showed the drift; an older runtime names none and means the one in service."""
    return health.drift_release or health.release


def _is_news_only(before: Status, now: Status) -> bool:
    """Return whether two statuses differ only in the bundle, or in the devices behind a relay."""
    return msgspec.structs.replace(before, release=now.release, site=now.site) == now


def _can_train(status: Status) -> bool:
    return status.capabilities is None or status.capabilities.trains


def _explain_other_task(device_id: str, status: Status) -> str:
    """Say that a device has another task, and what differs as far as it has said so."""
    what = status.other_task or "the task is another one"
    return (
        f"{device_id} has another task than the federation ({what}), which is another federation: give its agent the "
        "task.json of the coordinator's home, or another --federation"
    )
