"""`fedge serve` on a device as a process, over a real broker: killed at any time, and at work for long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from coordinator.rollout.folder import Folder
from deploy.slots import MAX_STARTS, state_of
from export.signing import Repository
from fedge.broker import LocalBroker
from fedge.bundle import read
from fedge.messages import Phase, RolloutState
from tests.deploy.bundles import digest, other_gate, variant
from tests.deploy.serve_process import ask, process
from tests.support.broker import local_broker
from tests.support.rollouts import plan_of, release_of, rolled_out, until
from tests.support.runtime_device import FEDERATION, prepare

DEVICE = "cam0"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    Repository.create(tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return variant(tmp_path / "old", release=1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return variant(tmp_path / "new", release=2, gate=other_gate)


@pytest.fixture
def home(tmp_path: Path, repo: Path, old: Path) -> Path:
    return prepare(tmp_path / "home", old, Repository(repo).root())


def words(home: Path, broker: LocalBroker) -> tuple[object, ...]:
    return ("--home", home, "--broker", f"{broker.host}:{broker.port}", "--federation", FEDERATION, "--id", DEVICE)


# ------------------------------------------------------------------------------------------------------- kill -9


def examination_of(child: Process) -> psutil.Process | None:
    """The process in which a bundle is being examined, stopped where it is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for found in psutil.Process(child.pid).children():
            if "deploy.examination" in found.cmdline():
                found.suspend()
                return found
    return None


def whole(home: Path) -> dict[str, str]:
    """Digest of the bundle in each slot; every byte is checked."""
    return {path.name: read(path).digest for path in (home / "slots").glob("?")}


async def test_killed_during_the_examination_it_examines_again(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    async with process(*words(home, broker)) as (child, _, _session):
        found: list[psutil.Process] = []
        await until(lambda: found.extend(filter(None, [examination_of(child)])) or found)
        child.kill()
        await child.wait()
    state = state_of(home)
    assert (state.running, state.good, state.trial, state.refused) == ("a", "a", None, {})
    assert state.highest_release == 1
    assert whole(home) == {"a": digest(old), "b": digest(new)}, "staged, and named by nothing"
    assert not (home / "outcome.json").exists()
    assert not list((home / "received").iterdir())
    found[0].resume()
    await asyncio.to_thread(psutil.wait_procs, found, 60)
    assert not found[0].is_running(), "the child ends by itself"
    assert release_of(home) == 1

    async with process(*words(home, broker)) as (child, _, session):
        status, answer = await ask(session, "digits")
        assert status == 200
        assert answer["parameters"]["release"] in {1, 2}
        await until(lambda: state_of(home).trial is not None)
        await proved(session, home)
        assert (await supervising).state is RolloutState.DONE
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 2
    assert (state_of(home).good, state_of(home).running) == ("b", "b")


async def proved(session, home: Path) -> None:
    """Ask until the bundle on trial is the good one."""
    async with asyncio.timeout(60):
        while state_of(home).trial is not None:
            assert (await ask(session, "digits"))[0] == 200
            await asyncio.sleep(0.05)


async def test_killed_on_trial_it_goes_on_with_the_trial(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    async with process(*words(home, broker)) as (child, _, _session):
        await until(lambda: (trial := state_of(home).trial) is not None and trial.starts == 1)
        child.kill()
        await child.wait()
    state = state_of(home)
    assert (state.running, state.good, state.highest_release, state.refused) == ("b", "a", 2, {})
    assert whole(home) == {"a": digest(old), "b": digest(new)}
    assert json.loads((home / "outcome.json").read_bytes())["digest"] == digest(new)
    assert not supervising.done(), "a device that fell silent on trial proves nothing"

    async with process(*words(home, broker)) as (child, _, session):
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 2
        trial = state_of(home).trial
        assert trial is not None
        assert trial.starts == 2
        await proved(session, home)
        assert (await supervising).state is RolloutState.DONE
    assert (state_of(home).good, state_of(home).running, state_of(home).refused) == ("b", "b", {})


async def test_killed_again_and_again_on_trial_it_goes_back_and_stops_the_rollout(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    for starts in range(1, MAX_STARTS + 1):
        async with process(*words(home, broker)) as (child, _, _session):
            await until(lambda n=starts: (trial := state_of(home).trial) is not None and trial.starts == n)
            child.kill()
            await child.wait()
        assert release_of(home) == 2

    async with process(*words(home, broker)) as (child, _, session):
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 1
        ended = await supervising
    assert ended.state is RolloutState.ABORTED
    assert ended.reasons == (f"{DEVICE} rolled_back: {MAX_STARTS} processes that ran it died",)
    assert Folder(repo).read().devices[DEVICE].phase is Phase.ROLLED_BACK
    state = state_of(home)
    assert (state.running, state.good, state.trial) == ("a", "a", None)
    assert state.refused == {digest(new): f"{MAX_STARTS} processes that ran it died"}
    assert whole(home) == {"a": digest(old), "b": digest(new)}
