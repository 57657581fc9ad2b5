"""Rollouts over a real broker: bundles that are better and worse, devices that are off, kill -9, and liars."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.rollout.decision import Progress
from coordinator.rollout.folder import Folder, Record, Request
from coordinator.rollout.service import Release
from deploy import load
from deploy.updates.answering import ActiveBundle
from deploy.updates.slots import find_slot, read_state
from export.signing import Repository
from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import LocalBroker
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.system.files import compute_digest
from fedge.tasks import load_pool, load_task
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import (
    Announcement,
    FileRef,
    Health,
    Phase,
    Rollout,
    RolloutState,
    Want,
    decode_message,
    encode_message,
)
from fedge.wire.rollout import compute_place
from fedge.wire.topics import Topics
from fedge.wire.transfer.sender import Sender
from tests.deploy.bundles import digest, other_gate, poor_gate, variant
from tests.deploy.repository import LATER, PAST, Simulator
from tests.support.broker import BROKERS, local_broker, settings, transport
from tests.support.clock import Clock
from tests.support.rollouts import WAIT_S, plan_of, release_of, rolled_out
from tests.support.runtime_device import FEDERATION, LENIENT, device, prepare
from tests.support.trained_bundles import trained_bundle
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DEVICES = [f"cam{i}" for i in range(8)]
TOPICS = Topics(FEDERATION)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


async def fleet(stack: AsyncExitStack, broker: LocalBroker, homes: dict[str, Path]) -> None:
    for name, home in homes.items():
        await stack.enter_async_context(device(settings(broker), home, name))


@pytest.mark.parametrize("kind", BROKERS)
async def test_a_release_goes_through_all_stages(kind, tmp_path, repo, old, new) -> None:
    async with local_broker(kind, tmp_path) as broker:
        await goes_through_all_stages(broker, tmp_path, repo, old, new)


async def goes_through_all_stages(broker: LocalBroker, tmp_path: Path, repo: Path, old: Path, new: Path) -> None:
    root = Repository(repo).read_root()
    homes = {name: prepare(tmp_path / name, old, root) for name in DEVICES}
    release, plan = plan_of(repo, new)
    events = []
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, homes)
        ended = await rolled_out(broker, repo, release, plan, lambda event, fields: events.append((event, fields)))

    assert ended.state is RolloutState.DONE
    assert {name: release_of(home) for name, home in homes.items()} == dict.fromkeys(DEVICES, 2)
    assert [fields["stage"] for event, fields in events if event == "rollout"] == [2, 3, 3]
    record = Folder(repo).read()
    assert all(line.phase is Phase.SERVING and line.accuracy == (1.0, 1.0) for line in record.devices.values())
    assert all(not list((home / "received").iterdir()) for home in homes.values())


async def test_one_that_does_worse_stops_at_the_canary_stage(broker, tmp_path, repo, old) -> None:
    worse = variant(tmp_path / "worse", release=2, gate=poor_gate)
    root = Repository(repo).read_root()
    canary = min(DEVICES, key=lambda name: compute_place("r1", name))
    homes = {  # what the bundle has become is right for everybody but the canary
        name: prepare(tmp_path / name, old, root, labels_of=None if name == canary else worse) for name in DEVICES
    }
    release, plan = plan_of(repo, worse)
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, homes)
        ended = await rolled_out(broker, repo, release, plan)

    assert (ended.state, ended.stage) == (RolloutState.ABORTED, 0)
    assert ended.reasons[0].startswith(f"{canary} kept its own: accuracy: ")
    assert "< 1.00 on " in ended.reasons[0], "both bundles came by rollouts, so their figures may leave"
    assert {release_of(home) for home in homes.values()} == {1}
    assert [name for name, home in homes.items() if digest(worse) in read_state(home).refused] == [canary]


def right(folder: Path, x: np.ndarray, y: np.ndarray) -> float:
    """Accuracy of a bundle."""
    return float((load(folder).predict(x).class_index == y).mean())


async def test_one_that_gets_worse_at_work_goes_back_by_itself_and_stops_the_rollout(broker, tmp_path, repo) -> None:
    """The canary's camera was turned after its samples were taken: the new bundle, trained on more pictures but
    upright ones alone, is better on the stored samples of every device, and worse on what the canary sees now."""
    task = load_task("digits")
    digits = load_pool("digits", seed=3)
    turned = np.rot90(digits.x, axes=(-2, -1)).copy()
    both, y_both = np.concatenate([digits.x[:300], turned[:300]]), np.tile(digits.y[:300], 2)
    older = trained_bundle(tmp_path / "older", task, both, y_both, release=1)
    newer = trained_bundle(tmp_path / "newer", task, digits.x[:1200], digits.y[:1200], release=2)
    stored, seen = slice(1200, 1400), slice(1400, 1700)
    assert right(newer, digits.x[stored], digits.y[stored]) >= right(older, digits.x[stored], digits.y[stored])
    assert right(newer, turned[seen], digits.y[seen]) < right(older, turned[seen], digits.y[seen]) - 0.3

    root = Repository(repo).read_root()
    canary = min(DEVICES, key=lambda name: compute_place("r1", name))
    homes = {name: prepare(tmp_path / name, older, root) for name in DEVICES}
    for home in homes.values():
        Validation(preprocess(task, digits.x[stored]), digits.y[stored]).save(home)
    release, plan = plan_of(repo, newer)
    limits = msgspec.structs.replace(LENIENT, probation_s=1e9, probation_predictions=len(digits.y[seen]))
    phases: list[Phase] = []

    def observe(event: str, fields: dict) -> None:
        if event == "device" and fields["device"] == canary and fields["phase"] not in phases[-1:]:
            phases.append(fields["phase"])

    async def at_work(name: str, answering: ActiveBundle) -> None:
        """A picture after the other; somebody tells what was on it."""
        x = turned if name == canary else digits.x
        for i in itertools.cycle(range(seen.start, seen.stop)):
            await asyncio.to_thread(answering.answer, x[i])
            await asyncio.to_thread(answering.add_feedback, x[i], digits.y[i : i + 1])
            await asyncio.sleep(0.01)

    async with AsyncExitStack() as stack:
        working = []
        for name, home in homes.items():
            answering = await stack.enter_async_context(device(settings(broker), home, name, limits))
            working.append(asyncio.create_task(at_work(name, answering)))
        ended = await rolled_out(broker, repo, release, plan, observe)
        for task_of_one in working:
            task_of_one.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    assert (ended.state, ended.stage) == (RolloutState.ABORTED, 0)
    assert ended.reasons[0].startswith(f"{canary} rolled_back: accuracy: ")
    assert phases == ["serving", "fetching", "trial", "rolled_back"]
    line = Folder(repo).read().devices[canary]
    assert (line.release, line.phase) == (1, Phase.ROLLED_BACK)
    assert line.accuracy[1] >= line.accuracy[0]  # the examination could not know
    for name, home in homes.items():
        state = read_state(home)
        assert digest(find_slot(home, state.running)) == digest(older)
        assert (state.good, state.trial) == (state.running, None)
        assert [*state.refused] == ([digest(newer)] if name == canary else [])
        assert not list((home / "received").iterdir())
        if name != canary:  # never asked for a byte of it
            assert not list((home / "parts").glob("*"))


async def test_a_device_that_was_off_catches_up(broker, tmp_path, repo, old, new) -> None:
    root = Repository(repo).read_root()
    homes = {name: prepare(tmp_path / name, old, root) for name in DEVICES}
    release, plan = plan_of(repo, new, absent_s=3.0)
    order = sorted(DEVICES, key=lambda name: compute_place("r1", name))
    done = asyncio.Event()

    def observe(event: str, fields: dict) -> None:
        if event == "rollout" and fields["state"] == "done":
            done.set()

    async with AsyncExitStack() as stack:
        await fleet(stack, broker, {name: homes[name] for name in order[:-1]})
        off = device(settings(broker), homes[order[-1]], order[-1])
        await off.__aenter__()
        supervising = asyncio.create_task(rolled_out(broker, repo, release, plan, observe))
        await asyncio.sleep(0.5)
        await off.__aexit__(None, None, None)
        async with asyncio.timeout(WAIT_S):
            await done.wait()
        assert release_of(homes[order[-1]]) == 1
        assert not supervising.done()
        for role in ("timestamp", "targets", "root"):  # meanwhile all keys are new
            Repository(repo).rotate(role)
        await until(lambda: "4.root.json" in release.metadata)
        await fleet(stack, broker, {order[-1]: homes[order[-1]]})
        ended = await supervising

    assert ended.state is RolloutState.DONE
    assert {release_of(home) for home in homes.values()} == {2}
    assert json.loads((homes[order[-1]] / "trust" / "root.json").read_bytes())["signed"]["version"] == 4


async def rolled_out_but_for_one(stack, broker, repo, homes, new) -> tuple[Release, asyncio.Task[Progress]]:
    """Everybody runs the release but the last device, which was seen and went off before; somebody supervises."""
    release, plan = plan_of(repo, new, stages=(1.0,), absent_s=3.0)
    *others, last = homes
    async with device(settings(broker), homes[last], last):
        await asyncio.sleep(0.5)
    await fleet(stack, broker, {name: homes[name] for name in others})
    supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
    await until(lambda: (record := Folder(repo).read()) and record.progress.state is RolloutState.DONE)
    return release, supervising


def timestamp_of(folder: Path) -> dict:
    return json.loads((folder / "timestamp.json").read_bytes())["signed"]


@pytest.mark.parametrize(("weeks", "renewed"), [(1, False), (7, True), (20, True), (60, True)])
async def test_off_for_weeks_it_catches_up(broker, tmp_path, monkeypatch, repo, old, new, weeks, renewed) -> None:
    """Past the lifetimes of the timestamp (30 days), the snapshot (90) and the targets (365) that it last saw."""
    clock = Clock(monkeypatch)
    homes = {name: prepare(tmp_path / name, old, Repository(repo).read_root()) for name in DEVICES[:2]}
    async with AsyncExitStack() as stack:
        release, supervising = await rolled_out_but_for_one(stack, broker, repo, homes, new)
        for _ in range(weeks):
            clock.advance(weeks=1)
            if renewed:
                Repository(repo).renew()
        newest = compute_digest((repo / "metadata" / "timestamp.json").read_bytes())
        await until(lambda: release.metadata["timestamp.json"].digest == newest)
        assert release_of(homes["cam1"]) == 1
        await fleet(stack, broker, {"cam1": homes["cam1"]})
        assert (await supervising).state is RolloutState.DONE

    assert {release_of(home) for home in homes.values()} == {2}
    assert timestamp_of(homes["cam1"] / "trust") == timestamp_of(repo / "metadata")


async def test_what_expired_meanwhile_is_refused_until_it_is_renewed(
    broker, tmp_path, monkeypatch, repo, old, new
) -> None:
    clock = Clock(monkeypatch)
    homes = {name: prepare(tmp_path / name, old, Repository(repo).read_root()) for name in DEVICES[:2]}
    async with AsyncExitStack() as stack:
        _, supervising = await rolled_out_but_for_one(stack, broker, repo, homes, new)
        clock.advance(days=31)
        await fleet(stack, broker, {"cam1": homes["cam1"]})
        await until(lambda: phase_in(repo, "cam1") is Phase.REFUSED)
        assert Folder(repo).read().devices["cam1"].reason.startswith("expired: ")
        assert (release_of(homes["cam1"]), read_state(homes["cam1"]).refused) == (1, {})
        assert not supervising.done(), "it is to be had as soon as it is signed again"
        Repository(repo).renew()
        assert (await supervising).state is RolloutState.DONE

    assert {release_of(home) for home in homes.values()} == {2}


async def test_by_a_clock_that_was_ahead_and_is_set_right_nothing_has_expired(
    broker, tmp_path, monkeypatch, repo, old, new
) -> None:
    clock = Clock(monkeypatch)
    homes = {name: prepare(tmp_path / name, old, Repository(repo).read_root()) for name in DEVICES[:2]}
    async with AsyncExitStack() as stack:
        _, supervising = await rolled_out_but_for_one(stack, broker, repo, homes, new)
        clock.advance(days=400)
        await fleet(stack, broker, {"cam1": homes["cam1"]})
        await until(lambda: phase_in(repo, "cam1") is Phase.REFUSED)
        clock.advance(days=-400)
        assert (await supervising).state is RolloutState.DONE

    assert {release_of(home) for home in homes.values()} == {2}


async def test_a_supervisor_whose_clock_was_set_back_is_heard(broker, tmp_path, monkeypatch, repo, old, new) -> None:
    clock = Clock(monkeypatch)
    home = prepare(tmp_path / "cam0", old, Repository(repo).read_root())
    newer = variant(tmp_path / "newer", release=3)
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, {"cam0": home})
        for number, bundle, days in ((2, new, 10), (3, newer, -10)):
            clock.advance(days=days)
            release, plan = plan_of(repo, bundle, id=f"r{number}", stages=(1.0,))
            assert (await rolled_out(broker, repo, release, plan)).state is RolloutState.DONE

    assert release_of(home) == 3


async def test_an_aborted_rollout_is_taken_back(broker, tmp_path, repo, old, new) -> None:
    root = Repository(repo).read_root()
    homes = {name: prepare(tmp_path / name, old, root) for name in DEVICES[:2]}
    release, plan = plan_of(repo, new, canaries=("cam1",), stages=(0.0, 1.0), soak_s=1e9)
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, homes)
        supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
        await until(lambda: release_of(homes["cam1"]) == 2)
        Folder(repo).write_request(Request.ABORT)
        ended = await supervising

    assert ended.reasons == ("asked for",)
    assert {name: release_of(home) for name, home in homes.items()} == {"cam0": 1, "cam1": 1}
    assert Folder(repo).read().devices["cam1"].phase is Phase.ROLLED_BACK
    assert read_state(homes["cam0"]).refused == {}


async def test_a_paused_rollout_waits(broker, tmp_path, repo, old, new) -> None:
    homes = {"cam0": prepare(tmp_path / "cam0", old, Repository(repo).read_root())}
    release, plan = plan_of(repo, new)
    Folder(repo).write(Record(plan=plan, progress=Progress(began=0.0, state=RolloutState.PAUSED)))
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, homes)
        supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
        await until(lambda: "cam0" in Folder(repo).read().devices)
        assert release_of(homes["cam0"]) == 1
        Folder(repo).write_request(Request.RESUME)
        assert (await supervising).state is RolloutState.DONE

    assert release_of(homes["cam0"]) == 2


async def test_paused_in_the_middle_of_a_transfer_it_goes_on_when_it_is_resumed(
    broker, tmp_path, repo, old, new
) -> None:
    home = prepare(tmp_path / "cam0", old, Repository(repo).read_root())
    release, plan = plan_of(repo, new)
    gate = read_bundle(new).manifest.gate.digest
    part, hidden = Repository(repo).parts.get_path(gate), tmp_path / "hidden"
    part.rename(hidden)  # so that the transfer lasts
    phases: list[Phase] = []

    def observe(event: str, fields: dict) -> None:
        if event == "device":
            phases.append(fields["phase"])

    async with AsyncExitStack() as stack:
        await fleet(stack, broker, {"cam0": home})
        supervising = asyncio.create_task(rolled_out(broker, repo, release, plan, observe))
        await until(lambda: phases[-1:] == [Phase.FETCHING])
        Folder(repo).write_request(Request.PAUSE)
        await until(lambda: phases == [Phase.SERVING, Phase.FETCHING, Phase.SERVING])
        assert Folder(repo).read().progress.state is RolloutState.PAUSED
        hidden.rename(part)
        assert (release_of(home), read_state(home).trial) == (1, None)
        assert not (home / "parts" / gate).exists()
        Folder(repo).write_request(Request.RESUME)
        assert (await supervising).state is RolloutState.DONE

    assert release_of(home) == 2


# ------------------------------------------------------------------------------------------------------- kill -9


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def phase_in(repo: Path, name: str) -> Phase | None:
    record = Folder(repo).read()
    return record.devices[name].phase if record is not None and name in record.devices else None


async def test_killed_in_the_middle_of_a_transfer_both_go_on(broker, tmp_path, repo, old, new) -> None:
    home = prepare(tmp_path / "cam0", old, Repository(repo).read_root())
    target = Repository(repo).add(new)
    gate = read_bundle(new).manifest.gate.digest
    part, hidden = Repository(repo).parts.get_path(gate), tmp_path / "hidden"
    runtime = ("-m", "tests.support.runtime_device", broker.host, str(broker.port), str(home), "cam0")
    supervisor = (
        *("-c", "from coordinator.rollout.cli import rollout; rollout()", "start", str(repo), target, "--soak-s", "0"),
        *("--stages", "1", "--broker", f"{broker.host}:{broker.port}", "--federation", FEDERATION),
    )
    async with process(*supervisor):
        await until(lambda: Folder(repo).read() is not None)
        part.rename(hidden)  # so that the transfer lasts
        async with process(*runtime):
            await until(lambda: phase_in(repo, "cam0") is Phase.FETCHING)
        assert release_of(home) == 1  # the device is dead
    assert release_of(home) == 1  # the supervisor as well
    hidden.rename(part)
    async with process(*runtime), process(*supervisor) as last:
        async with asyncio.timeout(WAIT_S):
            assert await last.wait() == 0

    assert release_of(home) == 2
    assert read_state(home).trial is None


# ------------------------------------------------------------------------------------------------------- attacks


class Liar:
    """Whoever has the broker's password: announces and serves what it likes."""

    def __init__(self, broker: LocalBroker) -> None:
        self.blobs: dict[str, bytes] = {}
        self.wanted: set[str] = set()
        self._healths: list[Health] = []
        self._news = asyncio.Condition()
        self._transport = transport(broker, "liar")
        self._sender = Sender(self._transport, self.blobs.get)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Liar]:
        await self._transport.subscribe(TOPICS.make_agent_topic("+", "health"), self._on_health)
        await self._transport.subscribe(TOPICS.make_agent_topic("+", "release-wants"), self._on_want)
        async with self._transport, self._sender:
            yield self

    async def _on_health(self, inbound: Inbound) -> None:
        async with self._news:
            self._healths.append(decode_message(inbound.payload, Health))
            self._news.notify_all()

    async def _on_want(self, inbound: Inbound) -> None:
        want = decode_message(inbound.payload, Want)
        self.wanted.add(want.digest)
        self._sender.add_want(want.digest, want.ranges, chunks=TOPICS.make_model_topic(want.digest))

    async def announce(
        self, simulator: Simulator, files: dict[str, bytes], release: int, name: str, **sizes: int
    ) -> None:
        """With the key that signs announcements; the files may be anybody's."""
        self.blobs |= {compute_digest(data): data for data in files.values()}
        refs = {n: FileRef(digest=compute_digest(d), size_bytes=sizes.get("size", len(d))) for n, d in files.items()}
        rollout = Rollout(
            id=name,
            state=RolloutState.RUNNING,
            target=f"{release}/manifest.json",
            release=release,
            share=1.0,
            metadata=refs,
            version=int(1000 * time.time()),
        )
        await self.say(simulator.announce(rollout, FEDERATION))

    async def say(self, announcement: Announcement) -> None:
        await self._transport.publish(TOPICS.rollout, encode_message(announcement), retain=True)

    async def told(self, rollout: str, *phases: Phase) -> Health:
        def found() -> Health | None:
            return next((h for h in self._healths if h.rollout == rollout and h.phase in phases), None)

        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(found)
        health = found()
        assert health is not None
        return health


def offered(simulator: Simulator, bundle: Path, liar: Liar) -> int:
    """Sign a bundle, and have its parts ready; its release."""
    manifest = read_bundle(bundle).manifest
    simulator.release(manifest.release, (bundle / "manifest.json").read_bytes())
    for path in bundle.iterdir():
        liar.blobs[compute_digest(path.read_bytes())] = path.read_bytes()
    return manifest.release


def forged(simulator, bundle, liar):
    thief = Simulator()
    number = offered(thief, bundle(6), liar)
    return thief.files, number, {}


def expired(simulator, bundle, liar):
    simulator.timestamp.expires = PAST
    number = offered(simulator, bundle(6), liar)
    return simulator.files, number, {}


def older(simulator, bundle, liar):
    return simulator.files, offered(simulator, bundle(3), liar), {}


def altered_part(simulator, bundle, liar):
    folder = bundle(6)
    number = offered(simulator, folder, liar)
    gate = read_bundle(folder).manifest.gate
    liar.blobs[gate.digest] = os.urandom(gate.size_bytes)
    return simulator.files, number, {}


def altered_manifest(simulator, bundle, liar):
    number = offered(simulator, bundle(6), liar)
    name = next(name for name in simulator.files if name.startswith("6/"))
    data = simulator.files.pop(name).replace(b"digits", b"widgets")
    return simulator.files | {f"6/{compute_digest(data)}.manifest.json": data}, number, {}


def oversized(simulator, bundle, liar):
    return simulator.files, offered(simulator, bundle(6), liar), {"size": 2**21}


def too_large(simulator, bundle, liar):
    manifest = json.loads((bundle(6) / "manifest.json").read_bytes())
    manifest["gate"] = {"digest": "f" * 64, "size_bytes": 2**33}
    simulator.release(6, json.dumps(manifest).encode())
    return simulator.files, 6, {}


def mixed(simulator, bundle, liar):
    number = offered(simulator, bundle(6), liar)
    other = (bundle(8) / "manifest.json").read_bytes()
    return {f"6/{compute_digest(other)}.manifest.json": other} | simulator.files, number, {}


def other_architecture(simulator, bundle, liar):
    folder = bundle(6)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"hidden": 16', '"hidden": 17', 1))
    return simulator.files, offered(simulator, folder, liar), {}


def other_task(simulator, bundle, liar):
    folder = bundle(6)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"name": "digits"', '"name": "cats"', 1))
    return simulator.files, offered(simulator, folder, liar), {}


def other_schema(simulator, bundle, liar):
    text = (bundle(6) / "manifest.json").read_text().replace('"schema_version": 1', '"schema_version": 2', 1)
    simulator.release(6, text.encode())
    return simulator.files, 6, {}


@pytest.mark.parametrize(
    ("attack", "phase", "reason"),
    [
        (forged, Phase.REFUSED, "forged"),
        (expired, Phase.REFUSED, "expired"),
        (older, Phase.REFUSED, "rollback"),
        (altered_part, Phase.FAILED, "digest"),
        (altered_manifest, Phase.REFUSED, "missing"),
        (mixed, Phase.REFUSED, "mix-and-match"),
        (oversized, Phase.REFUSED, "endless-data"),
        (too_large, Phase.REFUSED, "oversized"),
        (other_task, Phase.REFUSED, "task"),
        (other_architecture, Phase.REFUSED, "task"),
        (other_schema, Phase.REFUSED, "schema"),
    ],
)
async def test_what_a_liar_sends_is_refused_by_name(broker, tmp_path, attack, phase, reason) -> None:
    simulator = Simulator()
    first = variant(tmp_path / "first", release=5)
    home = prepare(tmp_path / "cam0", first, simulator.files["1.root.json"])

    def bundle(release: int) -> Path:
        return variant(tmp_path / f"attack-{release}", release=release, gate=other_gate)

    async with Liar(broker).connected() as liar, device(settings(broker), home, "cam0") as answering:
        files, number, sizes = attack(simulator, bundle, liar)
        await liar.announce(simulator, files, number, "lie", **sizes)
        health = await liar.told("lie", Phase.REFUSED, Phase.FAILED, Phase.TRIAL)
        assert (health.phase, health.reason.split(":")[0], health.release) == (phase, reason, 5)
        assert answering.runtime.digest == digest(first)
        assert release_of(home) == 5
        state = read_state(home)
        assert (state.good, state.trial, state.highest_release) == (state.running, None, 5)
        assert not list((home / "received").iterdir())
        if attack is oversized:
            assert liar.wanted == set()
        assert "f" * 64 not in liar.wanted
        kept = [path.name for path in (home / "parts").glob("*")]
        assert not [name for name in kept if attack is not altered_part or len(name) == 64]  # it tries again

        simulator.timestamp.expires = LATER  # and the truth is believed afterwards
        number = offered(simulator, variant(tmp_path / "truth", release=7, gate=other_gate), liar)
        await liar.announce(simulator, simulator.files, number, "truth")
        await until(lambda: answering.runtime.manifest.release == 7)


async def test_who_has_no_key_neither_pauses_nor_hurries_nor_aborts_a_rollout(broker, tmp_path, repo, old, new) -> None:
    """A device that took the release keeps it, one whose stage has not come waits, and the rollout goes on."""
    homes = {name: prepare(tmp_path / name, old, Repository(repo).read_root()) for name in DEVICES[:2]}
    release, plan = plan_of(repo, new, canaries=("cam1",), stages=(0.0, 1.0), soak_s=1e9)
    thief, heard = Simulator(), []
    ear = transport(broker, "ear")

    async def on_rollout(inbound: Inbound) -> None:
        heard.append(decode_message(inbound.payload, Announcement))

    await ear.subscribe(TOPICS.rollout, on_rollout)
    async with AsyncExitStack() as stack:
        await fleet(stack, broker, homes)
        supervising = asyncio.create_task(rolled_out(broker, repo, release, plan))
        await stack.enter_async_context(ear)
        await until(lambda: read_state(homes["cam1"]).trial is None and release_of(homes["cam1"]) == 2)
        genuine = heard[-1]
        said = decode_message(genuine.rollout, Rollout)
        async with Liar(broker).connected() as liar:
            for change in ({"state": RolloutState.ABORTED}, {"state": RolloutState.PAUSED}, {"share": 1.0}):
                forged = msgspec.structs.replace(said, version=said.version + 10**6, **change)
                for lie in (
                    msgspec.structs.replace(genuine, rollout=encode_message(forged)),
                    thief.announce(forged, FEDERATION),
                    Announcement(rollout=encode_message(forged), signatures={}),
                ):
                    await liar.say(lie)
        await until(lambda: len(heard) >= 10)
        await asyncio.sleep(1)
        assert {name: release_of(home) for name, home in homes.items()} == {"cam0": 1, "cam1": 2}
        assert read_state(homes["cam1"]).refused == {}

        Folder(repo).write_request(Request.ABORT)  # which is signed
        assert (await supervising).state is RolloutState.ABORTED
        assert release_of(homes["cam1"]) == 1
        async with Liar(broker).connected() as liar:  # who tells the fleet again what was true before
            await liar.say(genuine)
            await until(lambda: heard[-1] == genuine)
            await asyncio.sleep(1)
    assert {release_of(home) for home in homes.values()} == {1}
