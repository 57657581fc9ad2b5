"""Invented names on an open broker: limits act at once, and the devices that are there go on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from coordinator.fleet.mqtt.presence import MAX_STRANGERS
from fedge.commands.broker import LocalBroker
from fedge.system.logs import LINES_PER_MINUTE
from fedge.wire.messages import Presence, Status, encode_message
from fedge.wire.topics import Topics
from tests.support.broker import say
from tests.support.federation import NAME, Federation

N = 13_000


@pytest.mark.parametrize("fingerprint", ["of another task", None], ids=["another task", "asleep"])
async def test_invented_names_stop_nobody(mosquitto: LocalBroker, tmp_path: Path, fingerprint: str | None) -> None:
    async with Federation(mosquitto, tmp_path, devices=("cam0", "cam1")) as federation:
        coordinator = await federation.coordinator(method="fedavg", rounds=3, devices=2)
        await coordinator.logged("event=connected")
        topics = Topics(NAME)
        status = Status(device_id="x", incarnation="1", presence=Presence.ONLINE, task_fingerprint=fingerprint or "")
        if fingerprint is None:
            status = msgspec.structs.replace(status, presence=Presence.SLEEPING)
        said = {f"fake{i}": encode_message(msgspec.structs.replace(status, device_id=f"fake{i}")) for i in range(N)}
        await say(
            mosquitto, *({"topic": topics.make_agent_topic(name, "status"), "payload": said[name]} for name in said)
        )
        await federation.agents()
        assert await coordinator.ended() == 0, coordinator.log.read_text()[-2000:]
    summary = json.loads((federation.home / "summary.json").read_bytes())
    assert summary["installed"].keys() == {"cam0", "cam1"}
    assert summary["selection"] == {"cam0": 3, "cam1": 3}
    assert len(summary["problems"]) <= MAX_STRANGERS
    lines = coordinator.log.read_text().splitlines()
    assert len([line for line in lines if "event=refused" in line]) <= 5 * LINES_PER_MINUTE
