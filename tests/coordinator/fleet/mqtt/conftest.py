"""A store and a device for the tests of processes at the broker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from tests.support.device import RawDevice


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of the dispatcher, which is in round 1."""
    with contextlib.closing(Store(tmp_path)) as opened:
        opened.start_round(1, (), 0.0)
        yield opened


@pytest.fixture
async def device(one_broker: LocalBroker, tmp_path: Path) -> AsyncIterator[RawDevice]:
    async with RawDevice(one_broker, "cam1", tmp_path / "devices") as found:
        yield found
