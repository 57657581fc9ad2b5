"""What is left of a coordinator: copies of its home, made while it runs, and a backup that goes on elsewhere."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.commands.broker import LocalBroker
from tests.faults.test_kill_coordinator import DEVICES, counted_once
from tests.support.federation import Federation, Running, same, settings

ROUNDS = 5
FLAGS = {"method": "fedavg", "rounds": ROUNDS}


async def ran(log: Path, *arguments: object) -> int:
    """The exit code of a `fedge` command."""
    return await (await Running.start(log, *arguments)).ended()


@pytest.mark.parametrize("store_url", ["sqlite", "postgresql"], indirect=True)
async def test_a_backup_goes_on_elsewhere_with_the_round_that_was_under_way(
    mosquitto: LocalBroker, tmp_path: Path, store_url: str | None
) -> None:
    """Two of three have answered when it is made; then the old coordinator goes on for two rounds, and is lost.

    Tables that were on a server are in a file of the new home.
    """
    async with Federation(mosquitto, tmp_path, devices=DEVICES, store_url=store_url) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**FLAGS)
        await coordinator.said("round_done", round=1)
        number = await federation.stands_still("cam2", agents["cam2"])
        log, folder, home = tmp_path / "log", tmp_path / "backups" / "monday", tmp_path / "elsewhere"
        tables = [] if store_url is None else ["--store", store_url]
        assert await ran(log, "backup", folder, "--home", federation.home, *tables) == 0, log.read_text()
        before = federation.accepted()
        agents["cam2"].send(signal.SIGCONT)
        await coordinator.said("round_done", round=min(number + 2, ROUNDS))
        await coordinator.kill()

        assert await ran(log, "restore", folder, "--home", home) == 0, log.read_text()
        federation.home, federation.store_url = home, None
        assert federation.accepted() == before
        assert await (await federation.coordinator(**FLAGS)).ended() == 0
        assert before.items() <= federation.accepted().items()
        assert counted_once(federation)
        assert same(federation.state(FedAvgState), await federation.undisturbed("fedavg", settings(ROUNDS)))


async def test_a_copy_of_the_tables_alone_is_refused_but_after_a_clean_stop(
    mosquitto: LocalBroker, tmp_path: Path
) -> None:
    """Of a coordinator that runs, and of one that was killed; its own home goes on, and all of it can be copied."""

    async def began(name: str, *parts: str) -> int:
        """How a coordinator ends on a copy of these parts of the home."""
        (copy := tmp_path / name).mkdir()
        for part in parts:
            copied = shutil.copytree if (federation.home / part).is_dir() else shutil.copyfile
            copied(federation.home / part, copy / part)
        return await (await federation.coordinator(log=name, **{**FLAGS, "home": copy})).ended()

    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**FLAGS)
        await coordinator.said("round_done", round=1)
        number = await federation.stands_still("cam2", agents["cam2"])
        assert await began("running", "store.db", "blobs") == 2
        await coordinator.kill()
        assert await began("killed", "store.db", "blobs") == 2
        assert "lacks what was in store.db-wal" in (tmp_path / "killed.log").read_text()
        coordinator = await federation.coordinator(**FLAGS)
        await coordinator.said("round_begun", round=number)
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130
        assert await began("stopped", "store.db") == 4
        assert "of the tensors that the store names" in (tmp_path / "stopped.log").read_text()
        agents["cam2"].send(signal.SIGCONT)
        assert await began("whole", "store.db", "blobs") == 0
        federation.home = tmp_path / "whole"
        assert counted_once(federation)
        assert same(federation.state(FedAvgState), await federation.undisturbed("fedavg", settings(ROUNDS)))
