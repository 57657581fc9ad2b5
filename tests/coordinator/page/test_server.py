"""The page's server: who may read and act, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientSession, CookieJar, TCPConnector

from coordinator.page import logins, news
from coordinator.page.logins import read_token
from coordinator.page.server import BROWSER, Page
from coordinator.store.records import Event
from coordinator.store.requests import read_requests
from coordinator.store.store import Store
from coordinator.watch.state import Watch
from fedge.errors import TransportError
from fedge.system.logs import LINES_PER_MINUTE
from fedge.wire.port import _Phase
from fedge.wire.streams import open_connection
from tests.deploy.tcp import connections
from tests.support.page import put_together
from tests.support.shop import EVIL, NOW, make_shop
from tests.support.waiting import until

TOKEN = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with contextlib.closing(make_shop(tmp_path)) as opened:
        yield opened


def page(home: Path, host: str = "127.0.0.1") -> Page:
    return Page(home, lambda: Store(home, intake=True), host=host, port=0, token=TOKEN)


@pytest.fixture
async def running(store: Store, tmp_path: Path) -> AsyncIterator[Page]:
    assert store
    async with page(tmp_path) as found:
        yield found


@pytest.fixture
async def http(running: Page) -> AsyncIterator[ClientSession]:
    own = {"cookie_jar": CookieJar(unsafe=True), "connector": TCPConnector(limit=0)}
    async with ClientSession(running.url, **own) as session:
        yield session


async def read_tables(http: ClientSession) -> dict[str, dict[str, Any]]:
    """The rows of the state by key, as a page puts them together."""
    answer = await (await http.get("api/state")).json()
    return {name: put_together(columns) for name, columns in answer["tables"].items()}


async def log_in(http: ClientSession) -> str:
    assert (await http.post("api/login", json={"token": TOKEN})).status == 200
    return str((await (await http.get("api/session")).json())["csrf"])


async def test_the_page_and_all_that_it_needs_come_from_the_package(http: ClientSession) -> None:
    scripts = [file.name for file in BROWSER.glob("*.js")]
    for name, kind in (("", "text/html"), ("page.css", "text/css"), *((name, "text/javascript") for name in scripts)):
        answer = await http.get(name)
        assert (answer.status, answer.content_type) == (200, kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http://" not in (text := (await answer.text()).replace("http://www.w3.org/2000/svg", ""))
        assert "https://" not in text
        assert "innerHTML" not in text


def test_every_step_has_words_for_people() -> None:
    words = (BROWSER / "words.js").read_text()
    steps = words[words.index("export const STEPS") :].partition("};")[0]
    told = set(re.findall(r"^\s*(\w+):", steps, re.MULTILINE))
    assert told >= {step.name for step in entry_points(group="fedge.steps")}


async def test_the_state_tells_devices_clusters_and_rounds(http: ClientSession) -> None:
    by_id = (tables := await read_tables(http))["devices"]
    assert len(by_id) == 12
    assert by_id["cam6"]["clusters"] == ["0", "1", "2"]
    assert (by_id["cam2"]["withholds"], by_id["cam2"].get("n_samples")) == (["count", "load", "loss", "use"], None)
    assert (by_id["cam4"]["health.drift"], by_id["cam4"]["health.n_failed"]) == (True, 3)
    assert by_id["cam3"]["why"] == "it is offline"
    assert (by_id["cam1"]["accuracy"], by_id["cam1"]["accuracy_round"]) == (0.6, 3)
    assert [(r["asked"], r["answered"], r["late"]) for r in tables["rounds"].values()] == [(12, 11, 1)] * 3
    assert [(r["bytes_up"], r["bytes_down"]) for r in tables["rounds"].values()] == [(400_000, 2_000_000)] * 3
    assert (await http.get("api/devices/cam12")).status == 200
    assert (await http.get("api/rounds/x")).status == 404
    assert (await http.get("api/events?last=zwei")).status == 400


async def test_accuracy_over_the_rounds_is_told_of_all_together_and_of_who_is_named(http: ClientSession) -> None:
    told = await (await http.get("api/accuracy?of=cam1,cam2,nobody")).json()
    assert told["of"] == {"cam1": [[1, 0.2], [2, 0.4], [3, 0.6]], "cam2": []}
    assert [row[0] for row in told["band"]] == [1, 2, 3]
    assert (await (await http.get("api/devices/cam1")).json())["accuracy"] == told["of"]["cam1"]


async def test_what_went_wrong_before_the_last_answer_is_no_trouble_any_more(http: ClientSession, store: Store) -> None:
    async def why() -> str:
        return str((await read_tables(http))["devices"]["cam12"]["why"])

    assert (await why()).startswith("round 3: <img")
    done = Event(at=NOW, round=4, name="answer", device="cam12", fields={"label": "train", "result": "done"})
    store.record_events(done).result()
    assert not await why()


async def test_why_a_device_is_not_chosen_shows_in_the_fleet(http: ClientSession, store: Store) -> None:
    fields = {"ids": ["cam1"], "overdue": [], "seconds": {"cam1": 1.0, "cam4": 9.0}, "deadline_s": 5.0}
    store.record_events(
        Event(at=NOW, round=4, name="round_begun"), Event(at=NOW, round=4, name="chosen", fields=fields)
    ).result()
    devices = (await read_tables(http))["devices"]
    assert (devices["cam1"]["now"], devices["cam1"]["why"]) == ("asked", "")
    told = "not chosen: it would take about 9 s, and the deadline is 5 s"
    assert (devices["cam4"]["now"], devices["cam4"]["why"]) == ("not asked", told)


async def test_the_bandits_estimates_and_the_share_of_outliers_are_told(http: ClientSession) -> None:
    rows = {d["device"]: d for d in (await (await http.get("api/rounds/1")).json())["devices"]}
    told = rows["cam1"]["chosen"]
    assert told.startswith("chosen among 13: it would take about 1 s, within the deadline of 20 s; ")
    assert told.endswith("; expected gain 0.300, exploration bonus 0.500")
    devices = (await read_tables(http))["devices"]
    assert [devices[i].get("outliers") for i in ("cam1", "cam2", "cam3")] == [0.025, None, None]


async def test_actions_take_a_login_and_the_word_that_only_the_page_has(http: ClientSession, store: Store) -> None:
    forged = await http.post("api/actions/pause", json={})
    assert forged.status == 401
    word = await log_in(http)
    for headers in ({}, {"X-Fedge-Token": "guess"}):
        assert (await http.post("api/actions/pause", json={}, headers=headers)).status == 403
    assert not read_requests(store).paused
    own = {"X-Fedge-Token": word}
    assert (await http.post("api/actions/pause", json={}, headers=own)).status == 200
    assert read_requests(store).paused
    assert (await http.post("api/actions/retire", json={"device": "cam3"}, headers=own)).status == 200
    assert read_requests(store).retired == ("cam3",)
    assert (await http.post("api/actions/retire", json={"device": EVIL}, headers=own)).status == 400
    assert (await http.post("api/actions/explode", json={}, headers=own)).status == 404
    assert (await http.post("api/actions/pause", data=b"{" * 3000, headers=own)).status == 400
    assert (await http.post("api/actions/pause", data=b"x" * 9000, headers=own)).status == 413


async def test_who_logs_out_is_asked_for_the_token_again(http: ClientSession, store: Store) -> None:
    own = {"X-Fedge-Token": await log_in(http)}
    assert (await (await http.get("api/session")).json())["logout"]
    assert (await http.post("api/logout", json={})).status == 403  # another page's request
    assert (await http.post("api/logout", json={}, headers=own)).status == 200
    assert not (await (await http.get("api/session")).json())["may_act"]
    assert (await http.post("api/actions/pause", json={}, headers=own)).status == 401
    assert (await http.post("api/logout", json={})).status == 200
    assert not read_requests(store).paused


async def test_a_wrong_token_is_refused_and_slow(http: ClientSession) -> None:
    begun = time.monotonic()
    assert (await http.post("api/login", json={"token": "guess"})).status == 403
    assert time.monotonic() - begun >= logins.WRONG_S
    assert not (await (await http.get("api/session")).json())["may_act"]


async def test_who_has_the_token_waits_for_nobody_who_has_not(
    http: ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logins, "WRONG_S", 3600.0)
    wrong = [asyncio.create_task(http.post("api/login", json={"token": "guess"})) for _ in range(100)]
    done: set[asyncio.Task[Any]] = set()
    async with asyncio.timeout(300):
        while len(done) < len(wrong) - logins.MAX_WRONG:
            done, _ = await asyncio.wait(wrong, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
        assert {each.result().status for each in done} == {429}
        await log_in(http)
    for task in wrong:
        task.cancel()
    await asyncio.gather(*wrong, return_exceptions=True)
    assert LINES_PER_MINUTE <= caplog.text.count("event=login_refused") < 100


async def test_who_has_logged_in_has_a_stream_before_who_has_not(
    http: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "MAX_STREAMS", 3)
    async with (
        asyncio.timeout(300),
        ClientSession(http._base_url, connector=TCPConnector(limit=0)) as nobody,
        contextlib.AsyncExitStack() as open_,
    ):
        theirs = [await open_.enter_async_context(nobody.get("api/stream")) for _ in range(3)]
        async with nobody.get("api/stream") as refused:
            assert refused.status == 503
        await log_in(http)
        for oldest in theirs:
            assert (await open_.enter_async_context(http.get("api/stream"))).status == 200
            await oldest.content.read()
        async with http.get("api/stream") as refused:
            assert refused.status == 503


@pytest.mark.process
async def test_who_connects_and_says_nothing_locks_nobody_out(store: Store, tmp_path: Path) -> None:
    """The page of a process that may open 300 files, and 600 connections, of which 120 come while it does not run."""
    assert store
    with (tmp_path / "log").open("w+b") as log:
        words = ["-m", "fedge", "ui", "--home", str(tmp_path), "--port", "0", "--json"]
        page = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE, stderr=log)
        assert page.stdout is not None
        url = json.loads(await page.stdout.readline())["url"]
        process = psutil.Process(page.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (300, 300))
        port = int(url.rstrip("/").rpartition(":")[2])
        status = 503
        async with (
            asyncio.timeout(300),
            ClientSession(url, cookie_jar=CookieJar(unsafe=True)) as http,
            connections("127.0.0.1", port, 480),
            contextlib.AsyncExitStack() as late,
        ):
            process.suspend()
            asyncio.get_running_loop().call_later(0.3, process.resume)
            await late.enter_async_context(connections("127.0.0.1", port, 120))
            while status == 503:
                async with http.post("api/login", json={"token": read_token(tmp_path, None)}) as answer:
                    status = answer.status
            assert status == 200
            async with http.get("api/state") as answer:
                assert answer.status == 200
        page.terminate()
        await page.wait()
        log.seek(0)
        assert log.read() == b""


async def test_bytes_that_are_not_http_are_a_line(running: Page, caplog: pytest.LogCaptureFixture) -> None:
    for said in (
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /api/login HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
    ):
        async with open_connection("127.0.0.1", running._port.number) as (reader, writer):
            writer.write(said)
            assert b" 400 Bad Request\r\n" in await reader.read()
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["event=malformed_request"] * 4
    assert not any(record.exc_info for record in caplog.records)


async def test_clients_that_leave_in_the_middle_of_a_request_are_a_line(
    running: Page, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        async with open_connection("127.0.0.1", running._port.number) as (_, writer):
            writer.write(b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Length: 3000\r\n\r\n{")
            await until(lambda: any(one.phase is _Phase.BODY for one in running._port.connections))
            writer.transport.abort()
        await until(lambda: not running._port.connections)
    await until(lambda: caplog.text.count("event=client_gone") == 3)
    assert not any(record.exc_info for record in caplog.records)


async def test_from_other_machines_reading_takes_the_token_too(store: Store, tmp_path: Path) -> None:
    assert store
    async with page(tmp_path, "0.0.0.0") as shown, ClientSession(cookie_jar=CookieJar(unsafe=True)) as http:
        url = shown.url.replace("0.0.0.0", "127.0.0.1")
        for path in ("api/state", "api/events", "api/stream", "metrics", "api/devices/cam1"):
            assert (await http.get(url + path)).status == 401, path
        assert (await http.get(url)).status == 200
        told = await http.get(url + "metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert told.status == 200
        assert (await http.post(url + "api/login", json={"token": TOKEN})).status == 200
        assert (await http.get(url + "api/state")).status == 200


async def test_under_another_name_reading_takes_the_token_on_this_machine_too(http: ClientSession) -> None:
    for host in ("evil.example", "evil.example:8700", "127.0.0.1.evil.example", "localhost:1@evil.example", ""):
        for path in ("api/state", "api/events", "api/stream", "metrics"):
            assert (await http.get(path, headers={"Host": host})).status == 401, (host, path)
        assert not (await (await http.get("api/session", headers={"Host": host})).json())["may_read"]
    for host in ("localhost", "LOCALHOST:8700", "[::1]", "[::1]:8700", "127.0.0.1:8700"):
        assert (await http.get("api/state", headers={"Host": host})).status == 200, host
    told = await http.get("metrics", headers={"Host": "proxy.example", "Authorization": f"Bearer {TOKEN}"})
    assert told.status == 200


async def test_a_header_of_any_bytes_is_no_token(store: Store, tmp_path: Path) -> None:
    assert store
    async with page(tmp_path, "127.0.0.1") as shown:
        for header in (b"Authorization: Bearer " + TOKEN.encode() + b"\xff", b"Authorization: \xff"):
            async with open_connection("127.0.0.1", shown._port.number) as (reader, writer):
                writer.write(
                    b"GET /metrics HTTP/1.1\r\nHost: proxy.example\r\nConnection: close\r\n" + header + b"\r\n\r\n"
                )
                assert (await reader.read()).startswith(b"HTTP/1.1 401 ")


async def test_a_page_without_a_certificate_says_that_the_token_is_in_clear(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert store
    async with page(tmp_path):
        assert "event=page_in_clear" not in caplog.text
    async with page(tmp_path, "0.0.0.0"):
        assert "event=page_in_clear" in caplog.text


async def test_a_stream_ends_with_the_login(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store
    monkeypatch.setattr(news, "HEARTBEAT_S", 0.1)
    async with page(tmp_path, "0.0.0.0") as shown, ClientSession(cookie_jar=CookieJar(unsafe=True)) as http:
        url = shown.url.replace("0.0.0.0", "127.0.0.1")
        assert (await http.post(url + "api/login", json={"token": TOKEN})).status == 200
        async with asyncio.timeout(300), http.get(url + "api/stream") as stream:
            assert b"news" in await stream.content.readuntil(b"event: news")
            shown._logins._sessions = {cookie: (word, 0.0) for cookie, (word, _) in shown._logins._sessions.items()}
            await stream.content.read()


@pytest.mark.parametrize("last", ["zwei", "-1", "9" * 30, "\u0662"])
async def test_a_last_event_that_is_no_number_of_ours_is_as_none(http: ClientSession, last: str) -> None:
    async with http.get("api/stream", headers={"Last-Event-ID": last}) as stream:
        assert stream.status == 200


async def test_a_page_hears_that_something_has_happened(
    http: ClientSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "HEARTBEAT_S", 3600.0)
    async with asyncio.timeout(300), http.get("api/stream") as stream:
        await stream.content.readuntil(b"\n\n")
        store.record_events(Event(at=NOW, round=4, name="problem", device="cam1", fields={"reason": EVIL}))
        assert await stream.content.readuntil(b"\n\n") == news.NEWS
        last = (await (await http.get("api/events?last=1")).json())["events"][0]
        assert (last["name"], last["text"]) == ("problem", EVIL)


async def test_events_are_found_by_kind_device_and_round(http: ClientSession) -> None:
    async def names(query: str) -> list[str]:
        events = (await (await http.get(f"api/events?{query}")).json())["events"]
        assert [e["number"] for e in events] == sorted(e["number"] for e in events)
        return [e["name"] for e in events]

    assert "answer" not in await names("")
    assert set(await names("kind=problems")) == {"problem", "closed"}
    assert await names("kind=answers&round=2") == ["answer"] * 11 + ["closed"]
    assert await names("device=cam1&round=3") == ["answer"]
    everything = (await (await http.get("api/events?last=1000")).json())["events"]
    (older,) = (await (await http.get(f"api/events?last=1&before={everything[-1]['number']}")).json())["events"]
    assert older == everything[-2]
    assert await names(f"after={everything[-2]['number']}") == [everything[-1]["name"]]


async def test_the_state_is_made_once_for_all_open_pages_until_there_is_news(
    http: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    get_state = Watch.get_state

    def counted(watch: Watch) -> dict[str, Any]:
        nonlocal made
        made += 1
        return get_state(watch)

    async def state() -> int:
        assert (await http.get("api/state")).status == 200
        return made

    monkeypatch.setattr(Watch, "get_state", counted)
    assert (await state(), await state()) == (1, 2)
    async with asyncio.timeout(300), http.get("api/stream") as stream:
        await stream.content.readuntil(b"\n\n")
        monkeypatch.setattr(news, "LOOK_S", 3600.0)
        while await state() != await state():  # the look that was under way when it was set
            pass
        seen = await state()
        word = await log_in(http)
        assert (await http.post("api/actions/pause", json={}, headers={"X-Fedge-Token": word})).status == 200
        assert await state() == seen + 1


async def test_a_refresh_tells_only_what_changed(http: ClientSession, store: Store) -> None:
    whole = await (await http.get("api/state")).json()
    assert whole["whole"]
    event = Event(at=NOW, round=4, name="answer", device="cam12", fields={"label": "train", "result": "done"})
    store.record_events(event).result()
    told = await (await http.get("api/state", params={"since": whole["version"]})).json()
    assert not told["whole"]
    assert told["tables"]["devices"] == {"why": {"at": [3], "is": [""]}, "now": {"at": [3], "is": ["answered"]}}


async def test_figures_for_prometheus(http: ClientSession) -> None:
    answer = await http.get("metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.content_type == "application/openmetrics-text"
    lines = (await answer.text()).splitlines()
    assert 'fedge_round{federation="shop"} 3.0' in lines
    assert 'fedge_devices{federation="shop",state="offline"} 1.0' in lines
    assert 'fedge_round_orders{federation="shop",outcome="late"} 1.0' in lines
    assert 'fedge_accuracy{federation="shop",of="of its bundle"} 0.93' in lines
    assert 'fedge_device_accuracy{device="cam1",federation="shop",of="of its bundle"} 0.93' in lines
    assert 'fedge_device_accuracy{device="cam3",federation="shop",of="in training"} 0.64' in lines
    assert lines[-1] == "# EOF"


async def test_a_port_that_is_taken_is_an_error_that_says_so(running: Page, tmp_path: Path) -> None:
    taken = int(running.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{taken}"):
        await Page(tmp_path, lambda: Store(tmp_path, intake=True), host="127.0.0.1", port=taken, token="t").__aenter__()


def test_the_token_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    token = read_token(tmp_path, None)
    assert len(token) == 32
    assert read_token(tmp_path, None) == token
    assert (tmp_path / "ui-token").stat().st_mode & 0o077 == 0
    assert read_token(tmp_path, "given") == "given"
