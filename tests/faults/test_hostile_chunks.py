"""A stranger on a broker that admits everybody sends wrong chunks wherever chunks are awaited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fedge.commands.broker import LocalBroker
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.broker import transport
from tests.support.federation import NAME, Federation

TOPICS = Topics(NAME)
LAST = 8
"""Blobs that wrong chunks are sent of: about those of one round."""
ROUNDS = 3


class Stranger:
    """Reads in orders and reports which blobs will be fetched, and sends wrong chunks of the last ones without end."""

    def __init__(self, link: Transport) -> None:
        self._link = link
        self._sizes: dict[str, int] = {}
        self.n_sent = 0

    async def listen(self) -> None:
        await self._link.subscribe(TOPICS.make_agent_topic("+", "orders"), self._heard)
        await self._link.subscribe(TOPICS.make_agent_topic("+", "reports"), self._heard)

    async def _heard(self, message: Inbound) -> None:
        device, leaf = TOPICS.split(message.topic)[1:]
        for digest, size_bytes in blobs(msgspec.msgpack.decode(message.payload)):
            chunks = TOPICS.make_model_topic(digest) if leaf == "orders" else TOPICS.make_update_topic(device, digest)
            if chunks not in self._sizes:
                await self._link.publish(chunks.replace("+", "0"), bytes(size_bytes), retain=True)
            self._sizes[chunks] = size_bytes

    async def flood(self) -> None:
        while True:
            for chunks, size_bytes in [*self._sizes.items()][-LAST:]:
                half = size_bytes // 2
                for offset, n in ((0, size_bytes), (1, 1), (0, half), (half, size_bytes - half), (size_bytes, 9)):
                    await self._link.publish(chunks.replace("+", str(offset)), bytes(n))
                    self.n_sent += 1
            await asyncio.sleep(0)


def blobs(message: object) -> Iterator[tuple[str, int]]:
    """Digest and size of all blobs that a message names."""
    if isinstance(message, dict) and {"digest", "size_bytes"} <= message.keys():
        yield message["digest"], message["size_bytes"]
    parts = message.values() if isinstance(message, dict) else message if isinstance(message, list) else ()
    for part in parts:
        yield from blobs(part)


async def test_wrong_chunks_stop_nobody(mosquitto: LocalBroker, tmp_path: Path) -> None:
    """Everybody does all rounds, as long as a blob is one chunk; larger ones a stranger can spoil."""
    link = transport(mosquitto, "stranger")
    stranger = Stranger(link)
    async with link, Federation(mosquitto, tmp_path, devices=("cam0", "cam1", "cam2")) as federation:
        await stranger.listen()
        flood = asyncio.create_task(stranger.flood())
        coordinator = await federation.coordinator(method="fedavg", rounds=ROUNDS)
        await federation.agents()
        assert await coordinator.ended() == 0, coordinator.log.read_text()[-2000:]
        flood.cancel()
    summary = json.loads((federation.home / "summary.json").read_bytes())
    assert summary["selection"] == dict.fromkeys(federation.devices, ROUNDS)
    assert summary["problems"] == {}
    assert stranger.n_sent > 100
