"""Models travel as differences: after the first one no whole model crosses the coordinator's broker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fedge.commands.broker import LocalBroker
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from tests.support.broker import transport
from tests.support.federation import NAME
from tests.support.sites import Sites

ROUNDS = 4


@pytest.mark.parametrize(
    ("sites", "direct"),
    [({}, ("cam0", "cam1")), ({"north": ("a0", "a1")}, ("cam0",))],
    ids=["devices", "a relay and a device"],
)
async def test_only_the_first_model_travels_whole(
    mosquitto: LocalBroker, tmp_path: Path, sites: dict[str, tuple[str, ...]], direct: tuple[str, ...]
) -> None:
    chunks: dict[tuple[str, str], int] = {}  # bytes, by digest and offset

    async def note(inbound: Inbound) -> None:
        *_, digest, offset = inbound.topic.split("/")
        chunks[digest, offset] = len(inbound.payload)

    listener = transport(mosquitto, "listener")
    await listener.subscribe(Topics(NAME).make_model_topic("+"), note)
    async with listener, Sites(mosquitto, tmp_path, sites, direct) as federation:
        await federation.relays()
        await federation.agents()
        coordinator = await federation.coordinator(method="fedavg", rounds=ROUNDS)
        assert await coordinator.ended() == 0
    sizes = Counter[str]()
    for (digest, _), n_bytes in chunks.items():
        sizes[digest] += n_bytes
    whole = max(sizes.values())
    assert sum(size > whole / 2 for size in sizes.values()) == 1
    assert sum(whole / 8 < size < whole / 2 for size in sizes.values()) >= ROUNDS - 1
