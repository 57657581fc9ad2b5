"""Two sites with a relay each: the run is that of the flat federation, and a model comes to each site once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fedge.commands.broker import LocalBroker
from fedge.tensors.layout import Codec
from tests.support.federation import settings
from tests.support.sites import Sites

SITES = {"north": ("a0", "a1"), "south": ("b0",)}
FLAGS = {"rounds": 3, "codec": "float32"}


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn"])
async def test_whoever_is_killed_the_model_is_that_of_the_flat_federation(
    name: str, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    """One device stands still; its relay is killed with a part of the answers, then the coordinator, and in the next
    round a device. With SCAFFOLD and FedDyn each side has something that the other must have, too."""
    flags = FLAGS | {"method": name}
    async with Sites(mosquitto, tmp_path, SITES) as federation:
        relays = await federation.relays()
        agents = await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("round_done", round=1)
        number = await federation.stands_still("a1", agents["a1"])
        assert federation.answered("north", number) == {"a0"}
        await relays["north"].kill()
        relays["north"] = await federation.relay("north")
        await relays["north"].said("order_started", round=number)
        await coordinator.kill()
        coordinator = await federation.coordinator(**flags)
        agents["a1"].send(signal.SIGCONT)
        await coordinator.said("round_begun", round=number + 1)
        await agents["b0"].kill()
        await federation.agent("b0")
        assert await coordinator.ended() == 0

        state = await federation.require_flat(name, settings(3, codec=Codec.FLOAT32))
        assert state.installed.keys() == federation.names()
        assert dict.fromkeys(federation.names(), 3) == state.participations
