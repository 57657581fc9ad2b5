"""A process at the broker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.fleet.mqtt.process import Process
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.identity.names import Role
from tests.support.broker import settings
from tests.support.waiting import until


async def test_no_log_names_the_groups_secret_and_the_client_id_stays(
    one_broker: LocalBroker, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = (Process(settings(one_broker), store, "f", tmp_path, Role.COORDINATOR) for _ in range(2))
    async with first._transport:
        await until(lambda: "event=connected client=coordinator:f:" in caplog.text)
    assert second._transport.client_id == first._transport.client_id
    assert store.get_broker_secret() not in caplog.text
