"""Introduces a campaign's personal bundles: to canaries first, then in stages, by the state machine of rollouts.

    Rollout, retained   ──▶  runtimes hold a campaign's bundle back until it is announced that they take part
    Health, retained    ◀──  what became of it there: in service, kept its own, refused, rolled back

The bundles are on the devices already, each another, and nobody signs them: only the coordinator that ordered them says
when they may be tried. Like a rollout, an introduction has its state in HOME/rollout, takes requests from there, and
goes on after any interruption. It serves late devices as long as the coordinator lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from coordinator.fleet.mqtt.process import load_signing
from coordinator.rollout.course import Course, Observer
from coordinator.rollout.decision import Plan, Progress, list_members, make_message
from coordinator.rollout.folder import Folder
from coordinator.rollout.settings import CANARIES, IntroductionSettings, parse_stages
from coordinator.store.registry import describe_accuracy
from fedge.errors import ConfigError, raise_as
from fedge.identity.names import Role
from fedge.membership.signed_messages import Signed
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Health, Rollout, RolloutState, decode_message, encode_message
from fedge.wire.rollout import compute_introduction_digest
from fedge.wire.topics import Topics
from fedge.wire.transport import SHORT_SESSION_S, Transport

QUIET_S: Final = 1.0
"""Time without another device after which the broker has named all that it knows."""
TICK_S: Final = 1.0
"""Pause between two looks at requests and clocks."""
SILENCE_S: Final = 600.0
"""Time after which a device that is admitted has said that it examines its bundle, if it hears of the introduction."""
INTRODUCING: Final = frozenset({RolloutState.RUNNING, RolloutState.DONE})
EVENTS: Final = {"rollout": "introduction", "device": "introduced"}
"""Names of our events among those of the coordinator."""


class Introducer:
    """Introduces the bundles of one campaign after the other.

        introducer = Introducer(home, broker, federation, settings, observe)
        running = asyncio.create_task(introducer.run())
        introducer.introduce(3, state.installed)  # after each round that left bundles; again after a restart
        summary["introduction"] = introducer.describe()

    Args:
        home: the coordinator's home.
        broker: how to reach the broker.
        federation: the federation's name.
        settings: how to introduce.
        observe: called with events for people.

    Raises:
        ConfigError: the certificate is not a coordinator's, or the stages make no sense.
        StoreError: the state cannot be read.
    """

    def __init__(
        self, home: Path, broker: BrokerSettings, federation: str, settings: IntroductionSettings, observe: Observer
    ) -> None:
        parse_stages(settings)
        self._folder, self._settings = Folder(home), settings
        self._observe: Observer = lambda event, fields: observe(EVENTS[event], fields)
        self._topics = Topics(federation)
        client = self._topics.make_client_id("introduction", token_hex(8))
        self._transport = Transport(broker, client, session_expiry_s=SHORT_SESSION_S)
        self._signed, _ = load_signing(broker, federation, self._folder.path, Role.COORDINATOR)
        if isinstance(self._signed, Signed):
            self._signed.heard = self._folder.read_heard()
        self._said: Rollout | None = None
        self._news = asyncio.Event()
        self._silent: dict[str, float] = {}  # since when
        self._heard: dict[str, tuple[Health, bool]] = {}  # the last messages, and whether they were retained
        record = self._folder.read()
        self._members = frozenset(() if record is None else record.members)
        self._course = None if record is None else self._open_course(record.plan)

    def introduce(self, campaign: int, devices: Collection[str]) -> None:
        """Begin to introduce a campaign's bundles, or go on; an introduction of another campaign ends.

        Args:
            campaign: the campaign's number, which is in the orders that made the bundles.
            devices: the devices that have such a bundle; they may become more.

        Raises:
            StoreError: the state cannot be written.
        """
        self._members = frozenset(devices)
        if self._course is None or self._course.plan.release != campaign:
            paused = self._course is not None and self._course.progress.state is RolloutState.PAUSED
            if self._course is not None:
                finish_earlier(self._folder, campaign)
            self._course = self._open_course(make_plan(campaign, self._settings))
            if paused:
                self._course.progress = replace(self._course.progress, state=RolloutState.PAUSED)
        elif self._course.members == self._members:
            return
        self._course.members = self._members
        self._course.save(self._course.progress)
        self._count_members()
        self._news.set()

    def describe(self) -> dict[str, Any] | None:
        """Describe the last introduction for HOME/summary.json; None before the first."""
        if self._course is None:
            return None
        silent = self.list_silent(time.time())
        return {"campaign": self._course.plan.release, **self._course.summarise(), "silent": silent}

    def list_silent(self, now: float) -> dict[str, float]:
        """List the devices that are admitted and say nothing of it for too long, each with since when.

        Such a runtime is connected as far as it said, has a bundle of the campaign, and does not hear the announcement.
        """
        course = self._course
        if course is None or course.progress.state not in INTRODUCING:
            return {}
        plan, progress = course.plan, course.progress
        silent = {
            device
            for device in list_members(plan, progress, course.fleet)
            if course.fleet[device].health.rollout != plan.id
        }
        self._silent = {device: self._silent.get(device, progress.began) for device in sorted(silent)}
        return {device: since for device, since in self._silent.items() if now - since > SILENCE_S}

    def list_accuracies(self) -> dict[str, dict[str, object]]:
        """List by device the accuracy of the bundle that answers there, as far as the last introduction measured it."""
        fleet = {} if self._course is None else self._course.fleet
        found = {device: describe_accuracy(seen.health) for device, seen in sorted(fleet.items())}
        return {device: told for device, told in found.items() if told is not None}

    async def run(self) -> None:
        """Announce, decide and take requests, until cancelled.

        Raises:
            ConfigError: another process introduces bundles from this home.
            StoreError: the state cannot be written; whatever was published had been written before.
            TransportError: the broker refused us for good.
        """
        await self._transport.subscribe(self._topics.make_agent_topic("+", "introduced"), self._on_health)
        await self._signed.follow_revocations(self._transport, self._topics)
        self._transport.on_connect(self._on_connect)
        with self._folder.supervise():
            async with self._transport:
                await self._collect_devices()
                while True:
                    self._news.clear()
                    await self._step()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(TICK_S):
                            await self._news.wait()

    # ------------------------------------------------------------------------------------------------- within

    def _open_course(self, plan: Plan) -> Course:
        course = Course(self._folder, plan, self._signed, self._observe)
        course.members = self._members
        return course

    async def _collect_devices(self) -> None:
        """Collect all devices known to the broker, since the first stage depends on who is present."""
        known = -1
        while known != len(self._heard):
            known = len(self._heard)
            await asyncio.sleep(QUIET_S)

    async def _step(self) -> None:
        """Process requests, decide, write, publish, in this order."""
        course = self._course
        if course is None:
            return
        course.advance()
        if is_without_devices(course, time.time()):
            course.save(finish_without_devices(course.plan, course.progress))
        rollout = make_message(course.plan, course.progress, {})
        if rollout != self._said:
            said = encode_message(replace(rollout, version=course.raise_version()))
            topic = self._topics.introduction
            await self._transport.publish(topic, self._signed.seal(topic, said), retain=True)
            self._said = rollout

    async def _on_connect(self) -> None:
        self._said = None  # for a broker that lost its state
        self._news.set()

    async def _on_health(self, inbound: Inbound) -> None:
        if not inbound.payload:  # a cleared retained message
            return
        device = self._topics.split(inbound.topic)[1]
        payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
        self._heard[device] = decode_message(payload, Health), inbound.retained
        self._count_members(device)

    def _count_members(self, *devices: str) -> None:
        """Have those of the devices count, by default all, that have a bundle of the campaign."""
        for device in self._members.intersection(devices or self._heard):
            health, retained = self._heard[device]
            if self._course is not None and self._course.record_health(device, health, retained=retained):
                self._news.set()


def make_plan(campaign: int, settings: IntroductionSettings) -> Plan:
    """Make the plan of a campaign's introduction.

    Raises:
        ConfigError: the stages or the canaries make no sense.
    """
    name = f"campaign-{campaign}-{uuid.uuid4().hex[:8]}"
    described = {
        "id": name,
        "target": f"campaign {campaign}",
        "release": campaign,
        "digest": compute_introduction_digest(name),
        "fewest": CANARIES,
        **parse_stages(settings),
    }
    with raise_as(ConfigError, "canary", on=msgspec.ValidationError):
        return msgspec.convert(described, Plan)


def finish_earlier(folder: Folder, campaign: int) -> None:
    """End an introduction that a later campaign's replaces; its devices keep what they have."""
    record = folder.read()
    if record is not None and record.progress.state in {RolloutState.RUNNING, RolloutState.PAUSED}:
        progress = replace(
            record.progress, state=RolloutState.DONE, reasons=(f"campaign {campaign} has taken its place",)
        )
        folder.write(replace(record, progress=progress))


def is_without_devices(course: Course, now: float) -> bool:
    """Return whether no device that has a bundle of the campaign also serves, so that there is nothing to wait for."""
    running = course.progress.state is RolloutState.RUNNING
    return running and not course.fleet and now - course.progress.began > course.plan.absent_s


def finish_without_devices(plan: Plan, progress: Progress) -> Progress:
    """Return the end of an introduction without devices; whoever comes later takes its bundle at once."""
    return replace(
        progress,
        state=RolloutState.DONE,
        stage=len(plan.stages) - 1,
        share=1.0,
        reasons=("no device with a bundle of this campaign serves it",),
    )
