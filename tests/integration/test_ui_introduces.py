"""The introduction of a campaign's bundles, steered from the fleet's page in a real Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.rollout.introduction import Introducer
from coordinator.rollout.overview import Overview
from coordinator.rollout.settings import IntroductionSettings
from coordinator.store.store import Store
from export.signing import Repository
from fedge.commands.broker import LocalBroker
from fedge.system.files import write_atomically
from tests.deploy.bundles import other_gate, poor_gate
from tests.support.broker import settings
from tests.support.introducing import leave_bundle
from tests.support.rollouts import release_of
from tests.support.runtime_device import FEDERATION, device, prepare
from tests.support.shop import make_shop

pytest.importorskip("selenium")
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import INSTALLED, chromium
from tests.support.page import WAIT_S, beside, complaints, log_in, see, serve_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not INSTALLED:
        pytest.skip("chromium and chromium-driver are not installed")
    with chromium() as driver:
        yield driver


@pytest.fixture(autouse=True)
def _leave(browser: Any) -> Iterator[None]:
    """Leave the page before its server ends, and forget what the browser said."""
    yield
    browser.get("about:blank")
    browser.get_log("browser")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(make_shop(tmp_path / "server")) as opened:
        yield opened


def change(store: Store, **values: Any) -> None:
    """As the coordinator writes its summary."""
    summary = json.loads((store.home / "summary.json").read_text()) | values
    write_atomically(store.home / "summary.json", json.dumps(summary).encode())


def test_an_introduction_is_paused_resumed_and_taken_back_from_the_page(
    browser: Any, store: Store, repo: Path, old: Path, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    def press(name: str) -> None:
        WebDriverWait(browser, WAIT_S).until(
            lambda b: b.find_elements("css selector", f'[data-key="a:rollout-{name}:introduction"]')
        )[0].click()

    root = Repository(repo).read_root()
    homes = {name: prepare(tmp_path / name, old, root) for name in ("cam1", "cam2")}
    leave_bundle(homes["cam1"], 2, other_gate)
    leave_bundle(homes["cam2"], 2, poor_gate)
    how = IntroductionSettings(stages="1", soak_s=600.0)
    tell = lambda *_: change(store, introduction=introducer.describe())  # noqa: E731
    introducer = Introducer(store.home, settings(mosquitto), FEDERATION, how, tell)
    introducer.introduce(2, list(homes))
    campaign = {"number": 2, "state": "resting", "began_at": 5.0, "ended_at": 9.0, "why": "drift", "next_at": None}
    change(store, campaign=campaign | {"history": []}, introduction=introducer.describe())
    with contextlib.ExitStack() as stack:
        do = stack.enter_context(beside())
        for name, home in homes.items():
            on = device(settings(mosquitto), home, name, waits=True)
            do(on.__aenter__())
            stack.callback(lambda on=on: do(on.__aexit__(None, None, None)))
        running = do(begin(introducer.run()))
        stack.callback(lambda: do(end(running)))
        url = stack.enter_context(serve_page(store.home, Overview([], None, store.home)))
        log_in(browser, f"{url}#campaigns")
        see(browser, "in service\non 1 of 2 devices")
        see(browser, "1 device, since the bundle there was better")
        kept = browser.find_element("css selector", '[data-key="d:cam2"]').find_element("xpath", "ancestor::tr").text
        assert "kept its own" in kept
        assert "the running bundle is more accurate" in kept
        press("pause")
        see(browser, "state\npaused")
        press("resume")
        see(browser, "state\nrunning\nstage\n1 of 1")
        press("abort")
        dialog = browser.find_element("id", "dialog")
        assert "The devices that run a new bundle go back" in dialog.text
        assert browser.switch_to.active_element.text == "Cancel"
        browser.find_element("id", "confirm").click()
        see(browser, "state\naborted")
        see(browser, "rolled back")
        assert {release_of(home) for home in homes.values()} == {1}
        browser.execute_script("location.hash = 'fleet'")
        see(browser, "The introduction of campaign 2 was aborted")
        assert complaints(browser) == []


async def begin(work: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)


async def end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
