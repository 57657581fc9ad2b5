"""`fedge serve` on a device as a process, over a real broker: killed at any time, and at work for long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from click.testing import CliRunner

from coordinator.rollout.folder import Folder
from deploy.commands.install import install
from deploy.updates.slots import MAX_STARTS, read_state
from export.signing import Repository
from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import LocalBroker
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import Phase, RolloutState
from fedge.wire.topics import Topics
from tests.deploy.bundles import digest, other_gate, variant
from tests.deploy.serve_process import X, ask, process
from tests.deploy.served import body, golden, outputs
from tests.support.broker import local_broker, transport
from tests.support.rollouts import plan_of, release_of, rolled_out
from tests.support.runtime_device import FEDERATION, prepare
from tests.support.waiting import until

DEVICE = "cam0"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path, repo: Path, old: Path) -> Path:
    return prepare(tmp_path / "home", old, Repository(repo).read_root())


def words(home: Path, broker: LocalBroker) -> tuple[object, ...]:
    return ("--home", home, "--broker", f"{broker.host}:{broker.port}", "--federation", FEDERATION, "--id", DEVICE)


# ------------------------------------------------------------------------------------------------------- kill -9


def examination_of(child: Process) -> psutil.Process | None:
    """The process in which a bundle is being examined, stopped where it is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for found in psutil.Process(child.pid).children():
            if "deploy.updates.examination:examine_in_process" in found.cmdline():
                found.suspend()
                return found
    return None


def whole(home: Path) -> dict[str, str]:
    """Digest of the bundle in each slot; every byte is checked."""
    return {path.name.removeprefix("slot-"): read_bundle(path).digest for path in home.glob("slot-?")}


async def test_killed_during_the_examination_it_examines_again(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    async with process(*words(home, broker)) as (child, _, _session):
        found: list[psutil.Process] = []
        await until(lambda: found.extend(filter(None, [examination_of(child)])) or found)
        child.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            found[0].resume()  # it holds the pipe of standard error
        await child.wait()
    state = read_state(home)
    assert (state.running, state.good, state.trial, state.refused) == ("a", "a", None, {})
    assert state.highest_release == 1
    assert whole(home) == {"a": digest(old), "b": digest(new)}, "staged, and named by nothing"
    assert json.loads((home / "outcome.json").read_bytes())["digest"] == ""
    assert not list((home / "received").iterdir())
    await asyncio.to_thread(psutil.wait_procs, found, 60)
    assert not found[0].is_running(), "the child ends by itself"
    assert release_of(home) == 1

    async with process(*words(home, broker)) as (child, _, session):
        status, answer = await ask(session, "digits")
        assert status == 200
        assert answer["parameters"]["release"] in {1, 2}
        await until(lambda: read_state(home).trial is not None)
        await proved(session, home)
        assert (await supervising).state is RolloutState.DONE
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 2
    assert (read_state(home).good, read_state(home).running) == ("b", "b")


async def proved(session, home: Path) -> None:
    """Ask until the bundle on trial is the good one."""
    async with asyncio.timeout(300):
        while read_state(home).trial is not None:
            assert (await ask(session, "digits"))[0] == 200
            await asyncio.sleep(0.05)


async def test_killed_on_trial_it_goes_on_with_the_trial(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    async with process(*words(home, broker)) as (child, _, _session):
        await until(lambda: (trial := read_state(home).trial) is not None and trial.starts == 1)
        child.kill()
        await child.wait()
    state = read_state(home)
    assert (state.running, state.good, state.highest_release, state.refused) == ("b", "a", 2, {})
    assert whole(home) == {"a": digest(old), "b": digest(new)}
    assert json.loads((home / "outcome.json").read_bytes())["digest"] == digest(new)
    assert not supervising.done(), "a device that disappears on trial proves nothing"

    async with process(*words(home, broker)) as (child, _, session):
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 2
        trial = read_state(home).trial
        assert trial is not None
        assert trial.starts == 2
        await proved(session, home)
        assert (await supervising).state is RolloutState.DONE
    assert (read_state(home).good, read_state(home).running, read_state(home).refused) == ("b", "b", {})


async def test_killed_again_and_again_on_trial_it_goes_back_and_stops_the_rollout(broker, repo, home, old, new) -> None:
    release, plan = plan_of(repo, new)
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    for starts in range(1, MAX_STARTS + 1):
        async with process(*words(home, broker)) as (child, _, _session):
            await until(lambda n=starts: (trial := read_state(home).trial) is not None and trial.starts == n)
            child.kill()
            await child.wait()
        assert release_of(home) == 2

    async with process(*words(home, broker)) as (child, _, session):
        assert (await ask(session, "digits"))[1]["parameters"]["release"] == 1
        ended = await supervising
    assert ended.state is RolloutState.ABORTED
    assert ended.reasons == (f"{DEVICE} rolled_back: {MAX_STARTS} processes that ran it died",)
    assert Folder(repo).read().devices[DEVICE].phase is Phase.ROLLED_BACK
    state = read_state(home)
    assert (state.running, state.good, state.trial) == ("a", "a", None)
    assert state.refused == {digest(new): f"{MAX_STARTS} processes that ran it died"}
    assert whole(home) == {"a": digest(old), "b": digest(new)}


# ---------------------------------------------------------------------------------------------- at work for long


EXPECTED = golden()["y"]
ROUNDS = 3
"""Each has three switches: by a rollout, by `fedge install` and by the inbox."""


PAUSE_S = 0.002
"""Between two requests: the other processes are to get on, too."""


class Load:
    """Clients over HTTP and a sensor over MQTT that ask all the time, and count what was answered wrongly."""

    def __init__(self, session: aiohttp.ClientSession, broker: LocalBroker) -> None:
        self.answered = {"http": 0, "mqtt": 0}
        self.wrong: list[object] = []
        self.releases: set[int] = set()
        self._session = session
        self._link = transport(broker, "sensor")
        self._answers: asyncio.Queue[Inbound] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        """Asked within; what was asked is answered before it ends."""
        await self._link.subscribe(Topics(FEDERATION).make_agent_topic(DEVICE, "predictions"), self._answers.put)
        listens, stop = asyncio.Event(), asyncio.Event()

        async def note(_: Inbound) -> None:
            listens.set()

        await self._link.subscribe(Topics(FEDERATION).make_agent_topic(DEVICE, "health"), note)
        async with self._link, asyncio.TaskGroup() as tasks:
            await asyncio.wait_for(listens.wait(), 300)  # the port answers before the broker has let the device in
            for number in range(2):
                tasks.create_task(self._over_http(number, stop))
            tasks.create_task(self._over_mqtt(stop))
            try:
                yield
            finally:
                stop.set()

    async def _over_http(self, number: int, stop: asyncio.Event) -> None:
        i = number
        while not stop.is_set():
            i = (i + 1) % len(X)
            async with self._session.post("/v2/models/digits/infer", data=body(X[i : i + 1])) as response:
                self._check("http", await response.read() if response.status == 200 else b"{}", i)
            await asyncio.sleep(PAUSE_S)

    async def _over_mqtt(self, stop: asyncio.Event) -> None:
        i = 0
        while not stop.is_set():
            i = (i + 1) % len(X)
            await self._link.publish(
                Topics(FEDERATION).make_agent_topic(DEVICE, "predict"), body(X[i : i + 1], id=str(i))
            )
            async with asyncio.timeout(300):
                payload = (await self._answers.get()).payload
            self._check("mqtt", payload if json.loads(payload).get("id") == str(i) else b"{}", i)
            await asyncio.sleep(PAUSE_S)

    def _check(self, way: str, payload: bytes, i: int) -> None:
        content = json.loads(payload)
        if "outputs" not in content or outputs(payload)["class"]["data"] != [EXPECTED[i]]:
            self.wrong.append((way, content))
            return
        self.answered[way] += 1
        self.releases.add(content["parameters"]["release"])


def settled(home: Path, release: int) -> bool:
    """Whether this release answers for good, or something was refused."""
    state = read_state(home)
    return bool(state.refused) or (state.trial is None and release_of(home) == release)


async def held_by(served: psutil.Process) -> tuple[int, int, int]:
    """Bytes of memory, files and threads; the fewest of some looks, since requests and examinations come and go."""
    looks = []
    for _ in range(30):
        looks.append((served.memory_info().rss, served.num_fds(), served.num_threads()))
        await asyncio.sleep(0.01)
    rss, files, threads = zip(*looks, strict=True)
    return min(rss), min(files), min(threads)


def files_of(home: Path) -> set[str]:
    """All files but those of bundles, and the folders of bundles."""
    files = {path.relative_to(home) for path in home.rglob("*") if path.is_file()}
    return {str(path.parent if path.parts[0] in {"bundles", "slot-a", "slot-b"} else path) for path in files}


async def test_at_work_for_long_with_switches_in_between(broker, tmp_path, repo, home) -> None:
    """In small what a device does for years: no request fails, memory and files are what they were."""

    def bundle(release: int) -> Path:
        return variant(tmp_path / f"bundle-{release}", release=release, gate=other_gate if release % 2 else None)

    async def by_rollout(number: int) -> None:
        release, plan = plan_of(repo, bundle(number), id=f"r{number}", stages=(1.0,))
        assert (await rolled_out(broker, repo, release, plan)).state is RolloutState.DONE

    async def by_install(number: int) -> None:
        done = await asyncio.to_thread(CliRunner().invoke, install, ["--home", str(home), str(bundle(number))])
        assert done.exit_code == 0, done.output

    async def by_inbox(number: int) -> None:
        bundle(number).rename(home / "bundles" / str(number))

    (home / "bundles").mkdir()
    last = 1 + 3 * ROUNDS
    after: list[tuple[int, int, int]] = []
    async with process(*words(home, broker)) as (child, _, session):
        served = psutil.Process(child.pid)
        load = Load(session, broker)
        async with load.going():
            for number, switch in enumerate(ROUNDS * [by_rollout, by_install, by_inbox], 2):
                await switch(number)
                await until(lambda n=number: settled(home, n))
                assert read_state(home).refused == {}
                after.append(await held_by(served))
        assert not load.wrong, load.wrong[:3]
        child.terminate()
        await child.wait()
        assert child.stderr is not None
        assert b"Traceback" not in await child.stderr.read()
    assert load.releases == set(range(1, last + 1))
    assert sum(load.answered.values()) > 1000
    (rss_before, files_before, threads_before), (rss, files, threads) = after[2], after[-1]
    assert rss <= 1.05 * rss_before, after
    assert files <= files_before, after
    assert threads <= threads_before + 3, after  # asyncio's pool grows up to its bound; six switches lie between

    inbox = {f"bundles/{release}" for release in range(4, last + 1, 3)}  # the agent's own
    names = ("root", "root_history/1.root", "timestamp", "snapshot", "targets", "announced")
    trust = {f"trust/{name}.json" for name in names}
    others = {"egress.db", "outcome.json", "root.json", "slots.json", "slot-a", "slot-b", "validation.npz"}
    others |= {"samples/samples.db"}
    assert files_of(home) == inbox | trust | others
