"""Helpers of a coordinator: a server of models, and what each process needs to begin."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import msgspec
import pytest

from coordinator.fleet.mqtt.roles import BlobServer, load_layout, lock_own_folder
from coordinator.store.store import OFFERED, Store
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from fedge.wire.messages import BlobRef
from tests.coordinator.fleet.mqtt.test_intake import MODEL, running
from tests.support.broker import settings
from tests.support.device import LAYOUT, TASK, RawDevice


async def test_a_server_of_models_has_what_open_orders_name_and_nothing_else(
    one_broker: LocalBroker, store: Store, device: RawDevice, tmp_path: Path
) -> None:
    offered, other = (
        BlobRef(digest=store.blobs.put(data), size_bytes=len(data)) for data in (MODEL, b"an update of somebody")
    )
    store.put_value(OFFERED, json.dumps([offered.digest]))
    with contextlib.closing(Store(tmp_path, intake=True)) as opened:
        async with running(BlobServer(settings(one_broker), opened, tmp_path / "own", federation="f")):
            secret = asyncio.create_task(device.fetch(other))
            assert await device.fetch(offered) == MODEL
            assert not secret.done()
            secret.cancel()


def test_each_process_has_a_folder_of_its_own_and_the_next_one_takes_it_over(tmp_path: Path) -> None:
    with lock_own_folder(tmp_path) as one:
        with lock_own_folder(tmp_path) as other:
            assert one != other
        with lock_own_folder(tmp_path) as again:
            assert again == other


def test_a_home_without_a_federation_or_with_another_task_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start `fedge coordinator` without --role first"):
        load_layout(store, tmp_path, TASK, None)
    store.put_value_once("start", msgspec.json.encode((LAYOUT, "model")).decode())
    store.put_value_once("identity", json.dumps(["f", "fedavg", "another", 0, 1, {}]))
    with pytest.raises(ConfigError, match="another task"):
        load_layout(store, tmp_path, TASK, None)


def test_who_names_another_place_of_the_tensors_than_the_dispatcher_is_refused(store: Store, tmp_path: Path) -> None:
    store.put_value_once("start", msgspec.json.encode((LAYOUT, "model")).decode())
    store.put_value_once("identity", json.dumps(["f", "fedavg", TASK.compute_fingerprint(), 0, 1, {}]))
    assert load_layout(store, tmp_path, TASK, None) == LAYOUT
    with pytest.raises(ConfigError, match="in its home: leave --blobs out"):
        load_layout(store, tmp_path, TASK, "s3://tensors/shop")
    store.put_value_once("blobs", "s3://tensors/shop")
    with pytest.raises(ConfigError, match="give --blobs s3://tensors/shop"):
        load_layout(store, tmp_path, TASK, None)
