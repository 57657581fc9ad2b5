"""A day of a fleet, with real programs: `make day`. It says what happened, and ends with 0 only if all of it was seen.

morning    a device falls ill, and `fedge why` tells it
noon       a backup is restored on another home, and the round under way goes on
afternoon  a device is retired; an agent of fedge 0.1 comes, and is told to be updated
evening    a rollout is stopped from the page, in a browser
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from coordinator.store.records import OrderStatus
from coordinator.store.store import Store
from fedge.commands.broker import LocalBroker
from fedge.data.validation import Validation
from fedge.tasks import write_task
from fedge.wire.topics import Topics
from tests.homes.make import HOMES, TASK
from tests.support.broker import local_broker, transport
from tests.support.browser import chromium
from tests.support.programs import WAIT_S, Programs
from tests.support.rollouts import release_of
from tests.support.trained_bundles import trained_bundle
from tests.support.waiting import until

DEVICES = ("cam1", "cam2", "cam3", "cam4")
OLD_REPORT = next((HOMES / "0.1.0/mid_round/cam0/outbox/reports").iterdir())
"""What an agent of fedge 0.1 sends."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)  # noqa: T201


class Day(Programs):
    """The programs of a fleet in a folder."""

    def __init__(self, folder: Path, broker: LocalBroker) -> None:
        super().__init__(folder)
        self.broker = broker
        self.shop = folder / "shop"
        write_task(TASK, folder / "task.json")
        self.at = ("--broker", f"{broker.host}:{broker.port}", "--federation", "shop")
        self._common = (*self.at, "--task", folder / "task.json")
        rng = np.random.default_rng(0)
        self.y = np.arange(60) % 3
        self.x = (rng.normal(size=(60, 6)) + 3 * np.eye(6)[self.y]).astype(np.float32)
        for device in DEVICES:
            np.savez(folder / f"{device}.npz", x=self.x, y=self.y)

    async def coordinator(self) -> None:
        settings = ("--method", "fedavg", "--rounds", 5000, "--devices", 4, "--local-steps", 1, "--deadline-s", 600)
        await self.begin(
            "coordinator",
            "coordinator",
            *self._common,
            "--home",
            self.shop,
            "--task",
            self.folder / "task.json",
            *settings,
        )

    async def agent(self, device: str, *more: object) -> None:
        own = ("--id", device, "--home", self.folder / device, "--data", self.folder / f"{device}.npz")
        await self.begin(device, "agent", *self._common, *own, *more)


def entries(home: Path, number: int) -> dict[str, tuple[OrderStatus, str]]:
    """By device: how the order of a round stands, and its id."""
    with closing(Store(home, intake=True)) as store:
        return {entry.order.device_id: (entry.status, entry.order.id) for entry in store.get_entries(number)}


def under_way(home: Path) -> int:
    """The round after the last one that ended."""
    with closing(Store(home, intake=True)) as store:
        return max(store.get_round_seconds(), default=0) + 1


async def a_device_falls_ill(day: Day) -> None:
    await day.coordinator()
    for device in DEVICES:
        await day.agent(device)
    await until((day.shop / "summary.json").exists)
    await until(lambda: under_way(day.shop) > 1)
    say(f"four devices; fedge status: {await day.sees('is under way', 'status', '--home', day.shop)}")
    await day.end("cam3")
    await day.agent("cam3", "--min-free-ram-gb", 100_000)  # it has less memory than its owner wants to keep free
    say(f"fedge why cam3: {await day.sees('memory', 'why', 'cam3', '--home', day.shop)}")


async def a_backup_is_restored_and_the_round_goes_on(day: Day) -> None:
    await day.end("cam3")
    await day.agent("cam3")
    await until(lambda: entries(day.shop, under_way(day.shop)).get("cam3", (None,))[0] is OrderStatus.ACCEPTED)
    day.running["cam4"].send_signal(signal.SIGSTOP)
    number = 0

    def waits_for_cam4() -> bool:
        nonlocal number
        number = under_way(day.shop)
        asked = entries(day.shop, number)
        return {i for i, (status, _) in asked.items() if status is OrderStatus.OPEN} == {"cam4"}

    await until(waits_for_cam4)
    before = entries(day.shop, number)
    say(f"round {number} waits for cam4, {len(before) - 1} others have answered")
    backup = day.folder / "backup"
    await day.fedge("backup", backup, "--home", day.shop)
    await day.end("coordinator", signal.SIGKILL)
    shutil.rmtree(day.shop)
    say("a backup was made; the coordinator's machine is lost")
    day.shop = day.folder / "shop-again"
    await day.fedge("restore", backup, "--home", day.shop)
    await day.coordinator()
    day.running["cam4"].send_signal(signal.SIGCONT)
    await until(lambda: under_way(day.shop) > number)
    after = entries(day.shop, number)
    assert {status for status, _ in after.values()} == {OrderStatus.ACCEPTED}
    del after["cam4"], before["cam4"]
    assert after == before
    say(f"restored on another home: round {number} kept what had been answered, and cam4's answer ended it")


async def a_device_is_retired(day: Day) -> None:
    await day.fedge("retire", "cam2", "--home", day.shop)
    say(f"fedge why cam2: {await day.sees('retired', 'why', 'cam2', '--home', day.shop)}")
    number = under_way(day.shop) + 1
    await until(lambda: under_way(day.shop) > number)
    assert set(entries(day.shop, number)) == {"cam1", "cam3", "cam4"}
    say(f"round {number} asked the three others")


async def an_old_agent_meets_a_new_coordinator(day: Day) -> None:
    topic = Topics("shop").make_agent_topic("cam0", "reports")
    async with transport(day.broker, "fedge-agent-shop-cam0") as old:
        await old.publish(topic, OLD_REPORT.read_bytes())
        say(f"fedge status: {await day.sees('update fedge on cam0', 'status', '--home', day.shop)}")


async def a_rollout_is_stopped_from_the_page(day: Day) -> None:
    folder, device = day.folder, day.folder / "cam1"
    for release, steps in ((1, 20), (2, 300)):
        trained_bundle(folder / f"bundle-{release}", TASK, day.x, day.y, release=release, steps=steps)
    Validation(day.x, day.y).save(device)
    releases = folder / "releases"
    await day.fedge("release", "init", releases)
    for release in (1, 2):
        await day.fedge("release", "add", releases, folder / f"bundle-{release}")
    await day.fedge("install", "--home", device, "--root", releases / "metadata/1.root.json", folder / "bundle-1")
    await day.begin("serve", "serve", *day.at, "--home", device, "--port", 0, "--id", "cam1")
    config = folder / "fleet.toml"
    config.write_text(f'[rollout]\nbroker = "{day.at[1]}"\nfederation = "shop"\nsoak_s = 600.0\n')
    url = await day.page("--home", day.shop, "--rollouts", releases, "--config", config)
    await asyncio.to_thread(_stop_it, url, (day.shop / "ui-token").read_text().strip(), lambda: release_of(device))
    await until(lambda: release_of(device) == 1)
    say("cam1 answers with release 1 again")


def _stop_it(url: str, token: str, release: Callable[[], int]) -> None:
    """In the page: log in, start the rollout of release 2, and stop it when the first device has it."""
    with chromium() as browser:
        wait = WebDriverWait(browser, WAIT_S, ignored_exceptions=(Exception,))

        def press(selector: str) -> None:
            wait.until(lambda b: b.find_element("css selector", selector).click() or True, selector)

        def see(text: str) -> None:
            try:
                wait.until(lambda b: text in b.find_element("id", "main").text)
            except TimeoutException:
                page = browser.find_element("css selector", "body").text
                console = [each["message"] for each in browser.get_log("browser")]
                raise AssertionError(f"the page never says {text!r}; it says:\n{page}\n{console}") from None

        browser.get(f"{url.rstrip('/')}/#rollouts")
        press('[data-key="login"]')
        browser.find_element("css selector", "dialog input").send_keys(token + Keys.ENTER)
        press('[data-key="a:rollout-start:releases"]')
        press("#confirm")
        see("running")
        wait.until(lambda _: release() == 2)
        say("the page: a rollout was started, and cam1 has release 2")
        press('[data-key="a:rollout-abort:releases"]')
        press("#confirm")
        see("rolled back")
        say("the page: it was stopped, and rolled back")


STEPS = (
    a_device_falls_ill,
    a_backup_is_restored_and_the_round_goes_on,
    a_device_is_retired,
    an_old_agent_meets_a_new_coordinator,
    a_rollout_is_stopped_from_the_page,
)


async def main() -> None:
    """The whole day, in a folder of its own that is then deleted."""
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker("auto", Path(folder)) as broker:
            day = Day(Path(folder), broker)
            try:
                for step in STEPS:
                    say(step.__name__.replace("_", " ").upper())
                    await step(day)
            except BaseException:
                for log in sorted(day.folder.glob("*.log")):
                    say(f"--- the end of {log.name}\n{log.read_text()[-1500:]}")
                raise
            finally:
                await day.kill_all()
    say(f"all was seen, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
