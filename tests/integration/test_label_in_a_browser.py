"""`fedge label` in a real Chromium, by keyboard alone: what is decided is in the store, also after kill -9."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.samples import SampleStore
from fedge.data.task import Preprocessing, TaskSpec

pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import INSTALLED, chromium

TASK = TaskSpec(
    name="g",
    classes=("cat", "dog"),
    input_shape=(1, 4, 4),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, image_mode="L"),
)
WAIT_S = 300


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not INSTALLED:
        pytest.skip("chromium and chromium-driver are not installed")
    with chromium() as driver:
        driver.execute_cdp_cmd("Network.enable", {})
        yield driver


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 10\n")
    with SampleStore(tmp_path, TASK) as store:
        for k in range(5):
            store.add(np.full((4, 4), 50 * k, np.uint8), None, origin="http")
    return tmp_path


@contextlib.contextmanager
def label(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`fedge label` and its address; killed on the way out."""
    program = [sys.executable, "-m", "fedge", "label", str(home), "--port", "0", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def wait_for(browser: Any, place: str, alt: str = "") -> None:
    """Wait until this place is shown, with this sample."""

    def is_shown(b: Any) -> bool:
        found = b.execute_script("return [place.textContent, sample.querySelector('img')?.alt ?? '', sample.innerText]")
        return found[0] == place and (not alt or alt in found[1:])

    WebDriverWait(browser, WAIT_S).until(is_shown, f"{place} {alt}")


def list_decided(home: Path) -> dict[int, tuple[int | None, bool]]:
    with SampleStore(home) as store:
        return {sample.number: (sample.label, sample.sensitive) for sample in store.list_samples()}


def test_keys_alone_label_mark_delete_and_go_back(browser: Any, home: Path) -> None:
    with label(home) as (_, url):
        browser.get(url)
        wait_for(browser, "1 of 5", "sample 5")
        press(browser, "2")
        wait_for(browser, "2 of 5", "sample 4")
        press(browser, Keys.ARROW_RIGHT)
        wait_for(browser, "3 of 5", "sample 3")
        press(browser, Keys.BACKSPACE, Keys.SPACE)
        WebDriverWait(browser, WAIT_S).until(
            lambda b: b.execute_script("return mark.getAttribute('aria-pressed')") == "true"
        )
        press(browser, "1")
        wait_for(browser, "4 of 5", "sample 2")
        press(browser, Keys.DELETE)
        wait_for(browser, "4 of 4", "sample 1")
        press(browser, *[Keys.ARROW_LEFT] * 3)
        wait_for(browser, "1 of 4", "sample 5")
        press(browser, "1")  # it was no dog after all
        wait_for(browser, "2 of 4", "sample 4")
        press(browser, *[Keys.ARROW_RIGHT] * 3)
        wait_for(browser, "end of 4", "That was the last one.")
    assert list_decided(home) == {5: (0, False), 4: (None, False), 3: (0, True), 1: (None, False)}


def test_what_was_acknowledged_survives_kill_9_and_what_was_not_is_said(browser: Any, home: Path) -> None:
    with label(home) as (process, url):
        browser.get(url)
        wait_for(browser, "1 of 5", "sample 5")
        press(browser, "2")
        wait_for(browser, "2 of 5")
        process.kill()
        process.wait()
        assert list_decided(home)[5] == (1, False)
        WebDriverWait(browser, WAIT_S).until(lambda b: press(b, "1") or "not saved" in error_of(b))
        assert browser.execute_script("return place.textContent") == "2 of 5"
    with label(home) as (_, url):
        browser.get(url)
        wait_for(browser, "1 of 4", "sample 4")


def test_what_nobody_can_see_gets_no_label(browser: Any, home: Path) -> None:
    with label(home) as (_, url):
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*picture/5"]})
        browser.get(url)
        WebDriverWait(browser, WAIT_S).until(lambda b: "cannot be shown" in error_of(b))
        press(browser, "1", Keys.DELETE, Keys.ARROW_RIGHT)
        wait_for(browser, "2 of 5", "sample 4")
        assert error_of(browser) == ""
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    assert list_decided(home)[5] == (None, False)


def error_of(browser: Any) -> str:
    return str(browser.find_element("id", "error").text)
