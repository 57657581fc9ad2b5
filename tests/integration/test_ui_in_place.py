"""The fleet's page while rounds run, in a real Chromium: nothing moves away, and a thousand devices are few nodes."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.store import Store
from tests.support.rounds_of_a_shop import play_round, play_rounds
from tests.support.shop import make_shop, set_last_sign

pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import INSTALLED, chromium
from tests.support.page import TOKEN, WAIT_S, complaints, log_in, see, serve_page

MAX_NODES = 1500
MAX_REFRESH_BYTES = 60_000
NODES = "let n = 0; for (const w = document.createTreeWalker(document); w.nextNode(); n += 1); return n"
"""Elements and texts."""
CLICKS = 50
HOLD_S = 0.12
"""A finger's time on a button; a refresh comes twice a second."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not INSTALLED:
        pytest.skip("chromium and chromium-driver are not installed")
    with chromium() as driver:
        yield driver


@pytest.fixture(autouse=True)
def _leave(browser: Any) -> Iterator[None]:
    """Leave the page before its server ends, and forget what the browser said."""
    browser.get("about:blank")
    browser.get_log("browser")
    yield
    browser.get("about:blank")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(make_shop(tmp_path)) as opened:
        yield opened


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with serve_page(store.home) as url:
        yield url


def find(browser: Any, selector: str) -> Any:
    return WebDriverWait(browser, WAIT_S).until(lambda b: b.find_elements("css selector", selector))[0]


def test_of_fifty_clicks_during_rounds_none_is_lost(browser: Any, url: str, store: Store) -> None:
    browser.get(f"{url}#fleet")
    see(browser, "cam12")
    with play_rounds(store):
        for k in range(CLICKS // 2):
            target = find(browser, f'[data-key="d:cam{k % 12 + 1}"]')
            ActionChains(browser).move_to_element(target).click_and_hold().pause(HOLD_S).release().perform()
            assert browser.execute_script("return location.hash") == f"#device/cam{k % 12 + 1}"
            see(browser, "What it was asked")
            back = find(browser, ".back a")
            ActionChains(browser).move_to_element(back).click_and_hold().pause(HOLD_S).release().perform()
            assert browser.execute_script("return location.hash") == "#fleet"
            see(browser, "11 of 12")
    assert complaints(browser) == []


def test_focus_selection_scrolling_and_what_is_typed_survive_a_refresh(browser: Any, url: str, store: Store) -> None:
    browser.get(f"{url}#fleet")
    see(browser, "cam12")
    browser.execute_script(
        "getSelection().selectAllChildren(document.querySelector('[data-key=\"d:cam7\"]')); scrollTo(0, 120);"
        "document.querySelector('[data-key=\"d:cam7\"]').marked = 1"
    )
    search = find(browser, '[data-key="search"]')
    rng = random.Random(1)
    for number in range(4, 7):
        before = browser.execute_script("return document.querySelector('.tiles').innerText")
        play_round(store, number, rng)
        WebDriverWait(browser, WAIT_S).until(
            lambda b, before=before: b.execute_script("return document.querySelector('.tiles').innerText") != before
        )
        assert browser.execute_script("return String(getSelection())") == "cam7"
        assert browser.execute_script("return scrollY") == 120
        assert browser.execute_script("return document.querySelector('[data-key=\"d:cam7\"]').marked") == 1
    search.send_keys("cam1")
    play_round(store, 7, rng)
    see(browser, "7 of 30")
    assert browser.switch_to.active_element == search
    search.send_keys("2")
    assert search.get_attribute("value") == "cam12"
    see(browser, "1 of 12")


@pytest.fixture
def thousand(tmp_path: Path) -> Iterator[Store]:
    failing = {f"cam{k}": {"count": 3, "since": 1.0, "reason": "it has no room"} for k in range(1, 101)}
    with contextlib.closing(make_shop(tmp_path, 1000, failing=failing)) as opened:
        yield opened


def test_a_thousand_devices_are_few_nodes_and_a_refresh_is_few_bytes(browser: Any, thousand: Store) -> None:
    views = ("fleet", "clusters", "rounds", "accuracy", "samples", "events", "device/cam12", "round/3", "round/4")
    measured: dict[str, tuple[int, int, int]] = {}
    rng = random.Random(2)
    with serve_page(thousand.home) as url:
        log_in(browser, url)
        for number, view in enumerate(views, start=4):
            browser.execute_script(f"location.hash = '{view}'")
            see(browser, {"clusters": "expert 1"}.get(view, "cam1") if view != "rounds" else "began")
            browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
            browser.execute_script("performance.clearResourceTimings()")
            play_round(thousand, number, rng)
            header = f"Round {number + 1} of 30"
            WebDriverWait(browser, WAIT_S).until(lambda b, t=header: t in b.find_element("id", "phase").text)
            read = browser.execute_script(
                "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/api/') && "
                "!e.name.includes('stream')).map((e) => [e.name, e.transferSize, e.decodedBodySize])"
            )
            most: dict[str, int] = {}
            for name, sent, _ in read:
                part = name.partition("?")[0]
                most[part] = max(most.get(part, 0), sent)
            measured[view] = (browser.execute_script(NODES), sum(most.values()), max(size for *_, size in read))
    print(json.dumps(measured))  # noqa: T201
    assert max(nodes for nodes, *_ in measured.values()) <= MAX_NODES
    assert max(sent for _, sent, _ in measured.values()) <= MAX_REFRESH_BYTES
    assert complaints(browser) == []


def test_a_thousand_devices_are_searched_sorted_grouped_and_turned_over_in_pages(browser: Any, thousand: Store) -> None:
    def rows() -> list[str]:
        return [cell.text for cell in browser.find_elements("css selector", "tbody td.head")]

    with serve_page(thousand.home) as url:
        browser.get(f"{url}#fleet")
        see(browser, "1,000 of 1,000")
        assert rows() == [f"cam{k}" for k in range(1, 26)]
        find(browser, '[aria-label="Last page"]').click()
        see(browser, "976–1,000 of 1,000")
        assert rows()[-1] == "cam1000"
        find(browser, '[data-key="sort:fleet:device"]').click()
        assert rows()[0] == "cam1000"
        find(browser, '[data-key="search"]').send_keys("cam77")
        see(browser, "11 of 1,000")
        assert rows() == ["cam779", *(f"cam{k}" for k in range(778, 769, -1)), "cam77"]
        find(browser, '[data-key="group"]').send_keys("expert")
        groups = browser.find_elements("css selector", "tr.group")
        assert [group.text.split() for group in groups] == [["▼", "expert", str(k), n] for k, n in enumerate("353")]
        groups[0].find_element("css selector", "button").click()
        assert len(rows()) == 8
        browser.find_element("css selector", '[data-key="only"]').send_keys("offline")
        see(browser, "No device is like that.")


def test_who_logs_out_sees_no_buttons_any_more(browser: Any, url: str) -> None:
    log_in(browser, url)
    find(browser, '[data-key="logout"]').click()
    WebDriverWait(browser, WAIT_S).until(lambda b: b.find_element("id", "actions").text == "Log in")
    assert "logged out" in browser.find_element("id", "notice").text
    browser.refresh()
    see(browser, "cam12")
    assert browser.find_element("id", "actions").text == "Log in"


def test_errors_are_told_in_their_dialog_and_what_destroys_has_no_focus(browser: Any, url: str) -> None:
    browser.get(url)
    find(browser, '[data-key="login"]').click()
    field = find(browser, "dialog input")
    assert browser.switch_to.active_element == field
    field.send_keys("guess" + Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: "not the token" in b.find_element("id", "dialog").text)
    field.send_keys(TOKEN + Keys.ENTER)
    WebDriverWait(browser, WAIT_S).until(lambda b: "Pause" in b.find_element("id", "actions").text)
    browser.execute_script("location.hash = 'device/cam3'")
    retire = find(browser, '[data-key="a:retire:cam3"]')
    retire.click()
    assert browser.switch_to.active_element.text == "Cancel"
    browser.execute_script(
        'globalThis.fetch = async () => new Response(\'{"error": "the store is full"}\', {status: 400})'
    )
    browser.find_element("id", "confirm").click()
    WebDriverWait(browser, WAIT_S).until(lambda b: "The store is full" in b.find_element("id", "dialog").text)
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not browser.find_element("id", "dialog").is_displayed()


def test_on_a_phone_a_card_begins_with_its_device(browser: Any, url: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.get(f"{url}#fleet")
        see(browser, "cam12")
        card = find(browser, "tbody tr")
        name, state = (card.find_element("css selector", f"td.{each}") for each in ("head", "badge-cell"))
        assert (name.text, state.text) == ("cam1", "online")
        assert name.rect["y"] <= min(
            cell.rect["y"] for cell in card.find_elements("css selector", "td:not([data-empty])")
        )
        assert card.rect["height"] < 200
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_chart_tells_its_figures_by_keyboard_and_shows_ranges_of_time(browser: Any, url: str) -> None:
    browser.get(f"{url}#accuracy")
    see(browser, "the worst first")
    drawing = find(browser, '[data-chart="accuracy"]')
    drawing.send_keys(Keys.ARROW_LEFT)
    tip = find(browser, ".tip")
    WebDriverWait(browser, WAIT_S).until(lambda _: "round 3" in tip.text)
    assert "mean of the cohort 60 %" in tip.text
    drawing.send_keys(Keys.ARROW_LEFT)
    WebDriverWait(browser, WAIT_S).until(lambda _: "round 2" in tip.text)
    find(browser, '[data-key="range:accuracy:3600"]').click()
    see(browser, "Nothing was measured in this time.")


def test_what_needs_attention_comes_first_with_what_to_do(browser: Any, tmp_path: Path) -> None:
    campaign = {"number": 2, "state": "resting", "began_at": 5.0, "ended_at": 9.0, "why": "drift", "next_at": None}
    past = {
        "number": 1,
        "began_at": 1.0,
        "ended_at": 2.0,
        "why": "the first",
        "rounds": 3,
        "accuracy": 0.5,
        "experts": 2,
    }
    campaign |= {"history": [past | {"lineage": ["expert 2 was split from expert 1"]}]}
    introduction = {"campaign": 2, "state": "paused", "stage": 1, "stages": 3, "devices": 12, "running": 2, "kept": 1}
    introduction |= {"reasons": ["0.94 < 1.00 on 31 samples"]}
    failing = {"cam1": {"count": 3, "since": 1.0, "reason": "<b>memory</b>"}}
    changes = {"failing": failing, "campaign": campaign, "introduction": introduction}
    with contextlib.closing(make_shop(tmp_path, **changes)) as store, serve_page(store.home) as url:
        browser.get(f"{url}#fleet")
        see(browser, "Needs attention 2")
        first, second = browser.find_elements("css selector", ".attention li")
        assert "<b>memory</b>" in first.text
        assert "Run fedge why cam1" in first.text
        assert second.text.startswith("cam4 Its inputs are unlike")
        find(browser, '[data-key="t:campaigns"]').click()
        for words in ("Campaign 2", "expert 2 was split from expert 1", "0.94 < 1.00 on 31 samples", "1 of 3"):
            see(browser, words)
        set_last_sign(store.home, 3600)
        WebDriverWait(browser, WAIT_S).until(lambda b: "silent" in b.find_element("id", "alarm").text)


def test_events_are_filtered_and_the_answers_of_a_round_are_one_row(browser: Any, url: str) -> None:
    browser.get(f"{url}#events")
    see(browser, "11 answered, 1 late")
    events = [row.text for row in browser.find_elements("css selector", "tbody tr")]
    assert len([text for text in events if "round done" in text]) == 3
    assert not [text for text in events if text.startswith("answer")]
    find(browser, '[data-key="kind:problems"]').click()
    WebDriverWait(browser, WAIT_S).until(lambda b: "round done" not in b.find_element("id", "main").text)
    see(browser, "problem")
    find(browser, '[data-key="kind:all"]').click()
    find(browser, '[data-key="events:device"]').send_keys("cam3" + Keys.ENTER)
    see(browser, "done after 3.0 s")
    assert "the device trains the model on its own samples" in browser.find_element("id", "main").text
