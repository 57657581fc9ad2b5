"""Old against new, over one broker and in one home: old versions are commits in the history of this repository.

Where there is no history (a clone of depth one, an archive) these tests are skipped; the homes in tests/homes that
these commits left are gone on with everywhere (tests/test_homes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tomllib
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fedge.commands.broker import LocalBroker
from tests.homes.make import DEVICES, prepare
from tests.support.waiting import until

NEW = Path(__file__).parents[2]
OLD = {"0.2.0-schema-3": "438a3f088d6c50faaba6995a3c4a4420803af1bf"}
"""Commits by version, named as their homes in tests/homes: each release adds its own (CONTRIBUTING.md)."""
WAIT_S = 300.0


@pytest.fixture(scope="module", params=OLD)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a commit, with its entry points, which come before those that are installed."""
    packed = subprocess.run(["git", "-C", NEW, "archive", OLD[request.param]], capture_output=True)
    if packed.returncode != 0:
        pytest.skip("there is no history here that goes back so far")
    tree = tmp_path_factory.mktemp("old")
    subprocess.run(["tar", "-x", "-C", tree], input=packed.stdout, check=True)
    version = request.param.split("-")[0]
    (found := tree / f"fedge-{version}.dist-info").mkdir()
    points = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for group, own in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in own.items()))]
    (found / "entry_points.txt").write_text("\n".join(lines))
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fedge\nVersion: {version}\n")
    return tree


class Side:
    """Starts a coordinator, or the agents, of one tree."""

    def __init__(self, folder: Path, broker: LocalBroker, stack: contextlib.AsyncExitStack, method: str) -> None:
        self.folder, self._broker, self._stack, self._method = folder, broker, stack, method

    async def coordinator(self, tree: Path) -> Process:
        words = ("--method", self._method, "--rounds", 3, "--devices", 2, "--seed", 1, "--local-steps", 1)
        once = ("--once",) if tree == NEW else ()  # an old one always ends after its last round
        return await self._start(tree, "coordinator", *words, *once, "--home", self.folder / "coordinator")

    async def agents(self, tree: Path) -> list[Process]:
        own = [("--id", i, "--home", self.folder / i, "--data", self.folder / f"{i}.npz") for i in DEVICES]
        return [await self._start(tree, "agent", *words) for words in own]

    async def _start(self, tree: Path, command: str, *words: object) -> Process:
        common = ("--broker", f"{self._broker.host}:{self._broker.port}", "--federation", "f")
        given = (*common, "--task", self.folder / "task.json", *words, "--json")
        with (self.folder / f"{command}.log").open("ab") as log, (self.folder / f"{command}.said").open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fedge.cli", command, *map(str, given)),
                stdout=said,
                stderr=log,
                cwd=tree,
            )
        self._stack.push_async_callback(kill, process)
        return process


async def kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@asynccontextmanager
async def federation(folder: Path, broker: LocalBroker, method: str) -> AsyncIterator[Side]:
    """With nothing started yet; at the end each device must have a bundle of what three rounds came to."""
    prepare(folder)
    async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as stack:
        yield Side(folder, broker, stack, method)
    summary = json.loads((folder / "coordinator" / "summary.json").read_bytes())
    assert (summary["done"], summary["refused"]) == (True, {})
    assert summary["selection"] == dict.fromkeys(DEVICES, 3)
    assert sorted(summary["installed"]) == sorted(DEVICES)
    assert all((folder / i / "bundles" / "1" / "manifest.json").exists() for i in DEVICES)


@pytest.mark.parametrize(
    ("method", "newer"), [("fedavg", "coordinator"), ("fedge", "coordinator"), ("fedge", "agents")]
)
async def test_old_agents_and_a_new_coordinator_and_the_reverse(
    mosquitto: LocalBroker, tmp_path: Path, old: Path, method: str, newer: str
) -> None:
    async with federation(tmp_path, mosquitto, method) as side:
        coordinator = await side.coordinator(NEW if newer == "coordinator" else old)
        await side.agents(old if newer == "coordinator" else NEW)
        assert await coordinator.wait() == 0, (tmp_path / "coordinator.log").read_text()


async def test_all_are_killed_in_a_run_and_go_on_as_the_new_version(
    mosquitto: LocalBroker, tmp_path: Path, old: Path
) -> None:
    async with federation(tmp_path, mosquitto, "fedge") as side:
        coordinator = await side.coordinator(old)
        agents = await side.agents(old)
        await until(lambda: '"round_done"' in (tmp_path / "coordinator.said").read_text())
        for process in (coordinator, *agents):
            await kill(process)
        await side.agents(NEW)
        assert await (await side.coordinator(NEW)).wait() == 0, (tmp_path / "coordinator.log").read_text()
