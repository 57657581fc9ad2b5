"""Introductions over a real broker with `fedge serve` as processes: a bad bundle stops at the canaries, a good one goes
through although its supervisor is killed, and there is a way back."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from coordinator.rollout.cli import rollout
from coordinator.rollout.folder import Folder, Record
from deploy.updates.slots import read_state
from export.signing import Repository
from fedge.commands.broker import LocalBroker
from fedge.wire.messages import Phase, RolloutState
from tests.deploy.bundles import other_gate, poor_gate
from tests.deploy.serve_process import ask, process
from tests.support.broker import local_broker
from tests.support.introducing import leave_bundle
from tests.support.rollouts import release_of
from tests.support.runtime_device import FEDERATION, prepare
from tests.support.waiting import until

DEVICES = [f"cam{i}" for i in range(4)]
"""Half of them are canaries."""
WAIT_S = 280.0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


@pytest.fixture
def homes(tmp_path: Path, repo: Path, old: Path) -> dict[str, Path]:
    root = Repository(repo).read_root()
    return {name: prepare(tmp_path / name, old, root) for name in DEVICES}


@asynccontextmanager
async def served(broker: LocalBroker, homes: dict[str, Path]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    """A client session for each device, whose `fedge serve` runs within."""
    async with AsyncExitStack() as stack:
        sessions = {}
        for name, home in homes.items():
            words = (
                "--home",
                home,
                "--broker",
                f"{broker.host}:{broker.port}",
                "--federation",
                FEDERATION,
                "--id",
                name,
            )
            _, _, sessions[name] = await stack.enter_async_context(process(*words))
        yield sessions


@asynccontextmanager
async def introduced(broker: LocalBroker, home: Path) -> AsyncIterator[Process]:
    """The process that introduces campaign 1; killed on the way out."""
    words = ("-m", "tests.support.introducing", broker.host, broker.port, home, 1, *DEVICES)
    child = await asyncio.create_subprocess_exec(sys.executable, *map(str, words))
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def read(home: Path) -> Record:
    record = Folder(home).read()
    assert record is not None
    return record


def stands(home: Path, state: RolloutState) -> bool:
    record = Folder(home).read()
    return record is not None and record.progress.state is state


async def test_a_bad_bundle_stops_at_the_canaries_which_keep_their_own(broker, homes, tmp_path) -> None:
    bad = {name: leave_bundle(home, 1, poor_gate) for name, home in homes.items()}
    home = tmp_path / "server"
    async with served(broker, homes), introduced(broker, home):
        await until(lambda: stands(home, RolloutState.ABORTED), within_s=WAIT_S)

    record = read(home)
    assert record.progress.stage == 0
    assert all("kept its own: accuracy: the running bundle is more accurate" in r for r in record.progress.reasons)
    assert not any(line.before or line.now for line in record.devices.values()), "figures of personal bundles stay"
    assert {release_of(each) for each in homes.values()} == {1}
    tried = [name for name, each in homes.items() if bad[name] in read_state(each).refused]
    assert len(tried) == 2
    kept = [name for name, line in record.devices.items() if line.phase is Phase.KEPT]
    assert kept == tried


async def test_a_good_bundle_goes_through_though_its_supervisor_is_killed_and_can_be_taken_back(
    broker, homes, tmp_path
) -> None:
    home = tmp_path / "server"

    def run_new() -> int:
        return sum(release_of(each) == 2 for each in homes.values())

    async def keep_asking(sessions: dict[str, aiohttp.ClientSession]) -> None:
        """A bundle on trial has proved itself after twenty predictions."""
        while True:
            for session in sessions.values():
                assert (await ask(session, "digits"))[0] == 200
            await asyncio.sleep(0.05)

    async with served(broker, homes) as sessions:
        for each in homes.values():
            leave_bundle(each, 1, other_gate)
        asking = asyncio.create_task(keep_asking(sessions))
        async with introduced(broker, home):
            await until(run_new, within_s=WAIT_S)
            assert release_of(homes[max(homes)]) in {1, 2}
        first = read(home).plan
        async with introduced(broker, home):
            await until(lambda: stands(home, RolloutState.DONE), within_s=WAIT_S)
            assert run_new() == len(homes)
            assert read(home).plan == first, "the same introduction went on"
            assert [event.text.split(":")[0] for event in read(home).events if not event.device] == [
                "running", "running", "done",
            ]  # fmt: skip

            assert CliRunner().invoke(rollout, ["abort", str(home)]).exit_code == 0
            await until(lambda: run_new() == 0, within_s=WAIT_S)
            await until(
                lambda: all(line.phase is Phase.ROLLED_BACK for line in read(home).devices.values()), within_s=WAIT_S
            )
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert all("aborted: introduction" in line.reason for line in read(home).devices.values())
