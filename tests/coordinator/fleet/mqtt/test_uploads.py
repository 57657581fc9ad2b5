from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.fleet.mqtt import uploads
from coordinator.fleet.mqtt.uploads import SPARE_FILES, Uploads
from coordinator.store.blobs import Blobs
from fedge.commands.broker import LocalBroker
from fedge.errors import ProtocolError
from fedge.wire.messages import BlobRef
from fedge.wire.topics import Topics
from tests.support.broker import transport
from tests.support.device import LAYOUT, RawDevice


async def test_an_unresponsive_device_gives_its_place_to_the_next_until_it_is_not_waited_for(
    one_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "GIVES_WAY_S", 1.0)
    link = transport(one_broker, "intake")
    blobs = Blobs(tmp_path / "blobs")
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SPARE_FILES + 2, allowed[1]))  # files for one fetch at a time
    try:
        fetching = Uploads(link, blobs, blobs, Topics("f"), LAYOUT, lambda _, payload: payload)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    async with link, RawDevice(one_broker, "speaks", tmp_path) as speaks, RawDevice(one_broker, "away", tmp_path):
        wanted = True
        never = BlobRef(digest="0" * 64, size_bytes=10)
        away = asyncio.create_task(fetching.fetch(never, "away", None, wanted=lambda: wanted))
        await asyncio.sleep(0)  # it has the place
        update = speaks.trained(0.5).update
        assert await fetching.fetch(update, "speaks", LAYOUT)
        assert set(fetching.norms) == {update}
        wanted = False
        assert not await away


async def test_a_device_that_names_bytes_of_another_has_to_say_how_many_there_are(
    one_broker: LocalBroker, tmp_path: Path
) -> None:
    """They are there already, and the reference would go on to other devices, which could never fetch it."""
    link = transport(one_broker, "intake")
    blobs = Blobs(tmp_path / "blobs")
    fetching = Uploads(link, blobs, blobs, Topics("f"), LAYOUT, lambda _, payload: payload)
    async with link, RawDevice(one_broker, "first", tmp_path) as first:
        update = first.trained(0.5).update
        assert await fetching.fetch(update, "first", LAYOUT)
        for size_bytes in (1, update.size_bytes - 1, 2**40):
            for layout in (LAYOUT, None):
                with pytest.raises(ProtocolError, match="wrong-size"):
                    await fetching.fetch(replace(update, size_bytes=size_bytes), "second", layout)
        assert await fetching.fetch(update, "second", LAYOUT)
