"""kill -9 of the broker in mid-transfer: transfers go on where they were, and the model is that of a quiet run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.tasks import load_task
from fedge.tensors.layout import Codec
from tests.support.broker import BROKERS, local_broker
from tests.support.federation import Federation, Running, same, settings
from tests.support.waiting import until

DEVICES = ("cam0", "cam1")
LARGE = msgspec.structs.replace(load_task("digits"), model_options={"hidden": 60_000})
"""A model of 18 MB: more than twice what a receiver asks for at a time, so one that stands still never completes it."""
FLAGS = {"method": "fedavg", "rounds": 1, "local_steps": 1, "codec": Codec.FLOAT32}


def in_the_middle(folder: Path) -> Callable[[], bool]:
    """Whether a folder of blobs holds one that has come in a part."""
    return lambda: any(record.stat().st_size > 0 for record in folder.glob("*.ranges"))


async def stop_in_the_middle(receiver: Running, blobs: Path) -> None:
    """Let a receiver stand still when it has received a part; what is under way to it dies with the broker."""
    await until(in_the_middle(blobs))
    receiver.send(signal.SIGSTOP)
    assert in_the_middle(blobs)(), "it had received everything"


@pytest.mark.parametrize("direction", ["down", pytest.param("up", marks=pytest.mark.smoke)])
@pytest.mark.parametrize("kind", BROKERS)
async def test_in_the_middle_of_a_transfer(kind: str, direction: str, tmp_path: Path) -> None:
    async with (
        local_broker(kind, tmp_path) as broker,
        Federation(broker, tmp_path, devices=DEVICES, task=LARGE) as federation,
    ):
        agents = await federation.agents()
        coordinator = await federation.coordinator(**FLAGS)
        receiver, blobs = {
            "down": (agents["cam0"], tmp_path / "cam0" / "models"),
            "up": (coordinator, federation.home / "blobs"),
        }[direction]
        await stop_in_the_middle(receiver, blobs)
        await broker.kill()
        receiver.send(signal.SIGCONT)
        await broker.start()
        assert await coordinator.ended() == 0
        assert federation.rows("SELECT DISTINCT status FROM orders") == [("accepted",)]
        expected = await federation.undisturbed("fedavg", settings(1, steps=1, codec=Codec.FLOAT32))
        assert same(federation.state(FedAvgState), expected)
