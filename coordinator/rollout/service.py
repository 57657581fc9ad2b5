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
from pathlib import Path
from secrets import token_hex
from typing import Final

from msgspec.structs import replace

from coordinator.rollout.course import Course, Observer
from coordinator.rollout.decision import Plan, Progress, is_over, make_message
from coordinator.rollout.folder import Folder
from export.signing import Repository
from fedge.bundle.manifest import Manifest, decode_manifest
from fedge.errors import ConfigError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Signed, make_speaker
from fedge.system.files import compute_digest, get_version
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import FileRef, Health, Rollout, decode_message, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import SHORT_SESSION_S, Transport

log = logging.getLogger("fedge.rollout")

QUIET_S: Final = 1.0
"""Time without another device after which the broker has named all that it knows."""
TICK_S: Final = 1.0
"""Pause between two looks at requests and clocks."""


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
        self._release = release
        self._federation = federation
        self._topics = Topics(federation)
        client = self._topics.make_client_id("rollout", token_hex(8))
        self._transport = Transport(broker, client, session_expiry_s=SHORT_SESSION_S)
        self._sender = Sender(self._transport, release.find_file)
        self._signed = make_speaker(broker, Subject(federation, Role.ROLLOUT, "rollout"), folder.path)
        if isinstance(self._signed, Signed):
            self._signed.heard = folder.read_heard()
        self._course = Course(folder, plan, self._signed, observe)
        self._news = asyncio.Event()
        self._said: Rollout | None = None

    async def run(self) -> Progress:
        """Run until no device is left to update or revert; return the final state.

        Raises:
            ConfigError: the key that signs announcements is missing; nothing has changed.
            StoreError: the state cannot be written; whatever was published had been written before.
            TransportError: the broker refused us for good.
        """
        course = self._course
        self._release.repository.announce(make_message(course.plan, course.progress, {}), self._federation)
        await self._transport.subscribe(self._topics.make_agent_topic("+", "health"), self._on_health)
        await self._transport.subscribe(self._topics.make_agent_topic("+", "release-wants"), self._on_want)
        await self._signed.follow_revocations(self._transport, self._topics)
        self._transport.on_connect(self._on_connect)
        course.save(course.progress)
        async with self._transport, self._sender:
            await self._collect_devices()
            while True:
                self._news.clear()
                await self._step()
                if course.fleet and is_over(course.plan, course.progress, course.fleet, time.time()):
                    course.save(course.progress)
                    return course.progress
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._news.wait()

    async def _collect_devices(self) -> None:
        """Collect all devices known to the broker, since the first stage depends on who is present."""
        known = -1
        while known != len(self._course.fleet):
            known = len(self._course.fleet)
            await asyncio.sleep(QUIET_S)

    async def _step(self) -> None:
        """Process requests, decide, write, publish, in this order."""
        self._release.refresh()
        self._course.advance()
        rollout = make_message(self._course.plan, self._course.progress, self._release.metadata)
        if rollout != self._said:
            version = self._course.raise_version()
            signed = self._release.repository.announce(replace(rollout, version=version), self._federation)
            await self._transport.publish(self._topics.rollout, encode_message(signed), retain=True)
            self._said = rollout

    # ------------------------------------------------------------------------------------------------- inwards

    async def _on_connect(self) -> None:
        self._said = None  # for a broker that lost its state
        self._news.set()

    async def _on_health(self, inbound: Inbound) -> None:
        if not inbound.payload:  # a cleared retained message
            return
        device = self._topics.split(inbound.topic)[1]
        health = decode_message(self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device), Health)
        if self._course.record_health(device, health, retained=inbound.retained):
            self._news.set()

    async def _on_want(self, inbound: Inbound) -> None:
        device = self._topics.split(inbound.topic)[1]
        payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
        self._sender.handle_want(device, payload, self._topics)
