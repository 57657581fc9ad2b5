"""The fleet's page in a real Chromium: what it shows, that it acts, and that what devices say stays text."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from coordinator.control import wishes_in
from coordinator.store import Event, Store
from coordinator.ui import Page
from tests.support.shop import NOW, make_shop

webdriver = pytest.importorskip("selenium.webdriver")

TOKEN = "0123456789abcdef"
WAIT_S = 60
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
QUIET = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in QUIET:
        options.add_argument(f"--{word}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(WAIT_S)
    yield driver
    driver.quit()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(make_shop(tmp_path)) as opened:
        yield opened


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    """The page, in a thread with a loop of its own, so that the test may wait for the browser."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    home = store.home
    page = Page(home, lambda: Store(home, intake=True), host="127.0.0.1", port=0, token=TOKEN)
    asyncio.run_coroutine_threadsafe(page.__aenter__(), loop).result(WAIT_S)
    yield page.url
    asyncio.run_coroutine_threadsafe(page.__aexit__(None, None, None), loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def see(browser: Any, text: str) -> None:
    """Wait until the page says this."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_S).until(lambda b: text in b.find_element("id", "main").text, text)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_every_view_shows_what_there_is_and_what_devices_say_stays_text(browser: Any, url: str) -> None:
    for view, text in (
        ("fleet", "not told by its owner"),
        ("clusters", "expert 1, 5 devices"),
        ("rounds", "answered"),
        ("accuracy", "the worst first"),
        ("rollouts", "No rollout"),
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


def test_a_phone_in_the_dark_needs_no_sideways_scrolling(browser: Any, url: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    try:
        for view in ("fleet", "clusters", "rounds", "accuracy", "events"):
            browser.get(f"{url}#{view}")
            browser.refresh()
            see(browser, "cam12" if view in {"fleet", "clusters", "events"} else "round")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, view
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 28)"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_by_keyboard_alone_somebody_logs_in_and_pauses_the_run(browser: Any, url: str, store: Store) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

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
    assert wishes_in(store).paused


def test_what_happens_shows_without_a_reload(browser: Any, url: str, store: Store) -> None:
    browser.get(f"{url}#events")
    browser.refresh()
    see(browser, "onerror")
    store.note(Event(at=NOW + 99, round=4, name="problem", device="cam7", fields={"reason": "it fell ill"})).result()
    see(browser, "it fell ill")
