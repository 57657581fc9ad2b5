"""Each new item is told once, also over restarts, and again only if it was gone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from coordinator.watch import notifying
from coordinator.watch.notifying import AGAIN_S, GONE_S, Notifier, notify, update_told
from fedge.errors import ConfigError
from tests.support.shop import NOW, make_shop
from tests.support.waiting import until

ITEM = {"kind": "drifting", "device": "cam4"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in which one device drifts."""
    make_shop(tmp_path).close()
    return tmp_path


def command(file: Path, code: int = 0) -> str:
    """A command that appends what it is told to a file."""
    script = file.with_name("tell.py")
    script.write_text(
        "import os, sys\n"
        "told = os.environ['FEDGE_ATTENTION_DEVICE'] + ' ' + sys.stdin.read() + '\\n'\n"
        f"open({str(file)!r}, 'a').write(told)\nsys.exit({code})\n"
    )
    return f"{sys.executable} '{script}'"


def read(file: Path) -> list[dict[str, Any]]:
    """What the command was told."""
    return [json.loads(line.partition(" ")[2]) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """A web server: its URL, what it was sent, and the codes with which it answers next."""
    sent: list[dict[str, Any]] = []
    codes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(codes.pop() if codes else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", sent, codes
        server.shutdown()


async def test_a_command_is_told_once_of_each_item_also_over_a_restart(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    for _ in range(2):  # two processes
        notifier = Notifier(home, "ui", command(told), None)
        for _ in range(2):
            await notifier.notify_once(NOW)
    (item,) = read(told)
    assert (item["kind"], item["device"], item["federation"]) == ("drifting", "cam4", "shop")
    assert item["text"]
    assert item["do"]
    assert told.read_text().startswith("cam4 ")
    make_shop(tmp_path / "more", second={"where": "box:/copy", "at": NOW}).close()
    (home / "summary.json").write_bytes((tmp_path / "more" / "summary.json").read_bytes())
    await notifier.notify_once(NOW)
    assert [item["kind"] for item in read(told)] == ["drifting", "second-coordinator"]


async def test_what_a_command_or_webhook_did_not_take_is_told_again_later(
    home: Path, webhook: tuple[str, list[dict[str, Any]], list[int]]
) -> None:
    url, sent, codes = webhook
    codes.append(503)
    notifier = Notifier(home, "ui", None, url)
    for after_s, n in ((0, 1), (AGAIN_S - 1, 1), (AGAIN_S, 2), (9 * AGAIN_S, 2)):
        await notifier.notify_once(NOW + after_s)
        assert len(sent) == n
    failing = home / "failing"
    notifier = Notifier(home, "other", command(failing, code=1), url)
    await notifier.notify_once(NOW)
    await notifier.notify_once(NOW + AGAIN_S)
    assert len(read(failing)) == 2
    assert len(sent) == 2  # not told behind a command that fails


def test_an_item_that_flickers_is_the_same_and_one_that_was_gone_for_long_is_new() -> None:
    told = update_told({"drifting cam4": NOW}, [], NOW + GONE_S - 1)
    assert told == {"drifting cam4": NOW}
    assert update_told(told, [ITEM], NOW + GONE_S - 1) == {"drifting cam4": NOW + GONE_S - 1}
    assert update_told(told, [], NOW + GONE_S) == {}


async def test_while_a_program_runs_it_tells_and_outlives_what_cannot_be_read(
    home: Path, webhook: tuple[str, list[dict[str, Any]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "LOOK_S", 0.02)
    url, sent, _ = webhook
    whole = (home / "summary.json").read_bytes()
    (home / "summary.json").write_bytes(b"{")
    async with notify(home, "ui", None, url):
        await asyncio.sleep(0.1)
        (home / "summary.json").write_bytes(whole)
        await until(lambda: len(sent) == 1)
    with contextlib.suppress(TimeoutError):
        async with notify(home, "ui", None, None):  # nobody to tell
            pass


@pytest.mark.parametrize(("words", "url"), [(None, "ftp://a/b"), (None, "http:///b"), ("say 'it", None)])
def test_what_cannot_be_told_is_refused_at_once(tmp_path: Path, words: str | None, url: str | None) -> None:
    with pytest.raises(ConfigError, match="attention"):
        Notifier(tmp_path, "ui", words, url)
