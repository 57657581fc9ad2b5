"""Differences: a page that applies them has what there is, and little is sent."""

from __future__ import annotations

import json
import random
from typing import Any

from coordinator.page.differences import Differences, Table, flatten


def apply(tables: dict[str, dict[int, dict[str, Any]]], answer: dict[str, Any]) -> None:
    """What a page does with an answer."""
    if answer["whole"]:
        tables.clear()
    for name, columns in answer["tables"].items():
        rows = tables.setdefault(name, {})
        for field, column in columns.items():
            for place, value in zip(column.get("at", range(len(column["is"]))), column["is"], strict=True):
                rows.setdefault(place, {})[field] = value


def shown(rows: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What it then shows, by id."""
    told = [{k: v for k, v in row.items() if v is not None} for row in rows.values() if not row.get("gone")]
    return {row["id"]: row for row in told}


def test_pages_that_ask_at_different_times_all_end_with_what_there_is() -> None:
    rng = random.Random(3)
    differences = Differences("devices")
    pages: list[dict[str, dict[int, dict[str, Any]]]] = [{}, {}, {}]
    versions = ["", "", "another.7"]
    present: dict[str, dict[str, Any]] = {}
    for step in range(200):
        key = f"cam{rng.randrange(9)}"
        if rng.random() < 0.2:
            present.pop(key, None)
        else:
            present[key] = {"id": key, **({"why": step} if rng.random() < 0.7 else {"now": rng.randrange(3)})}
        differences.update({"devices": present})
        for k, page in enumerate(pages):
            if rng.random() < 0.3 or step == 199:
                answer = json.loads(differences.encode_since(versions[k]))
                apply(page, answer)
                versions[k] = answer["version"]
                assert shown(page["devices"]) == present


def test_what_did_not_change_is_not_sent() -> None:
    table = Table()
    table.update({"a": {"x": 1, "y": 2}, "b": {"x": 1}}, 1)
    table.update({"a": {"x": 1, "y": 3}, "b": {"x": 1}}, 2)
    assert table.list_changes(1) == {"y": {"at": [0], "is": [3]}}
    assert table.list_changes(2) == {}
    assert table.list_changes(0)["x"] == {"is": [1, 1]}
    table.update({"b": {"x": 1}}, 3)
    assert table.list_changes(2)["gone"] == {"at": [0], "is": [True]}
    assert table.list_changes(0) == {"x": {"at": [1], "is": [1]}}


def test_the_version_of_another_process_or_of_nobody_gets_everything() -> None:
    differences = Differences("devices")
    differences.update({"devices": {"a": {"id": "a"}}})
    own = json.loads(differences.encode_since(""))["version"]
    assert not json.loads(differences.encode_since(own))["whole"]
    for version in ("", "x", "x.1", own + "0" * 30, own.replace(".", ".x"), "\u0662.\u0662"):
        assert json.loads(differences.encode_since(version))["whole"]


def test_nested_fields_get_flat_names_and_figures_few_digits() -> None:
    values = {"id": "a", "health": {"now": {"accuracy": 0.123456}, "drift": True}, "seen_at": 1_790_000_000.25}
    flat = {"id": "a", "health.now.accuracy": 0.1235, "health.drift": True, "seen_at": 1_790_000_000}
    assert dict(flatten(values)) == flat
