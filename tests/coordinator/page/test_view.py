"""What the page shows: rows without what nobody looks at, and the band of accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.page.view import MAX_POINTS, compute_band, make_series, make_tables
from coordinator.watch.state import Watch
from tests.support.shop import make_shop


def test_the_rows_of_a_thousand_devices_hold_only_what_a_refresh_needs(tmp_path: Path) -> None:
    store = make_shop(tmp_path, 20)
    tables = make_tables(Watch(tmp_path, store).get_state())
    store.close()
    row = tables["devices"]["cam1"]
    assert (row["id"], row["accuracy"], row["health.now.n"], row["context.load"]) == ("cam1", 0.6, 40, 0.5)
    assert (row["shown.share"], row["shown.of"], row["shown.n"]) == (0.93, "of its bundle", 40)
    assert not [name for name in row if name.startswith("of_bundle")]
    assert "shown.of" not in tables["devices"]["cam3"]  # of a device in training the figure travels once
    assert [(each["of"], each["share"]) for each in tables["fleet"][""]["shown"]] == [
        ("of its bundle", 0.93), ("in training", pytest.approx(0.6)),
    ]  # fmt: skip
    assert not {"context.at", "context.type", "context.device_id", "health", "context"} & row.keys()
    assert tables["fleet"][""]["federation"] == "shop"
    assert "pause" in tables["fleet"][""]["actions"]
    assert [*tables["rounds"]] == [*tables["history"]] == ["1", "2", "3"]


def test_the_band_of_one_round_has_its_quantiles() -> None:
    assert compute_band([(3, 0.1), (3, 0.5), (3, 0.9)]) == [[3, 0.18, 0.5, 0.82]]
    assert compute_band([]) == []


def test_a_long_run_has_few_points() -> None:
    band = compute_band([(number, 0.5) for number in range(1, 3001)])
    assert len(band) == MAX_POINTS
    assert band[-1] == [3000, 0.5, 0.5, 0.5]


def test_only_devices_that_are_named_have_lines() -> None:
    devices = [{"id": "a", "accuracy": [(1, 0.2)]}, {"id": "b", "accuracy": [(1, 0.4)]}]
    assert make_series(devices, ["b", "c"]) == {"band": [[1, 0.22, 0.3, 0.38]], "of": {"b": [(1, 0.4)]}}
