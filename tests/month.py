"""A month of a fleet in minutes, with real programs and a real broker: `make month`.

The clock of every program is the test's own (libfaketime): it jumps from day to day, while timeouts and pauses stay
real. Four cameras answer over HTTP, are told true labels, and learn from them in a campaign every other day. Nobody
touches a shell on a device. The month is lived twice, once undisturbed and once with programs that are killed.

days 3 to 23  the camera cam4 sleeps through ten campaigns, and catches up
days 6 to 18  kill -9: the coordinator in a round, an agent at work, a runtime that is told labels, the broker, all
day 24        both months have come to the same samples and the same models, to the last bit
day 25        the camera cam1 is turned by 90 degrees: it drifts, is told labels, and recovers with the next campaign
day 30        a bad release is stopped by its canary, and a good one goes through
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
from msgspec import Struct

from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.state import State, decode_state
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.privacy.ledger import FILE as LEDGER
from tests.support.broker import local_broker
from tests.support.cameras import Cameras, say, say_logs, seen, turn
from tests.support.faketime import CACHE_S, CLOCK, CLOCKS, FAKETIME, set_clock
from tests.support.federation import same
from tests.support.trained_bundles import trained_bundle

CAMERAS: Final = ("cam1", "cam2", "cam3", "cam4")
EVERY_DAYS: Final = 2
AT_HOME: Final = 100
"""Samples that a camera has from the beginning."""
ON_TURNING: Final = 60
"""Labels that a camera is told on the day on which it is turned."""
AFTERWARDS: Final = 30
"""Labels that it is told after its next campaign: only these can say that its answers are right again."""
RECOVERED: Final = 0.03
"""Largest loss of accuracy of a turned camera after its next campaign."""
FLAT: Final = 1.2
"""Most that memory and a camera's disk may grow by after the fourth campaign, when it has all bundles that it keeps."""
LEFT_MB: Final = 0.004
"""Most that a camera's record of what left it may grow by in a campaign; it has 20,000 lines at most, some 4 MB."""
EVENTS_MB: Final = 0.2
"""Most that the coordinator's disk may grow by in a campaign: events, of which it keeps 200,000, and a row a round."""


class Measured(NamedTuple):
    """What is in use at the end of a campaign; `cameras_mb` without the records of what left, which are `left_mb`."""

    campaign: int
    memory_mb: dict[str, float]
    cameras_mb: float
    left_mb: float
    shop_mb: float


class Plan(Struct, frozen=True, kw_only=True):
    """What happens on which day; 0: never. `kills`: what is killed on a day, in the disturbed life.

    `compared`: when both lives must have come to the same. `turns`: when the camera cam1 is turned. `releases`: whether
    releases come at the end. `labels`: how many a camera is told a day.
    """

    days: int
    sleeps: int
    wakes: int
    compared: int
    turns: int
    kills: dict[int, str]
    releases: bool = False
    labels: int = 5


MONTH: Final = Plan(
    days=30,
    sleeps=3,
    wakes=23,
    compared=24,
    turns=25,
    kills={6: "round", 9: "labels", 11: "broker", 12: "introduction", 16: "all", 25: "drift", 26: "round"},
    releases=True,
)
FEW: Final = Plan(days=4, sleeps=1, wakes=3, compared=4, turns=0, kills={2: "round", 3: "labels", 4: "introduction"})
"""As much as a test has time for."""
YEAR: Final = Plan(days=200, sleeps=0, wakes=0, compared=200, turns=0, kills={}, labels=1)
"""A hundred campaigns, to see what grows."""


def measure_file(path: Path) -> int:
    """Bytes of a file; of a database with what is in its write-ahead log, and 0 for the log itself."""
    if path.name.endswith(("-wal", "-shm")):
        return 0
    if path.suffix != ".db":
        return path.stat().st_size
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return int(
            db.execute("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()").fetchone()[0]
        )


@contextlib.contextmanager
def open_clock() -> Iterator[Path]:
    """A file that is the clock of all processes which begin within."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clock"
        set_clock(file, "+0d")
        os.environ |= {**CLOCKS, CLOCK: str(file), "OMP_NUM_THREADS": "1"}
        yield file
        for name in (*CLOCKS, CLOCK):
            del os.environ[name]


class Month(Cameras):
    """Cameras whose programs all go by one clock that the test sets."""

    def __init__(self, folder: Path, broker: LocalBroker, clock: Path) -> None:
        super().__init__(folder, broker, CAMERAS, AT_HOME)
        self.clock = clock

    async def set_day(self, day: int) -> None:
        """Set everybody's clock, from one moment to the next."""
        set_clock(self.clock, f"+{day}d")
        await asyncio.sleep(2 * CACHE_S)

    async def begin_campaigns(self) -> None:
        """Start the coordinator, with a campaign every other day."""
        rounds = ("--method", "fedge", "--rounds", 4, "--campaign-rounds", 2, "--local-steps", 10)
        await self.start_coordinator(*rounds, "--every", f"{EVERY_DAYS}d")

    def measure_memory_mb(self) -> dict[str, float]:
        """Resident memory of each program, apart from children, which come and go with their work."""
        return {name: psutil.Process(ran.pid).memory_info().rss / 1e6 for name, ran in self.running.items()}

    def measure_disk_mb(self, *homes: Path) -> float:
        """Disk of homes, apart from samples and from write-ahead logs, which SQLite bounds at 4 MB each."""
        files = (path for home in homes for path in home.rglob("*"))
        return sum(measure_file(path) for path in files if path.is_file() and "samples" not in path.parts) / 1e6

    def measure(self) -> Measured:
        """Memory, and disk of the cameras' homes and of the coordinator's."""
        homes = [self.folder / name for name in CAMERAS]
        left = sum(measure_file(home / LEDGER) for home in homes) / 1e6
        cameras, shop = self.measure_disk_mb(*homes) - left, self.measure_disk_mb(self.shop)
        return Measured(self.campaign()["number"], self.measure_memory_mb(), cameras, left, shop)

    def read_state(self) -> FedgeState:
        """The method's state after the last round."""
        with contextlib.closing(Store(self.shop, intake=True)) as store:
            saved = store.get_state()
        assert saved is not None
        return decode_state(saved, FedgeState)


# ------------------------------------------------------------------------------------------------------------ events


async def live(month: Month, plan: Plan, *, disturbed: bool) -> State:
    """Live through the month, day by day; the method's state on the day on which it is compared."""
    await begin(month)
    early, before, state = month.measure(), 0.0, month.read_state()
    for day in range(1, plan.days + 1):
        kill = plan.kills.get(day, "") if disturbed else ""
        if day == plan.sleeps:
            await sleep(month, "cam4")
        if day == plan.wakes:
            await wake(month, "cam4")
        if day == plan.turns:
            before = await turn_camera(month, "cam1", kill)
        await tell_all(month, plan, kill)
        await month.set_day(day)
        if day % EVERY_DAYS == 0:
            await see_campaign(month, kill)
        if day == 3 * EVERY_DAYS:
            early = month.measure()
        if day == plan.compared:
            see_samples(month)
            state = month.read_state()
        if plan.turns < day == plan.turns + plan.turns % EVERY_DAYS:
            await see_recovery(month, "cam1", before)
    see_samples(month)
    if plan.days >= MONTH.days:
        see_flat(month, early)
    return state


async def begin(month: Month) -> None:
    """The first training of the federation; each camera serves its first bundle as soon as it has one."""
    await month.set_day(0)
    await month.begin_campaigns()
    for camera in CAMERAS:
        await month.start_agent(camera)
    await seen(lambda: set(month.summary().get("installed", ())) == set(CAMERAS))
    for camera in CAMERAS:
        await month.start_runtime(camera)
    await month.campaign_ends(1)
    say(f"the first campaign has ended: {[round(await month.measure_accuracy(c), 3) for c in CAMERAS]} right")


async def see_campaign(month: Month, kill: str) -> None:
    """See the campaign that the schedule begins, to its end."""
    number = len(month.campaign()["history"]) + 1
    if kill in {"round", "all"}:
        await kill_in_a_round(month, number, ("coordinator", "cam2") if kill == "round" else ())
    if kill == "introduction":
        await kill_in_an_introduction(month, number)
    await month.campaign_ends(number, settled=len(month.awake))
    ended = month.campaign()["history"][-1]
    accuracy = [round(await month.measure_accuracy(c), 3) for c in sorted(month.awake)]
    say(f"campaign {number} ({ended['why']}): {accuracy} right, {ended['lineage']}")


async def sleep(month: Month, camera: str) -> None:
    month.awake.remove(camera)
    for program in (f"{camera}-serve", camera):
        await month.end(program)
    say(f"{camera} goes to sleep")


async def wake(month: Month, camera: str) -> None:
    """It gets a bundle of the last campaign at once, however many it has missed."""
    number = month.campaign()["number"]
    before = month.read_state().installed
    assert camera not in before, before
    await month.start_agent(camera)
    await month.start_runtime(camera)
    month.awake.add(camera)
    await seen(lambda: camera in month.summary()["installed"])
    await month.campaign_ends(number, settled=len(month.awake))
    say(f"{camera} wakes, and has the bundle of campaign {number}: {await month.measure_accuracy(camera):.3f} right")


async def turn_camera(month: Month, camera: str, kill: str) -> float:
    """Turn it, and tell it labels; the accuracy that it had before."""
    before = await month.measure_accuracy(camera)
    month.cameras[camera].turned = True
    await month.tell(camera, ON_TURNING)
    after = await month.measure_accuracy(camera)
    await seen(lambda: month.known(camera)["drift"])
    if kill == "drift":
        await month.end(f"{camera}-serve", signal.SIGKILL)
        await month.start_runtime(camera)
    _, parameters = await month.ask(camera, month.x_test[:1])
    assert parameters["drifted"] is True, parameters
    kind = month.known(camera)["drift_kind"]
    say(f"{camera} is turned: {before:.3f} -> {after:.3f} right, and says that it drifts ({kind})")
    return before


async def see_recovery(month: Month, camera: str, before: float) -> None:
    after = await month.measure_accuracy(camera)
    say(f"{camera} after one campaign: {after:.3f} right, {before:.3f} before it was turned")
    assert after >= before - RECOVERED, (before, after)
    await month.tell(camera, AFTERWARDS)
    _, parameters = await month.ask(camera, month.x_test[:1])
    assert parameters["drifted"] is False, parameters
    await seen(lambda: not month.known(camera)["drift"])
    say(f"{camera}: the alarm has gone out")


async def tell_all(month: Month, plan: Plan, kill: str) -> None:
    """Tell each camera its labels of the day; what was not acknowledged is told again."""
    for camera in sorted(month.awake):
        dies = kill == "labels" and camera == "cam3"
        if dies:
            await kill_while_told(month, camera)
        await month.tell(camera, plan.labels - dies)
    if kill == "broker":
        await month.broker.kill()
        await month.broker.start()
        say("kill -9 of the broker")
    await month.are_known()


async def kill_while_told(month: Month, camera: str) -> None:
    x, label = month.cameras[camera].take()
    telling = asyncio.create_task(month.tell_one(camera, x, label))
    await asyncio.sleep(0.003)
    await month.end(f"{camera}-serve", signal.SIGKILL)
    await asyncio.gather(telling, return_exceptions=True)
    await month.start_runtime(camera)
    await month.tell_one(camera, x, label)
    say(f"kill -9 of the runtime of {camera} while it was told a label, which it was told again")


async def kill_in_a_round(month: Month, number: int, programs: tuple[str, ...]) -> None:
    """Kill these programs, at work in a campaign; all and the broker if none is named."""
    await seen(lambda: month.campaign()["number"] == number and month.campaign()["state"] == "running")
    if not programs:
        await month.broker.kill()
    for program in programs or tuple(month.running):
        await month.end(program, signal.SIGKILL)
    if not programs:
        await month.broker.start()
    await month.begin_campaigns()
    for camera in sorted(month.awake):
        if camera not in month.running:
            await month.start_agent(camera)
        if f"{camera}-serve" not in month.running:
            await month.start_runtime(camera)
    say(f"kill -9 in a round of campaign {number}: {', '.join(programs) or 'everything'}")


async def kill_in_an_introduction(month: Month, number: int) -> None:
    """Kill the coordinator and a runtime while bundles enter service."""
    await seen(lambda: month.introduction()["campaign"] == number)
    for program in ("coordinator", "cam2-serve"):
        await month.end(program, signal.SIGKILL)
    await month.begin_campaigns()
    await month.start_runtime("cam2")
    say(f"kill -9 of the coordinator and the runtime of cam2 in the introduction of campaign {number}")


def see_samples(month: Month) -> None:
    """None was lost, and none is there twice."""
    for name, camera in month.cameras.items():
        kept = month.read_samples(name)
        assert kept == camera.told, f"{name}: {kept.total()} samples, {camera.told.total()} were told"
    say(f"all samples are there once: {[camera.told.total() for camera in month.cameras.values()]}")


def see_flat(month: Month, early: Measured) -> None:
    late = month.measure()
    say(f"{early} -> {late}")
    both = early.memory_mb.keys() & late.memory_mb.keys()  # a camera that sleeps has no programs
    assert sum(late.memory_mb[name] for name in both) <= FLAT * sum(early.memory_mb[name] for name in both)
    assert late.cameras_mb <= FLAT * early.cameras_mb
    assert late.left_mb - early.left_mb <= len(CAMERAS) * LEFT_MB * (late.campaign - early.campaign)
    assert late.shop_mb - early.shop_mb <= EVENTS_MB * (late.campaign - early.campaign)


async def release(month: Month) -> None:
    """A bad release is stopped by its canary; a good one goes through."""
    releases = month.folder / "releases"
    x = np.concatenate([camera.x[: camera.come] for camera in month.cameras.values()])
    y = np.concatenate([camera.y[: camera.come] for camera in month.cameras.values()])
    x, y = np.concatenate([x, turn(x)]), np.concatenate([y, y])
    await month.fedge("release", "init", releases)
    for number, steps in ((1001, 0), (1002, 3000)):
        trained_bundle(month.folder / f"bundle-{number}", month.task, x, y, release=number, steps=steps)
    for camera in CAMERAS:
        await month.end(f"{camera}-serve")
        root = releases / "metadata/1.root.json"
        await month.fedge("install", "--home", month.folder / camera, "--root", root)
        await month.start_runtime(camera)
    seeing = asyncio.create_task(month.keep_seeing())
    for number, end, code in ((1001, "the running bundle is more accurate", 1), (1002, "done", 0)):
        await month.fedge("release", "add", releases, month.folder / f"bundle-{number}")
        target = f"{number}/manifest.json"
        said = await month.fedge("rollout", "start", releases, target, *month.at, "--soak-s", 1, codes=[code])
        assert end in said, said
        say(f"the release {number}: {said.splitlines()[-1].strip()}")
    seeing.cancel()
    await asyncio.gather(seeing, return_exceptions=True)


async def live_once(folder: Path, clock: Path, plan: Plan, *, disturbed: bool) -> State:
    say(f"{plan.days} days with {'kills' if disturbed else 'nothing killed'}")
    async with local_broker("auto", folder) as broker:
        month = Month(folder, broker, clock)
        try:
            state = await live(month, plan, disturbed=disturbed)
            if plan.releases and not disturbed:
                await release(month)
        except BaseException:
            say_logs(folder)
            raise
        finally:
            await month.kill_all()
    return state


async def main(plan: Plan, lives: tuple[bool, ...]) -> int:
    """Live undisturbed, with kills, or both; 0 if all was seen, and both lives came to the same."""
    if FAKETIME is None:
        say("libfaketime is not installed: apt install faketime")
        return 2
    began, states = time.monotonic(), []
    with open_clock() as clock:
        for disturbed in lives:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                states.append(await live_once(Path(folder), clock, plan, disturbed=disturbed))
    if not same(states[0], states[-1]):
        say(f"the lives differ:\n{states[0]}\n{states[-1]}")
        return 1
    say(f"all was seen, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", dest="plan", action="store_const", const=FEW, default=MONTH, help="only four days")
    parser.add_argument("--year", dest="plan", action="store_const", const=YEAR, help="a hundred campaigns")
    parser.add_argument("--only", choices=("undisturbed", "disturbed"), help="one of the two lives")
    given = parser.parse_args()
    chosen = {"undisturbed": (False,), "disturbed": (True,), None: (False, True)}[given.only]
    sys.exit(asyncio.run(main(given.plan, chosen)))
