"""Make the homes of this version: python -m tests.homes.make. Those of earlier versions stay as they were left.

0.2.0-schema-3 is of commit 438a3f0, between the beginning of 0.2.0 and its end.

    tests/homes/VERSION/finished/{coordinator,cam0}        a federation that has ended
    tests/homes/VERSION/mid_round/{coordinator,cam0,cam1}  killed in a round; the coordinator has not heard that cam0 is
                                                           done, cam1 has not begun

Real processes make them, from a network of some 80 weights and eight samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sqlite3
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import numpy as np

import fedge
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.tasks import write_task
from tests.support.broker import local_broker

HOMES = Path(__file__).parent
DEVICES = ("cam0", "cam1")
KEPT = {"finished": ("coordinator", "cam0"), "mid_round": ("coordinator", "cam0", "cam1")}
TASK = TaskSpec(name="tiny", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 8})


async def start(*words: object) -> Process:
    """A `fedge` command that tells its events."""
    command = (sys.executable, "-m", "fedge", *map(str, words), "--json")
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE)


async def said(process: Process, event: str) -> None:
    """Wait until it says so."""
    assert process.stdout is not None
    async for line in process.stdout:
        if json.loads(line)["event"] == event:
            return
    raise RuntimeError(f"it ended without {event}")


def prepare(folder: Path) -> None:
    """Task and samples of a federation whose homes are, or will be, in this folder."""
    folder.mkdir(exist_ok=True)
    write_task(TASK, folder / "task.json")
    for number, device in enumerate(DEVICES):
        rng, y = np.random.default_rng(number), np.arange(8) % 3
        np.savez(folder / f"{device}.npz", x=(rng.normal(size=(8, 6)) + np.eye(6)[y]).astype(np.float32), y=y)


async def started(folder: Path, broker: LocalBroker) -> list[Process]:
    """The coordinator and the agents of a federation that was prepared."""
    common = ("--broker", f"{broker.host}:{broker.port}", "--federation", folder.name, "--task", folder / "task.json")
    settings = ("--method", "fedavg", "--rounds", 1, "--devices", 2, "--seed", 1, "--local-steps", 1, "--once")
    processes = [await start("coordinator", *common, *settings, "--home", folder / "coordinator")]
    for device in DEVICES:
        own = ("--id", device, "--home", folder / device, "--data", folder / f"{device}.npz")
        processes.append(await start("agent", *common, *own))
    return processes


async def federation(folder: Path, broker: LocalBroker) -> None:
    """`finished`: to its end. `mid_round`: all are killed in the first round, the coordinator before it hears."""
    coordinator, *agents = await started(folder, broker)
    if folder.name == "finished":
        await coordinator.wait()
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
    else:
        await said(agents[1], "order_received")
        agents[1].kill()
        await said(agents[0], "order_started")
        models = folder / "cam0" / "models"
        whole = "?" * 64  # a digest; then it imports torch
        while not list(models.glob(whole)):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        coordinator.kill()
        await said(agents[0], "order_done")
        agents[0].kill()
    for process in (coordinator, *agents):
        await process.wait()


def keep(home: Path, place: Path) -> None:
    """Copy what counts: no logs of the database, no locks."""
    for database in home.glob("*.db"):
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as db:
            for command in (
                "PRAGMA journal_mode = DELETE",
                "PRAGMA application_id = 0",
                "PRAGMA page_size = 512",
                "VACUUM",
            ):
                db.execute(command)
    shutil.copytree(home, place, ignore=shutil.ignore_patterns("lock", ".tmp-*"))


async def main() -> None:
    """Replace the homes of this version."""
    place = HOMES / fedge.__version__
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker("auto", Path(folder)) as broker:
            for name, homes in KEPT.items():
                prepare(Path(folder, name))
                await federation(Path(folder, name), broker)
                for home in homes:
                    keep(Path(folder, name, home), place / name / home)


if __name__ == "__main__":
    asyncio.run(main())
