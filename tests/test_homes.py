"""Homes that earlier versions left (tests/homes): gone on with, or refused by name; their bundles go on answering."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.state import decode_state
from coordinator.store.records import OrderStatus
from coordinator.store.store import Store
from edge_agent.agent.outbox import Outbox
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError, StoreError
from fedge.steps.contract import decode_action, load_installed_steps
from fedge.steps.training.train import Train
from fedge.system.files import find_highest_release
from fedge.wire.messages import BlobRef, iterate_blobs
from tests.deploy.serve_process import process
from tests.deploy.served import body
from tests.homes.make import DEVICES, prepare, started

HOMES = Path(__file__).parent / "homes"
OLD = "0.1.0"
GOES_ON = sorted(path.name for path in HOMES.glob("[0-9]*") if path.name != OLD)
X = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)


@pytest.fixture
def copied(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the homes of a version."""
    return Path(shutil.copytree(HOMES / request.param, tmp_path / "homes"))


def files(folder: Path) -> dict[str, bytes]:
    """All but the locks."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# -------------------------------------------------------------------------------------------------------- fedge 0.1


@pytest.mark.parametrize("copied", [OLD], indirect=True)
@pytest.mark.parametrize("name", ["finished", "mid_round"])
def test_a_coordinator_s_home_of_fedge_0_1_is_refused_with_what_to_do(copied: Path, name: str) -> None:
    home = copied / name / "coordinator"
    with pytest.raises(ConfigError, match=r"made by fedge 0\.1.*finish them with fedge 0\.1, or .* another --home"):
        Store(home)
    with contextlib.closing(sqlite3.connect(home / "store.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM orders").fetchone() == ({"finished": 4, "mid_round": 2}[name],)


@pytest.mark.parametrize("copied", [OLD], indirect=True)
@pytest.mark.parametrize("device", ["cam0", "cam1"])
def test_an_agent_s_home_of_fedge_0_1_with_work_in_it_is_refused_and_stays_as_it_is(copied: Path, device: str) -> None:
    """cam0 has a report that nobody acknowledged, cam1 an order that it has not done."""
    home = copied / "mid_round" / device
    before = files(home)
    for _ in "again", "and again":
        with pytest.raises(ConfigError, match=r"work of fedge 0\.1.*finish it with fedge 0\.1, or delete .*outbox"):
            Outbox(home / "outbox")
    assert files(home) == before
    shutil.rmtree(home / "outbox")
    Outbox(home / "outbox").close()


@pytest.mark.parametrize("copied", [OLD], indirect=True)
def test_an_agent_s_home_of_fedge_0_1_without_work_is_migrated_and_its_log_says_so(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = copied / "finished" / "cam0"
    (home / "labels.json").write_text("drawn once in a life")
    before = files(home)
    with caplog.at_level(logging.INFO, "fedge"), Outbox(home / "outbox") as outbox:
        assert [(verdict.order_id.split(".", 1)[1], verdict.accepted) for verdict in outbox.verdicts] == [
            ("1.train.cam0", True),
            ("2.install.cam0", True),
        ]
    assert "event=migrated" in caplog.text
    assert files(home) == before | {"outbox/version": b"2"}
    caplog.clear()
    with caplog.at_level(logging.INFO, "fedge"), Outbox(home / "outbox"):
        assert caplog.text == ""
    assert find_highest_release(home) == 1


def test_an_outbox_of_a_newer_fedge_is_refused(tmp_path: Path) -> None:
    Outbox(tmp_path).close()
    (tmp_path / "version").write_text("3")
    with pytest.raises(StoreError, match="version 3, this fedge knows 2: update fedge"):
        Outbox(tmp_path)


# ------------------------------------------------------------------------------------------------------ any version


@pytest.mark.parametrize("copied", [OLD, *GOES_ON], indirect=True)
async def test_the_bundle_in_a_home_goes_on_answering(copied: Path) -> None:
    home = copied / "finished" / "cam0"
    predicted = deploy.load(home / "bundles" / "1").predict(X)
    assert predicted.probabilities.shape == (3, 3)
    async with (
        process("--home", home) as (_, said, session),
        session.post(f"/v2/models/{said['models'][0]}/infer", data=body(X, datatype="FP32")) as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("copied", GOES_ON, indirect=True)
def test_a_home_holds_what_it_is_said_to_hold(copied: Path) -> None:
    with contextlib.closing(Store(copied / "mid_round" / "coordinator")) as store:
        entries = store.get_entries(1)
    assert [entry.status for entry in entries] == [OrderStatus.OPEN] * 2
    assert all(isinstance(decode_action(entry.order, load_installed_steps()), Train) for entry in entries)
    orders = {entry.order.device_id: entry.order for entry in entries}
    for device, n_reports in (("cam0", 1), ("cam1", 0)):
        with Outbox(copied / "mid_round" / device / "outbox") as outbox:
            assert [order.id for order in outbox.load_orders()] == [orders[device].id]
            assert len(outbox.load_reports()) == n_reports


@pytest.mark.parametrize("copied", GOES_ON, indirect=True)
@pytest.mark.parametrize("name", ["finished", "mid_round"])
def test_a_store_is_migrated_to_that_of_a_new_home_and_holds_what_it_held(
    copied: Path, name: str, tmp_path: Path
) -> None:
    home = copied / name / "coordinator"
    made = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
    with contextlib.closing(sqlite3.connect(home / "store.db")) as db:
        held = {name: db.execute(f"SELECT * FROM {name}").fetchall() for (name,) in db.execute(tables)}
    for _ in "again", "and again":
        with contextlib.closing(Store(home)) as store, contextlib.closing(Store(tmp_path / "new")) as new:
            assert store._read(made) == new._read(made)
            assert {table: store._read(f"SELECT * FROM {table}") for table in held} == held
            state = store.get_state()
            assert (state is None) == (name == "mid_round")
            known = (
                iterate_blobs(decode_state(state, FedAvgState))
                if state
                else [BlobRef(digest=i, size_bytes=1) for i in store.blobs]
            )
            store.require_tensors({ref.digest for ref in known})


@pytest.mark.process
@pytest.mark.parametrize("copied", GOES_ON, indirect=True)
async def test_a_round_goes_on_where_it_was_left_and_nothing_is_trained_again(
    copied: Path, mosquitto: LocalBroker
) -> None:
    folder = copied / "mid_round"
    (kept,) = (folder / "cam0" / "outbox" / "reports").iterdir()
    before = kept.read_bytes()
    prepare(folder)
    coordinator, *agents = await started(folder, mosquitto)
    try:
        async with asyncio.timeout(300):
            assert await coordinator.wait() == 0
    finally:
        for process in (coordinator, *agents):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    with contextlib.closing(sqlite3.connect(folder / "coordinator" / "store.db")) as db:
        rows = db.execute("SELECT device_id, status, report FROM orders WHERE round = 1 ORDER BY 1").fetchall()
    assert [row[:2] for row in rows] == [(device, "accepted") for device in DEVICES]
    stored = msgspec.msgpack.decode(rows[0][2])
    assert stored.pop("again", 0) == 0  # newer than these homes
    assert msgspec.msgpack.encode(stored) in before  # the report is the kept one, word for word
    for device in DEVICES:
        assert (folder / device / "bundles" / "1" / "manifest.json").exists()
