"""The fleet's page in a real Chromium when the broker or its own server is away, or a view cannot be read."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.store import Store
from fedge.system.files import write_atomically
from tests.support.shop import make_shop

pytest.importorskip("selenium")
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import INSTALLED, chromium
from tests.support.page import WAIT_S, complaints, see, serve_page

HOLD_READS = """
    const read = fetch;
    globalThis.fetch = (path, more) => String(path).startsWith('api/rounds')
        ? new Promise((go) => {
            globalThis.fail = () => go(new Response('{"error": "the store is busy"}', {status: 400}));
        })
        : read(path, more);
    location.hash = 'round/3';
"""
SLOW = {"offline": False, "latency": 10 * WAIT_S * 1000, "downloadThroughput": -1, "uploadThroughput": -1}
"""A server that takes questions and never answers."""


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


def hear(browser: Any, text: str) -> str:
    """Wait until a red line says this; all red lines."""
    alarm = browser.find_element("id", "alarm")
    WebDriverWait(browser, WAIT_S).until(lambda _: text in alarm.text, f"{text!r} is in no red line")
    return str(alarm.text)


def test_a_red_line_in_every_view_says_that_the_broker_is_away_and_its_devices_are_unknown(
    browser: Any, store: Store
) -> None:
    with serve_page(store.home) as url:
        browser.get(f"{url}#fleet")
        see(browser, "11 of 12")
        away = {"connected": False, "since": time.time() - 180, "address": "broker.example:8883"}
        change(store, broker=away)
        red = hear(browser, "The coordinator does not reach the broker broker.example:8883")
        assert "since 3 min: start the broker" in red
        see(browser, "devices online\nunknown")
        assert not {"online", "offline"} & {pill.text for pill in browser.find_elements("css selector", "main .pill")}
        for view, text in (("rounds", "began"), ("events", "round done"), ("device/cam1", "What it was asked")):
            browser.execute_script(f"location.hash = '{view}'")
            see(browser, text)
            assert "does not reach the broker" in browser.find_element("id", "alarm").text, view
        change(store, broker=away | {"connected": True})
        WebDriverWait(browser, WAIT_S).until(lambda b: not b.find_element("id", "alarm").text)
        assert complaints(browser) == []


def test_a_red_line_says_that_the_pages_own_server_is_away_or_does_not_answer_until_it_does(
    browser: Any, store: Store
) -> None:
    with serve_page(store.home) as url:
        browser.get(f"{url}#fleet")
        see(browser, "cam12")
    hear(browser, "server does not answer; trying again. What is shown is ")
    see(browser, "cam12")  # what was read stays
    with serve_page(store.home, port=int(url.rstrip("/").rpartition(":")[2])):
        WebDriverWait(browser, WAIT_S).until(lambda b: not b.find_element("id", "alarm").text)
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW)
        hear(browser, "server does not answer")
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW | {"latency": 0})
        WebDriverWait(browser, WAIT_S).until(lambda b: not b.find_element("id", "alarm").text)


def test_a_view_says_that_it_is_read_and_why_it_cannot_be(browser: Any, store: Store) -> None:
    with serve_page(store.home) as url:
        browser.get(f"{url}#rounds")
        see(browser, "began")
        browser.execute_script(HOLD_READS)
        see(browser, "Loading…")
        WebDriverWait(browser, WAIT_S).until(lambda b: b.execute_script("return Boolean(globalThis.fail)"))
        browser.execute_script("fail()")
        see(browser, "The store is busy")
        assert not browser.find_element("id", "alarm").text
        browser.execute_script("location.hash = 'rounds'")
        see(browser, "began")
