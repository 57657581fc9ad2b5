from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.simulation.compare import together
from coordinator.simulation.outcome import Cost
from coordinator.simulation.report import (
    cost,
    headings,
    lead,
    legend_of,
    lines_of,
    own_rows,
    render,
    row,
    seed_row,
    setting_of,
    table_of,
    write_report,
)
from coordinator.simulation.settings import Groups, Partition, Scenario
from tests.support.comparison import a_comparison, a_run


def test_a_row_has_means_spreads_and_signs() -> None:
    first, second = a_comparison(2).methods
    assert row(first) == (
        *("m0", "80.5 ±0.7", "–", "-2.0 ±0.0 m1", "5.0 ±0.0", "71.5 ±0.7", "70.5 ±0.7", "70.0 ±0.0", "3.0 MB"),
        *("30 r, 3.0 MB, 6.0 s", "4.5"),
    )
    assert row(second)[2:4] == ("+2.0 ±0.0", "+2.0 ±0.0 m0")
    assert seed_row(second) == ("m1", "82.0", "83.0")
    assert cost(None) == "not reached"
    assert cost(Cost(round=3, bytes=2_000_000, seconds=9.4)) == "3 r, 2.0 MB, 9.4 s"


def test_the_methods_own_numbers_are_on_the_page() -> None:
    runs = [a_run("m", seed, details={"silhouette": 0.5 + 0.2 * seed, "tau": 0.25}) for seed in (0, 1)]
    found = together(Scenario(), runs, ["m"], (0, 1), "m", None)
    assert own_rows(found) == [("m", "silhouette", "0.60 ±0.14"), ("m", "tau", "0.25 ±0.00")]
    assert "0.60 ±0.14" in render(found)
    assert own_rows(a_comparison()) == [("–", "–", "–")]


def test_newcomers_have_a_column_where_there_are_any() -> None:
    runs = [a_run("m", seed, cold_start=0.6 + 0.1 * seed) for seed in (0, 1)]
    some = together(Scenario(newcomers=1), runs, ["m"], (0, 1), "m", None)
    assert row(some.methods[0])[7:9] == ("70.0 ±0.0", "65.0 ±7.1")
    assert headings(some)[8] == "Newcomers"
    assert [column.header for column in table_of(some).columns][7] == "new"
    assert "training was over" in legend_of(some)
    assert ("newcomers", "60.0 %  over 0 devices") in lines_of(runs[0], None, None)
    assert len(headings(a_comparison())) == len(row(a_comparison().methods[0])) == len(headings(some)) - 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Dirichlet, α 1"),
        ({"partition": Partition.GROUPS, "groups": Groups.LABELS}, "4 groups by labels, α 1"),
        ({"partition": Partition.SHARDS, "iid_share": 0.2}, "2 shards, 20% dealt evenly"),
        ({"partition": Partition.NATURAL}, "people"),
        ({"partition": Partition.IID}, "no skew"),
    ],
)
def test_the_setting_in_words(changes: dict, words: str) -> None:
    assert setting_of(Scenario(**changes)) == words


class Page(HTMLParser):
    """Finds what a page would load, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in {"meta", "path", "use", "br"}:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_startendtag(self, tag, attrs) -> None:
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_endtag(self, tag) -> None:
        if tag not in {"meta", "path", "use", "br"}:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    comparison = a_comparison(3)
    write_report(tmp_path / "report.html", comparison)
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert all(target.startswith("#") for target in page.loads)
    assert text.count("<svg") == 3
    assert text == render(comparison)
    for method in comparison.methods:
        assert all(cell in text for cell in (*row(method), *seed_row(method)))
    assert "$" not in text


def test_the_lead_tells_the_setting() -> None:
    text = lead(a_comparison(2))
    assert "2 simulated devices" in text
    assert "seeds 0, 1" in text
    assert "78.4%" in text


def test_what_minimum_sizes_took_is_said_by_seed() -> None:
    took = {0: {"draws": 1, "moved": 0}, 1: {"draws": 7, "moved": 0}, 2: {"draws": 100, "moved": 15}}
    runs = [a_run(m, seed, **took[seed]) for seed in took for m in ("m", "n")]
    found = together(Scenario(), runs, ["m", "n"], tuple(took), "m", None)
    text = "samples enough: seed 1: 7 draws, 0 samples moved; seed 2: 100 draws, 15 samples moved."
    assert text in lead(found)
    assert text in render(found)
    assert text in legend_of(found)
    for silent in (a_comparison(2), together(Scenario(), [a_run("m", 0, **took[0])], ["m"], (0,), "m", None)):
        assert "asked for" not in lead(silent) + legend_of(silent), "not needed, or of a folder that does not say"


def test_the_table_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of(a_comparison(2)))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "method accuracy − base − best worst F1 global MB r s" in lines
    assert "m1 82.5 ±0.7 +2.0 ±0.0 +2.0 ±0.0 73.5 72.5 70.0 3.0 30 6.0" in lines
    assert "to m0" in legend_of(a_comparison(2))


def test_names_of_variants_can_be_read_in_eighty_columns() -> None:
    name = "fedepc:selection=fastest:clustering=k-means"
    runs = [a_run(method, seed, cold_start=0.6) for seed in (0, 1) for method in ("local", name)]
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of(together(Scenario(newcomers=1), runs, ["local", name], (0, 1), "local", None)))
    text = console.export_text()
    assert "80.0 ±0.0" in text
    parts = [line.split()[0] for line in text.splitlines() if line and line[0] not in "ml─"]
    assert "".join(parts) == name
    assert len(parts) <= 3


def test_a_single_run_in_lines() -> None:
    lines = dict(lines_of(a_run(split=True, clusters={"0": ("a",), "1": ("b",)}), None, 0.9))
    assert lines["accuracy"] == "80.0 %  ± 5.0 over 2 devices"
    assert lines["experts"] == "2 clusters"
    assert lines["until 90.0 %"] == "not reached"
    assert lines["bundles"] == "2 of 2, torch − ONNX Runtime <= 3e-07"
    assert dict(lines_of(a_run(global_accuracy=None), None, None))["global accuracy"] == "–"
    assert dict(lines_of(a_run(details={"silhouette": 0.561}), None, None))["silhouette"] == "0.56"
