"""The identity of an agent: its name, what it can be asked to do, and what it reports of itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import fedge
from edge_agent.agent.events import Events
from fedge.data.task import TaskSpec
from fedge.membership.signed_messages import Plain, Signed
from fedge.privacy.egress import Rules
from fedge.steps.contract import Steps, list_versions, load_installed_steps
from fedge.wire.messages import Capabilities, Presence, SiteDevice, Status
from fedge.wire.topics import Topics


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """What is told of a device's non-sensitive samples: how many train, their version, and how many ever came."""

    n_shared: int
    data_version: int = 0
    n_arrived: int = 0


class CountedSamples(Protocol):
    """Samples that change while the agent runs (`edge_agent.agent.workplace.SampleWatch`)."""

    counts: SampleCounts

    def refresh(self) -> None:
        """Bring the counts up to date."""

    def close(self) -> None:
        """End."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The agent's name and properties.

    n_shared: number of non-sensitive training samples at the start (that of sensitive ones is never sent); 0 if the
    device does not train. steps: the steps that the device can be asked to do. site: the devices behind a relay.
    """

    device_id: str
    federation: str
    task: TaskSpec
    n_shared: int
    trains: bool = True
    steps: Steps = field(default_factory=load_installed_steps)
    site: Callable[[], tuple[SiteDevice, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """An agent that speaks in its federation.

    signed: signs messages and checks their senders. rules: what may leave, by the device's owner. events: receives
    events.
    """

    identity: Identity
    topics: Topics
    signed: Signed | Plain
    rules: Rules
    events: Events

    @property
    def device_id(self) -> str:
        """The name of the device."""
        return self.identity.device_id

    def make_topic(self, leaf: str) -> str:
        """Make the device's topic with this last level."""
        return self.topics.make_agent_topic(self.device_id, leaf)


def make_status(
    identity: Identity, presence: Presence, counts: SampleCounts, *, incarnation: str, release: int, rules: Rules
) -> Status:
    """Make the agent's status, as far as the device's owner permits."""
    status = Status(
        device_id=identity.device_id,
        incarnation=incarnation,
        presence=presence,
        task_fingerprint=identity.task.compute_fingerprint(),
        n_samples=counts.n_shared,
        data_version=counts.data_version,
        n_arrived=counts.n_arrived,
        release=release,
        capabilities=make_capabilities(trains=identity.trains, steps=identity.steps),
        withholds=rules.withheld,
        site=None if identity.site is None else identity.site(),
    )
    return rules.strip(status)


def make_capabilities(*, trains: bool, steps: Steps) -> Capabilities:
    """Return the capabilities of this machine."""
    return Capabilities(
        trains=trains,
        steps=list_versions({name: kind for name, kind in steps.items() if trains or not kind.TRAINS}),
        fedge_version=fedge.__version__,
        python_version=platform.python_version(),
        machine=platform.machine(),
        cpu_count=os.cpu_count() or 1,
    )
