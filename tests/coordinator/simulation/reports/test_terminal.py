"""Comparisons and runs in a terminal."""

from io import StringIO

from rich.console import Console

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports.outcome import SPENT
from coordinator.simulation.reports.report import (
    format_row,
)
from coordinator.simulation.reports.terminal import describe_columns, list_figures, make_table
from coordinator.simulation.settings import Scenario
from tests.support.comparison import a_comparison, a_run


def test_the_table_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(make_table(a_comparison(2)))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "method accuracy − base − best worst F1 global MB r s" in lines
    assert "m1 82.5 ±0.7 +2.0 ±0.0 +2.0 ±0.0 73.5 72.5 70.0 3.0 30 6.0" in lines
    assert "to m0" in describe_columns(a_comparison(2))


def test_names_of_variants_can_be_read_in_eighty_columns() -> None:
    name = "fedepc:selection=fastest:clustering=k-means"
    runs = [a_run(method, seed, cold_start=0.6) for seed in (0, 1) for method in ("local", name)]
    console = Console(width=80, record=True, file=StringIO())
    console.print(make_table(compare_runs(Scenario(late_joiners=1), runs, ["local", name], (0, 1), "local", None)))
    text = console.export_text()
    assert "80.0 ±0.0" in text
    parts = [line.split()[0] for line in text.splitlines() if line and line[0] not in "ml─"]
    assert "".join(parts) == name
    assert len(parts) <= 3


def test_a_single_run_in_lines() -> None:
    lines = dict(list_figures(a_run(split=True, clusters={"0": ("a",), "1": ("b",)}), 0.9))
    assert lines["accuracy"] == "80.0 %  ± 5.0 over 2 devices"
    assert lines["experts"] == "2 clusters"
    assert dict(list_figures(a_run(), None))["experts"] == "one shared model"
    assert dict(list_figures(a_run(experts=5), None))["experts"] == "5 for all devices, and a gate"
    assert lines["until 90.0 %"] == "not reached"
    assert lines["bundles"] == "2 of 2, torch − ONNX Runtime <= 3e-07"
    assert dict(list_figures(a_run(global_score=None), None))["global accuracy"] == "–"
    assert dict(list_figures(a_run(details={"silhouette": 0.561}), None))["silhouette"] == "0.56"


def test_what_private_methods_have_spent_is_told_below_the_table() -> None:
    name = f"{SPENT} (delta 1e-05)"
    runs = [a_run(method, seed, details={name: 3.0 + seed}) for seed in (0, 1) for method in ("a", "b")]
    found = compare_runs(Scenario(), runs, ["a", "b"], (0, 1), "a", None)
    assert "epsilon spent (delta 1e-05), the most of a device: a 4.00, b 4.00" in str(found)


def test_a_script_prints_the_table_and_what_its_columns_mean() -> None:
    shown = str(a_comparison(2))
    assert all(cell in shown for cell in format_row(a_comparison(2).methods[1], a_comparison(2))[:2])
    assert shown.endswith("deviation over the devices")
    assert all(line.isprintable() for line in shown.splitlines())
