"""Transfers: the core under any order, loss and duplication; the shells over real brokers."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

from fedge.files import BlobFolder
from fedge.messages import BlobRef, Want, decode
from fedge.tensors import digest_of
from fedge.topics import Topics
from fedge.transfer import Receiver, Sender
from tests.support.broker import transport

TOPICS = Topics("test")


async def test_smoke(broker, tmp_path):
    data = os.urandom(3_000_000)
    digest = digest_of(data)
    up = BlobFolder(tmp_path / "up")
    up.put(data)
    a = transport(broker, "coordinator")
    b = transport(broker, "agent")
    receiver = Receiver(b, BlobFolder(tmp_path / "down"))
    async with a, b, Sender(a, up.path) as sender:

        async def on_want(m):
            want = decode(m.payload, Want)
            sender.want(want.digest, want.ranges, chunks=TOPICS.model_chunk(want.digest))

        await a.subscribe(TOPICS.agent("+", "wants"), on_want)
        path = await receiver.fetch(
            BlobRef(digest=digest, size_bytes=len(data)),
            chunks=TOPICS.model_chunk(digest),
            wants=TOPICS.agent("a1", "wants"),
            device_id="a1",
        )
        assert path.read_bytes() == data
