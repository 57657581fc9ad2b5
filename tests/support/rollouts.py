"""What tests of rollouts share: releases, plans, a supervisor in this process, and what a device's disk says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import Folder
from coordinator.rollout.service import Release, Supervisor
from deploy.updates.slots import find_slot, read_state
from export.signing import Repository
from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import LocalBroker
from tests.support.broker import settings
from tests.support.runtime_device import FEDERATION

WAIT_S = 300.0


def release_of(home: Path) -> int:
    """Of the bundle that answers. Only reads: `Slots` tidies up, which is for the device alone while it runs."""
    return read_bundle(find_slot(home, read_state(home).running or "a")).manifest.release


def plan_of(repo: Path, bundle: Path, **changes: Any) -> tuple[Release, Plan]:
    """Sign a bundle, and plan to roll it out."""
    repository = Repository(repo)
    target = repository.add(bundle)
    release = Release(repository, repo, target)
    values: dict[str, Any] = {"id": "r1", "stages": (0.1, 0.5, 1.0), "soak_s": 0.0, "absent_s": 60.0} | changes
    return release, Plan(target=target, release=release.manifest.release, digest=release.digest, **values)


async def rolled_out(
    broker: LocalBroker, repo: Path, release: Release, plan: Plan, observe: Callable[..., None] | None = None
) -> Progress:
    """What the rollout came to."""
    supervisor = Supervisor(
        Folder(repo), release, plan, settings(broker), FEDERATION, observe or (lambda event, fields: None)
    )
    async with asyncio.timeout(WAIT_S):
        return await supervisor.run()
