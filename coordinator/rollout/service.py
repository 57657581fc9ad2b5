"""The rollout's supervisor: makes the decisions of `decide` durable, publishes them, and serves the release.

It may be killed at any moment and restarted, because state is written before it is published, the broker retains the
announcement, and devices request missing bytes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from msgspec.structs import replace

from coordinator.rollout.decision import (
    DeviceHealth,
    Plan,
    Progress,
    abort,
    decide,
    is_over,
    is_running,
    list_members,
    make_message,
)
from coordinator.rollout.folder import DeviceLine, Folder, Record, Request, RolloutEvent
from coordinator.store.registry import MAX_DEVICES
from export.signing import Repository
from fedge.bundle.manifest import Manifest, decode_manifest
from fedge.errors import ConfigError, ProtocolError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Signed, make_speaker
from fedge.system.files import compute_digest, get_version
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import FileRef, Health, Rollout, RolloutState, decode_message, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import SHORT_SESSION_S, Transport

log = logging.getLogger("fedge.rollout")

QUIET_S: Final = 1.0
"""Time without another device after which the broker has named all that it knows."""
TICK_S: Final = 1.0
"""Pause between two looks at requests and clocks."""
WRITE_S: Final = 5.0
"""Shortest time between two writes of device reports, unless the rollout itself advances."""
MAX_NEWS: Final = 200
"""Most events of a rollout that are kept."""
MAX_EARLIER: Final = 20
"""Most earlier rollouts whose outcome is kept."""

Observer = Callable[[str, dict[str, Any]], None]


class Release:
    """The files of a target as announced to devices; read again after the repository is re-signed."""

    def __init__(self, repository: Repository, repo: Path, target: str) -> None:
        """Read the target's files from the repository.

        Raises:
            ConfigError: there is no such target, or a part of it is damaged.
        """
        self.repository = repository
        self._timestamp = repo / "metadata" / "timestamp.json"
        self._target = target
        self._signed: tuple[int, int, int] | None = (-1, -1, -1)
        self._bytes: dict[str, bytes] = {}
        self.metadata: dict[str, FileRef] = {}
        self.refresh()
        (data,) = (data for name, data in self._files.items() if name.startswith(target.rpartition("/")[0] + "/"))
        self.digest = compute_digest(data)
        self.manifest: Manifest = decode_manifest(data)
        self._parts = {part.digest for part in self.manifest.files.values()}
        for name, part in self.manifest.files.items():
            self._require_whole(name, part.digest)

    def _require_whole(self, name: str, digest: str) -> None:
        """Refuse a release with a part that differs from what was signed, since no device could take it."""
        path = self.repository.parts.get_path(digest)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(
                f"part {name} of {self._target} cannot be read ({error}): `fedge release add` its bundle again"
            ) from error
        if found != digest:
            raise ConfigError(
                f"part {name} of {self._target} is damaged: delete {path}, and `fedge release add` its bundle again"
            )

    def refresh(self) -> None:
        """Load new signatures."""
        while (signed := get_version(self._timestamp)) != self._signed:  # repeat if it was signed meanwhile
            self._files = {name: path.read_bytes() for name, path in self.repository.find_files(self._target).items()}
            self._bytes = {compute_digest(data): data for data in self._files.values()}
            self.metadata = {
                name: FileRef(digest=compute_digest(data), size_bytes=len(data)) for name, data in self._files.items()
            }
            self._signed = signed

    def find_file(self, digest: str) -> Path | bytes | None:
        """Return the bytes of an announced file."""
        if digest in self._bytes:
            return self._bytes[digest]
        parts = self.repository.parts
        return parts.get_path(digest) if digest in self._parts and digest in parts else None


class Supervisor:
    """A supervisor that takes one rollout to its end.

    Args:
        folder: the durable state, whose lock the caller holds.
        release: the release to roll out.
        plan: how to roll it out; a rollout already begun with the same plan is resumed.
        broker: how to reach the broker.
        federation: the federation of the devices.
        observe: called with events.
    """

    def __init__(
        self,
        folder: Folder,
        release: Release,
        plan: Plan,
        broker: BrokerSettings,
        federation: str,
        observe: Observer,
    ) -> None:
        self._folder = folder
        self._release = release
        record = folder.read()
        self._version = 0 if record is None else record.version
        self._plan, self._progress = start_rollout(folder, plan, time.time())
        news, self._earlier = ((), ()) if record is None else (record.events, record.earlier)
        if record is not None and record.plan.id != self._plan.id:
            news, self._earlier = (), (*record.earlier, record.to_earlier())[-MAX_EARLIER:]
        self._happened = deque(news, MAX_NEWS)
        self._fleet: dict[str, DeviceHealth] = {}
        self._observe = observe
        self._federation = federation
        self._topics = Topics(federation)
        client = self._topics.make_client_id("rollout", token_hex(8))
        self._transport = Transport(broker, client, session_expiry_s=SHORT_SESSION_S)
        self._sender = Sender(self._transport, release.find_file)
        self._signed = make_speaker(broker, Subject(federation, Role.ROLLOUT, "rollout"), folder.path)
        if isinstance(self._signed, Signed):
            self._signed.heard = folder.read_heard()
        self._news = asyncio.Event()
        self._started = time.time()
        self._written_at = 0.0
        self._said: Rollout | None = None

    async def run(self) -> Progress:
        """Run until no device is left to update or revert; return the final state.

        Raises:
            ConfigError: the key that signs announcements is missing; nothing has changed.
            StoreError: the state cannot be written; whatever was published had been written before.
            TransportError: the broker refused us for good.
        """
        self._release.repository.announce(make_message(self._plan, self._progress, {}), self._federation)
        await self._transport.subscribe(self._topics.make_agent_topic("+", "health"), self._on_health)
        await self._transport.subscribe(self._topics.make_agent_topic("+", "release-wants"), self._on_want)
        await self._signed.follow_revocations(self._transport, self._topics)
        self._transport.on_connect(self._on_connect)
        self._save(self._progress)
        async with self._transport, self._sender:
            await self._collect_devices()
            while True:
                self._news.clear()
                await self._step()
                if self._fleet and is_over(self._plan, self._progress, self._fleet, time.time()):
                    self._save(self._progress)
                    return self._progress
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._news.wait()

    async def _collect_devices(self) -> None:
        """Collect all devices known to the broker, since the first stage depends on who is present."""
        known = -1
        while known != len(self._fleet):
            known = len(self._fleet)
            await asyncio.sleep(QUIET_S)

    async def _step(self) -> None:
        """Process requests, decide, write, publish, in this order."""
        self._release.refresh()
        now = time.time()
        request = self._folder.take_request()
        progress = decide(self._plan, apply_request(self._progress, request, now), self._fleet, now)
        if progress != self._progress or time.monotonic() - self._written_at > WRITE_S:
            self._save(progress)
        if request is not None:
            self._folder.finish_request()
        rollout = make_message(self._plan, self._progress, self._release.metadata)
        if rollout != self._said:
            self._version = max(self._version + 1, int(1000 * now))  # rises even if an earlier folder is lost
            self._save(self._progress)
            signed = self._release.repository.announce(replace(rollout, version=self._version), self._federation)
            await self._transport.publish(self._topics.rollout, encode_message(signed), retain=True)
            self._said = rollout

    def _save(self, progress: Progress) -> None:
        before, self._progress, self._written_at = self._progress, progress, time.monotonic()
        goes_on = (before.state, before.stage) != (progress.state, progress.stage)
        if goes_on or not self._happened:
            self._record_event("rollout", self._summarise())
        taking_part = set(list_members(self._plan, progress, self._fleet))
        lines = {device: _make_line(seen, takes_part=device in taking_part) for device, seen in self._fleet.items()}
        self._folder.write(
            Record(
                plan=self._plan,
                progress=progress,
                version=self._version,
                devices=lines,
                events=tuple(self._happened),
                earlier=self._earlier,
            )
        )
        if isinstance(self._signed, Signed):
            self._folder.write_heard(self._signed.heard)
        if goes_on:
            log.info("event=rollout id=%s state=%s stage=%d", self._plan.id, progress.state, progress.stage)
            self._observe("rollout", self._summarise())

    def _record_event(self, event: str, fields: dict[str, Any]) -> None:
        self._happened.append(
            RolloutEvent(at=time.time(), device=fields.get("device", ""), text=describe_event(event, fields))
        )

    def _summarise(self) -> dict[str, Any]:
        plan, progress = self._plan, self._progress
        return {
            "id": plan.id,
            "state": str(progress.state),
            "stage": progress.stage + 1,
            "stages": len(plan.stages),
            "share": progress.share,
            "devices": len(self._fleet),
            "running": sum(is_running(plan, seen.health) for seen in self._fleet.values()),
            "reasons": list(progress.reasons),
        }

    # ------------------------------------------------------------------------------------------------- inwards

    async def _on_connect(self) -> None:
        self._said = None  # for a broker that lost its state
        self._news.set()

    async def _on_health(self, inbound: Inbound) -> None:
        if not inbound.payload:  # a cleared retained message
            return
        device = self._topics.split(inbound.topic)[1]
        health = decode_message(self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device), Health)
        if health.device_id != device:
            raise ProtocolError("foreign-id", f"{device} speaks for {health.device_id}")
        if device not in self._fleet and len(self._fleet) >= MAX_DEVICES:
            raise ProtocolError("too-many-devices", f"{device} is one more than {MAX_DEVICES}")
        before = self._fleet.get(device)
        self._fleet[device] = DeviceHealth(health=health, at=self._started if inbound.retained else time.time())
        if before is None or _select_shown(before.health) != _select_shown(health):
            fields = {"device": device, "phase": str(health.phase), "release": health.release, "reason": health.reason}
            self._record_event("device", fields)
            self._observe("device", fields)
            self._news.set()

    async def _on_want(self, inbound: Inbound) -> None:
        device = self._topics.split(inbound.topic)[1]
        payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
        self._sender.handle_want(device, payload, self._topics)


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
