"""Log lines: one line an event, whatever a peer wrote into it; in JSON under names that the documentation lists."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedge.system import logs
from fedge.system.logs import (
    LINES_PER_MINUTE,
    JsonFormatter,
    LineFormatter,
    Lines,
    bind,
    bind_temporarily,
    log_event,
    parse_fields,
    set_level,
)

ROOT = Path(__file__).resolve().parents[3]
EVIL = "cam1\n2026-01-01T00:00:00.000Z INFO event=forged\x1b[2J\x9b2J\x7f\u2028 device=other"


@pytest.fixture(autouse=True)
def nothing_bound() -> Iterator[None]:
    yield
    logs._bound.clear()


def record(template: str, *values: object) -> logging.LogRecord:
    made = logging.LogRecord("fedge.agent", logging.INFO, "", 0, template, values, None)
    made.created, made.msecs = 0.007, 7.0
    return made


def said(template: str, *values: object) -> dict[str, Any]:
    line = JsonFormatter().format(record(template, *values))
    assert line.isprintable()
    assert line.isascii()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_text_in_utc() -> None:
    assert LineFormatter().format(record("event=%s", "x")) == "1970-01-01T00:00:00.007Z INFO event=x"


def test_a_line_of_json() -> None:
    assert said("event=late device=%s round=%d s=%.2f", "cam1", 3, 0.5) == {
        "time": "1970-01-01T00:00:00.007Z", "level": "info", "logger": "fedge.agent",
        "event": "late", "device": "cam1", "round": 3, "s": 0.5,
    }  # fmt: skip
    assert said("event=order_%s reason='%d of %d'", "late", 2, 3) | {"event": "order_late", "reason": "2 of 3"}
    assert said("event=groups share=%.2f the clusters", 0.5)["detail"] == "the clusters"
    assert said("nothing of ours: %s", 1)["message"] == "nothing of ours: 1"
    assert said("event=x n=%g", float("nan"))["n"] == "nan"


def test_no_text_of_a_peer_is_another_field_or_a_command_of_the_terminal() -> None:
    found = said("event=refused device=%s reason=%r", EVIL, EVIL)
    assert (found["device"], found["reason"], found["event"]) == (EVIL, EVIL, "refused")
    made = record("event=failed")
    made.exc_info = (ValueError, ValueError(EVIL), None)
    assert EVIL.split("\n")[1] in json.loads(JsonFormatter().format(made))["exception"]
    for line in LineFormatter().format(made).split("\n")[1:]:
        assert line.startswith("  ")
        assert line.isprintable()


def test_what_is_bound_is_in_each_line_that_does_not_say_otherwise() -> None:
    bind(federation="shop", device="cam1", nothing=None)
    with bind_temporarily(order="o1", round=4):
        assert said("event=x device=%s", "cam2") == said("event=x") | {"device": "cam2"}
        assert (said("event=x")["order"], said("event=x")["round"]) == ("o1", 4)
    assert {"federation", "device"} <= said("event=x").keys()
    assert not {"order", "round", "nothing"} & said("event=x").keys()


def test_an_event_whose_names_are_known_only_now(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("fedge.test")
    with caplog.at_level("INFO", logger="fedge.test"):
        log_event(log, "done", {"device": "cam1", "reason": "it is late", "seconds": 1.5})
    assert caplog.messages == ["event=done device=cam1 reason='it is late' seconds=1.5"]
    assert json.loads(JsonFormatter().format(caplog.records[0]))["seconds"] == 1.5


@pytest.mark.parametrize("how", ["text", "json"])
def test_the_lines_of_a_process(how: str) -> None:
    code = f"""
import logging, warnings
from fedge.system.logs import configure
configure("info", {how!r})
log = logging.getLogger("fedge.agent")
log.debug("event=hidden")
log.info("event=refused device=%s", {EVIL!r})
logging.getLogger("other").info("event=theirs")
logging.getLogger("other").warning("event=loud")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stderr.split("\n")[:-1]
    if how == "json":
        assert [json.loads(line)["event"] for line in lines] == ["refused", "loud"]
        return
    assert [line.split(" ", 2)[1] for line in lines] == ["INFO", "WARNING"]
    assert all(line.isprintable() and re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z ", line) for line in lines)


def names_in_the_code() -> set[str]:
    """Of templates that are logged, of what is told by `log_event`, and of events that a coordinator logs."""
    found: set[str] = set()
    for package in ("fedge", "edge_agent", "coordinator", "deploy", "export"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and str(node.value).startswith("event="):
                    found |= parse_fields(str(node.value)).keys()
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    if node.func.attr == "log_event":
                        found |= {word.arg for word in node.keywords if word.arg is not None}
                    if node.func.attr == "_observe" and isinstance(node.args[-1], ast.Dict):
                        keys = node.args[-1].keys
                        found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return found


def test_the_documentation_lists_all_names() -> None:
    section = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8").partition("\n## Log lines\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall("`([a-z_]+)`", row)}
    by_the_formatter = {"time", "level", "logger", "exception", "message", "federation"}
    of_a_round_that_is_done = {"accuracy", "bytes_down", "bytes_up", "wall_s"}
    said = names_in_the_code()
    expected = said | by_the_formatter | of_a_round_that_is_done
    assert listed == expected, "write a row of docs/operating.md, Log lines, for: " + ", ".join(listed ^ expected)
    assert not said & by_the_formatter


def test_lines_that_others_cause_are_few_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, ours = Lines(), logging.getLogger("fedge.test")
    monkeypatch.setattr("fedge.system.logs.time.monotonic", lambda: 61.0)
    for n in range(LINES_PER_MINUTE + 5):
        lines.warning(ours, "event=refused name=%s", n)
    lines.warning(ours, "event=dropped")
    monkeypatch.setattr("fedge.system.logs.time.monotonic", lambda: 121.0)
    for n in range(2):
        lines.warning(ours, "event=refused name=%s", n)
    said = [record.getMessage() for record in caplog.records]
    assert said[:LINES_PER_MINUTE] == [f"event=refused name={n}" for n in range(LINES_PER_MINUTE)]
    assert said[LINES_PER_MINUTE:] == ["event=dropped", "event=refused name=0 untold=5", "event=refused name=1"]


def test_a_level_within_is_gone_afterwards_whatever_happens():
    log = logging.getLogger("fedge.of_this_test")
    log.setLevel(logging.INFO)

    @set_level(log.name, logging.ERROR)
    def fails():
        assert not log.isEnabledFor(logging.WARNING)
        raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        fails()
    assert log.level == logging.INFO
