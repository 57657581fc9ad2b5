"""A class joins: real processes around a real broker, one device asleep, and a coordinator killed on the way."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.watch.state import read_summary
from deploy.inference.runtime import load
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.system.files import find_highest_release
from fedge.tasks import load_pool, load_task
from tests.support.federation import Federation, Running
from tests.support.waiting import until

DEVICES = ("cam1", "cam2", "cam3")
KNOWN = 8
"""Digits that the federation knows at first."""
DIGITS = load_task("digits")
TASK = msgspec.structs.replace(DIGITS, name="some-digits", classes=DIGITS.classes[:KNOWN])
FLAGS: dict[str, Any] = {"rounds": 8, "campaign_rounds": 12, "once": False, "codec": "float32", "deadline_s": 60}


def write_samples(federation: Federation, n_classes: int) -> None:
    """Give each device its digits of the first classes, all others than those of the test."""
    pool = load_pool("digits", seed=1)
    for i, device in enumerate(federation.devices):
        own = np.arange(i, 1400, len(federation.devices))
        own = own[pool.y[own] < n_classes]
        np.savez(federation.data(device), x=pool.x[own], y=pool.y[own])


def measure(home: Path, n_classes: int) -> dict[int, float]:
    """The accuracy of a device's newest bundle on each class, of digits that no device has."""
    pool = load_pool("digits", seed=1)
    runtime = load(home / "bundles" / str(find_highest_release(home)))
    assert runtime.task.classes == DIGITS.classes[:n_classes]
    x, y = pool.x[1400:], pool.y[1400:]
    right = runtime.predict(x).class_index == y
    return {c: float(right[y == c].mean()) for c in range(n_classes)}


async def rests(federation: Federation, campaign: int) -> None:
    """Wait until a campaign has ended."""

    def has_ended() -> bool:
        if not (federation.home / "summary.json").exists():
            return False
        found = read_summary(federation.home).get("campaign") or {"number": 0, "state": ""}
        return (found["number"], found["state"]) == (campaign, "resting")

    await until(has_ended)


@pytest.mark.parametrize(("method", "is_killed"), [("fedavg", False), ("fedge", True)])
async def test_a_class_joins(mosquitto: LocalBroker, tmp_path: Path, method: str, is_killed: bool) -> None:
    async with Federation(mosquitto, tmp_path, devices=DEVICES, task=TASK) as federation:
        write_samples(federation, KNOWN)
        agents = await federation.agents()
        coordinator = await federation.coordinator(method=method, **FLAGS)
        await rests(federation, 1)
        before = measure(tmp_path / "cam1", KNOWN)

        write_samples(federation, KNOWN + 1)
        await agents["cam1"].logged("event=unknown_classes")
        agents["cam3"].send(signal.SIGTERM)  # it sleeps while the class joins
        await agents["cam3"].ended()
        asked = await Running.start(
            tmp_path / "ask.log", "campaign", "run", "--home", federation.home, "--add-class", DIGITS.classes[KNOWN]
        )
        assert await asked.ended() == 0
        await coordinator.said("campaign_begun", number=2)
        if is_killed:
            await coordinator.kill()
            coordinator = await federation.coordinator(method=method, log="again", **FLAGS)
        await rests(federation, 2)
        await agents["cam1"].said("classes_joined", classes=DIGITS.classes[KNOWN])
        after = measure(tmp_path / "cam1", KNOWN + 1)
        assert after[KNOWN] > 0.7
        assert np.mean([after[c] - before[c] for c in range(KNOWN)]) > -0.05
        assert "task-mismatch" not in coordinator.refused()

        await federation.agent("cam3")
        asked = await Running.start(tmp_path / "ask.log", "campaign", "run", "--home", federation.home)
        assert await asked.ended() == 0
        await rests(federation, 3)
        assert measure(tmp_path / "cam3", KNOWN + 1)[KNOWN] > 0.7


async def test_another_network_is_told_in_words_everywhere(mosquitto: LocalBroker, tmp_path: Path) -> None:
    async with Federation(mosquitto, tmp_path, devices=("cam1",), task=DIGITS) as federation:
        other: TaskSpec = msgspec.structs.replace(DIGITS, model="cnn", model_options={})
        file = tmp_path / "other.json"
        file.write_bytes(msgspec.json.encode(other))
        coordinator = await federation.coordinator(rounds=1, devices=1)
        agent = await federation.agent("cam1", task=file)
        words = "the network cnn in place of mlp"
        await agent.logged(words)
        await coordinator.logged(words)
        await until(
            lambda: (
                any(words in item["text"] for item in read_summary(federation.home)["attention"])
                if (federation.home / "summary.json").exists()
                else False
            )
        )
