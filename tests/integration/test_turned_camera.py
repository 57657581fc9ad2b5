"""A camera is turned by 90 degrees, and nobody touches a shell on it: it is told true labels over HTTP, a campaign
begins by itself, what was learned is introduced in stages, and the alarm goes out when what it sees fits again. A
bundle fitted to the camera alone may come before the campaign, since it drifts, and may do as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedge.commands.broker import LocalBroker, find_mosquitto
from tests.support.broker import local_broker
from tests.support.cameras import Cameras, say_logs, seen

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

CAMERAS = ("cam1", "cam2", "cam3")
AT_HOME = 100
LABELS = 320
"""Labels that somebody gives the camera after it was turned."""
AFTERWARDS = 40
"""Labels that it is given of what it sees later: only these can say that its answers are right again."""
RECOVERED = 0.03


class Shop(Cameras):
    def __init__(self, folder: Path, broker: LocalBroker) -> None:
        super().__init__(folder, broker, CAMERAS, AT_HOME)

    async def begins(self) -> None:
        """Three cameras hang upright; each answers with its first bundle."""
        rounds = ("--method", "fedge", "--rounds", 4, "--campaign-rounds", 2, "--local-steps", 10)
        await self.start_coordinator(*rounds, "--when", f"new-samples={LABELS}")
        for camera in CAMERAS:
            await self.start_agent(camera)
        for camera in CAMERAS:
            await self.start_runtime(camera)
        await self.campaign_ends(1)

    async def events(self) -> list[dict[str, Any]]:
        said = await self.fedge("events", "--home", self.shop, "--last", 1000, "--json")
        return [json.loads(line) for line in said.splitlines()]


async def test_a_turned_camera_recovers_and_nobody_touches_it(tmp_path: Path) -> None:
    async with local_broker("mosquitto", tmp_path) as broker:
        shop = Shop(tmp_path, broker)
        try:
            await see_recovery(shop)
        except BaseException:
            say_logs(tmp_path)
            raise
        finally:
            await shop.kill_all()


async def see_recovery(shop: Shop) -> None:
    await shop.begins()
    before = await shop.measure_accuracy("cam1")
    assert shop.known("cam1")["drift"] is False

    shop.cameras["cam1"].turned = True
    turned = await shop.measure_accuracy("cam1")
    assert turned < before - 0.3, (before, turned)
    await seen(lambda: shop.known("cam1")["drift_kind"] == "inputs")
    await shop.tell("cam1", LABELS)
    await shop.are_known()
    await shop.campaign_ends(2)
    after = await shop.measure_accuracy("cam1")
    assert after >= before - RECOVERED, f"{before:.3f} before, {turned:.3f} turned, {after:.3f} after"
    await shop.tell("cam1", AFTERWARDS)
    await seen(lambda: not shop.known("cam1")["drift"])
    assert shop.introduction()["state"] == "done"

    events = await shop.events()
    drifts = find(events, "health", "its inputs are unlike")
    begins = find(events, "campaign_begun", f"{LABELS} new samples on 1 device", after=drifts)
    staged = find(events, "introduction", "running, stage 2 of 2", after=begins)
    assert find(events, "introduction", "done, stage 2 of 2", after=staged)
    assert last_health(events) == "bundle serving"


def find(events: list[dict[str, Any]], name: str, text: str, after: int = -1) -> int:
    """The place of the first such event after another."""
    found = [i for i, event in enumerate(events) if i > after and event["name"] == name and text in event["text"]]
    assert found, [(event["name"], event["device"], event["text"]) for event in events]
    return found[0]


def last_health(events: list[dict[str, Any]]) -> str:
    return next(str(e["text"]) for e in reversed(events) if (e["name"], e["device"]) == ("health", "cam1"))
