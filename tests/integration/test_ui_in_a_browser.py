"""The fleet's page in a real Chromium: what it shows, that it acts, and that what devices say stays text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import DeviceLine, EarlierRollout, Folder, Record, RolloutEvent
from coordinator.rollout.overview import Overview
from coordinator.store.records import Event
from coordinator.store.requests import read_requests
from coordinator.store.store import Store
from export.signing import Repository
from fedge.commands.broker import LocalBroker
from fedge.wire.messages import Phase, Quality, RolloutState
from tests.support.broker import settings
from tests.support.rollouts import release_of
from tests.support.runtime_device import FEDERATION, device, prepare
from tests.support.shop import EVIL, NOW, make_shop, set_last_sign

pytest.importorskip("selenium")
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import INSTALLED, chromium
from tests.support.page import TOKEN, WAIT_S, beside, complaints, log_in, see, serve_page

UNTOLD = "not told by its owner"
GONE = (NoSuchElementException, StaleElementReferenceException)
"""What is on the page may be gone after a refresh."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not INSTALLED:
        pytest.skip("chromium and chromium-driver are not installed")
    with chromium() as driver:
        yield driver


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(make_shop(tmp_path)) as opened:
        yield opened


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with serve_page(store.home) as url:
        yield url


def begin(browser: Any) -> None:
    """Leave the page of the test before, whose server has ended, and what the browser said of that."""
    browser.get("about:blank")
    browser.get_log("browser")


def test_every_view_shows_what_there_is_and_what_devices_say_stays_text(browser: Any, url: str) -> None:
    begin(browser)
    for view, text in (
        ("fleet", "not told by its owner"),
        ("clusters", "expert 1, 5 devices"),
        ("rounds", "answered"),
        ("accuracy", "the worst first"),
        ("samples", "drift"),
        ("rollouts", "No repository"),
        ("events", "onerror"),
        ("device/cam12", "onerror"),
        ("round/3", "cam12"),
    ):
        browser.get(f"{url}#{view}")
        browser.refresh()
        see(browser, text)
        assert not browser.find_elements("css selector", "main img")
    assert browser.title == "shop · fedge"
    assert complaints(browser) == []


def test_experts_for_all_devices_are_not_called_one_model(browser: Any, tmp_path: Path) -> None:
    begin(browser)
    told = {"method": "fedcoe", "split": False, "clusters": {}, "experts": 5, "top": 2}
    with contextlib.closing(make_shop(tmp_path, **told)) as store, serve_page(store.home) as url:
        browser.get(f"{url}#clusters")
        see(browser, "There are no clusters, but 5 experts and a gate, of which the best 2 answer each input")
        assert "one model" not in browser.find_element("id", "main").text


VIEWS = {
    "fleet": "cam12", "clusters": "cam12", "rounds": "round", "accuracy": "round", "samples": "cam12",
    "events": "cam12", "rollouts": "cam1 refused",
    "device/cam12": "What it was asked", "device/cam2": UNTOLD, "round/3": "cam12",
}  # fmt: skip
"""Each, and what it shows once it is there."""


@pytest.fixture
def url_of_all(store: Store, repo: Path) -> Iterator[str]:
    """The page with a rollout."""
    Folder(repo).write(RECORD)
    with serve_page(store.home, Overview([repo], None)) as url:
        yield url


def test_a_phone_in_the_dark_needs_no_sideways_scrolling(browser: Any, url_of_all: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    try:
        for view, text in VIEWS.items():
            browser.get(f"{url_of_all}#{view}")
            browser.refresh()
            see(browser, text)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, view
            tab = browser.find_element("css selector", "[aria-current=page]")
            assert 0 <= tab.rect["x"] - browser.execute_script("return scrollX") <= 390 - tab.rect["width"], view
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 28)"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_every_view_is_reached_by_keyboard_alone(browser: Any, url_of_all: str) -> None:
    def follow(words: str, text: str) -> None:
        for _ in range(80):
            ActionChains(browser).send_keys(Keys.TAB).perform()
            if browser.switch_to.active_element.text in {words, f"{words} 1"}:  # matters to look at
                ActionChains(browser).send_keys(Keys.ENTER).perform()
                return see(browser, text)
        raise AssertionError(f"nothing called {words} can be reached by keyboard")

    for tab in ("Fleet", "Clusters", "Rounds", "Accuracy", "Samples", "Rollouts", "Events"):
        browser.get(url_of_all)
        browser.refresh()
        see(browser, "cam12")
        follow(tab, VIEWS[tab.lower()])
    for view, link, text in (
        ("fleet", "cam12", "What it was asked"), ("clusters", "cam3", "What it was asked"),
        ("rollouts", "cam1", "What it was asked"), ("rounds", "3", "Round 3"), ("device/cam12", "3", "Round 3"),
        ("round/3", "cam12", "What it was asked"),
    ):  # fmt: skip
        browser.get(f"{url_of_all}#{view}")
        browser.refresh()
        see(browser, VIEWS[view])
        follow(link, text)


def test_by_keyboard_alone_somebody_logs_in_and_pauses_the_run(browser: Any, url: str, store: Store) -> None:
    def press(*keys: str) -> None:
        ActionChains(browser).send_keys(*keys).perform()

    def focus(words: str) -> None:
        for _ in range(40):
            press(Keys.TAB)
            if browser.switch_to.active_element.text == words:
                return
        raise AssertionError(f"nothing called {words} can be reached by keyboard")

    browser.get(f"{url}#fleet")
    browser.refresh()
    see(browser, "cam1")
    assert "Pause" not in browser.find_element("id", "actions").text
    focus("Log in")
    press(Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: b.find_element("css selector", "dialog input").is_displayed())
    press(TOKEN, Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: "Pause" in b.find_element("id", "actions").text)
    focus("Pause")
    press(Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: b.find_element("id", "notice").text.startswith("No further round"))
    assert read_requests(store).paused


def test_a_run_that_is_done_can_be_neither_paused_nor_clustered_anew(browser: Any, url: str, store: Store) -> None:
    log_in(browser, url)
    summary = json.loads((store.home / "summary.json").read_text())
    (store.home / "summary.json").write_text(json.dumps(summary | {"done": True, "installed": {}}))

    def without_actions(_: Any) -> bool:
        browser.refresh()
        see(browser, "cam1")
        return bool(browser.find_element("id", "actions").text == "Log out")

    WebDriverWait(browser, WAIT_S).until(without_actions)  # what one page has read a moment ago the next one is shown


def test_what_happens_shows_without_a_reload(browser: Any, url: str, store: Store) -> None:
    browser.get(f"{url}#events")
    browser.refresh()
    see(browser, "onerror")
    store.record_events(
        Event(at=NOW + 99, round=4, name="problem", device="cam7", fields={"reason": "it fell ill"})
    ).result()
    see(browser, "it fell ill")


RECORD = Record(
    plan=Plan(id="2-ab", target="2/manifest.json", release=2, digest="a" * 64),
    progress=Progress(began=NOW, state=RolloutState.ABORTED, share=0.1, reasons=(f"cam1 refused: {EVIL}",)),
    devices={
        "cam1": DeviceLine(
            phase=Phase.REFUSED, release=1, reason=EVIL, takes_part=True, now=Quality(n=9, accuracy=0.5)
        ),
        "cam2": DeviceLine(phase=Phase.SERVING, release=1),
    },
    events=(RolloutEvent(at=NOW, device="cam1", text=EVIL),),
    earlier=(EarlierRollout(id="1-ab", target="1/manifest.json", state=RolloutState.DONE, began=NOW, reasons=(EVIL,)),),
)


def test_a_silent_coordinator_is_told_in_red_and_its_devices_are_unknown(browser: Any, url: str, store: Store) -> None:
    begin(browser)
    browser.get(url)
    see(browser, "11 of 12")
    set_last_sign(store.home, 46 * 60)
    red = "The coordinator has been silent for 46 min"
    WebDriverWait(browser, WAIT_S).until(lambda b: red in b.find_element("id", "alarm").text)
    assert "online" not in {pill.text for pill in browser.find_elements("css selector", "main .pill")}
    set_last_sign(store.home, 0)
    see(browser, "11 of 12")
    assert complaints(browser) == []


def test_what_devices_say_of_a_rollout_stays_text(browser: Any, store: Store, repo: Path) -> None:
    Folder(repo).write(RECORD)
    begin(browser)
    with serve_page(store.home, Overview([repo], None)) as url:
        browser.get(f"{url}#rollouts")
        see(browser, "cam1 refused: <img")
        see(browser, "Earlier rollouts")
        assert UNTOLD in browser.find_element("css selector", "[data-rollout=repo] table").text  # cam2
        assert not browser.find_elements("css selector", "main img")
        assert not browser.find_elements("css selector", 'main [data-key^="a:"]')  # nobody has logged in
        assert complaints(browser) == []


def test_a_rollout_is_started_paused_supervised_again_and_rolled_back_from_the_page(
    browser: Any, store: Store, repo: Path, old: Path, new: Path, mosquitto: LocalBroker, tmp_path: Path
) -> None:
    def press(key: str) -> None:
        find = lambda b: b.find_element("css selector", f'[data-key="a:rollout-{key}:repo"]')  # noqa: E731
        WebDriverWait(browser, WAIT_S, ignored_exceptions=GONE).until(lambda b: find(b).click() or True)

    def confirm() -> None:
        WebDriverWait(browser, WAIT_S).until(lambda b: b.find_element("id", "confirm").is_displayed())
        browser.find_element("id", "confirm").click()

    Repository(repo).add(new)
    config = tmp_path / "fleet.toml"
    broker = f"{mosquitto.host}:{mosquitto.port}"
    config.write_text(f'[rollout]\nbroker = "{broker}"\nfederation = "{FEDERATION}"\nsoak_s = 600.0\n')
    camera = prepare(tmp_path / "cam1", old, Repository(repo).read_root())
    overview = Overview([repo], config)
    with contextlib.ExitStack() as stack:
        do = stack.enter_context(beside())
        on = device(settings(mosquitto), camera, "cam1")
        do(on.__aenter__())
        stack.callback(lambda: do(on.__aexit__(None, None, None)))
        url = stack.enter_context(serve_page(store.home, overview))
        log_in(browser, f"{url}#rollouts")
        press("start")
        confirm()
        see(browser, "running: stage 1 of 3")
        see(browser, "runs on\n1 of 1 devices")  # paused before that, it would have nothing to go back from
        press("pause")
        see(browser, "paused: stage 1 of 3")
        (supervisor,) = overview._begun
        supervisor.kill()
        supervisor.wait()
        see(browser, "nobody supervises it now")
        press("go-on")
        press("abort")
        confirm()
        see(browser, "rolled back")
        assert overview._begun[-1].wait(WAIT_S) == 1
        assert release_of(camera) == 1
