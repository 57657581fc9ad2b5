"""The fleet's page for a browser: served beside the test, looked at, logged in to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from coordinator.page.server import Page
from coordinator.rollout.overview import Overview
from coordinator.store.store import Store

TOKEN = "0123456789abcdef"
WAIT_S = 300


@contextlib.contextmanager
def beside() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Carries coroutines out in a thread with a loop of its own, so that the test may wait for the browser."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextlib.contextmanager
def serve_page(home: Path, rollouts: Overview | None = None, port: int = 0) -> Iterator[str]:
    """The page's URL."""
    with beside() as do:
        opened = lambda: Store(home, intake=True)  # noqa: E731
        page = Page(home, opened, host="127.0.0.1", port=port, token=TOKEN, rollouts=rollouts)
        do(page.__aenter__())
        try:
            yield page.url
        finally:
            do(page.__aexit__(None, None, None))


def see(browser: Any, text: str) -> None:
    """Wait until the page says this."""
    try:
        WebDriverWait(browser, WAIT_S).until(lambda b: text in b.find_element("id", "main").text)
    except TimeoutException:
        shown = browser.find_element("tag name", "body").text
        raise AssertionError(f"{text!r} is not in what the page shows: {shown}") from None


def log_in(browser: Any, url: str) -> None:
    browser.get(url)
    WebDriverWait(browser, WAIT_S).until(lambda b: b.find_elements("css selector", '[data-key="login"]'))
    browser.find_element("css selector", '[data-key="login"]').click()
    browser.find_element("css selector", "dialog input").send_keys(TOKEN + Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: "Pause" in b.find_element("id", "actions").text)


def put_together(columns: dict[str, Any]) -> dict[str, Any]:
    """The rows by key of a table that travels in columns."""
    rows: dict[int, dict[str, Any]] = {}
    for name, column in columns.items():
        for place, value in zip(column.get("at", range(len(column["is"]))), column["is"], strict=True):
            rows.setdefault(place, {})[name] = value
    return {str(row.get("id", row.get("round", ""))): row for row in rows.values()}


def complaints(browser: Any) -> list[str]:
    """What the browser has found wrong since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
