import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports import plots
from coordinator.simulation.reports.outcome import Cost
from coordinator.simulation.reports.report import (
    format_row,
    format_seed_row,
    list_further_rows,
    list_headings,
    list_own_rows,
    make_comparison_report,
    make_demo_report,
    make_run_report,
    write_results,
)
from coordinator.simulation.reports.terminal import describe_columns, list_figures, make_table
from coordinator.simulation.reports.words import format_cost
from coordinator.simulation.settings import Scenario
from fedge.data.problems.scores import Counts
from tests.support.comparison import a_comparison, a_run
from tests.support.demo import a_demonstration


def test_a_row_has_means_spreads_and_signs() -> None:
    comparison = a_comparison(2)
    first, second = comparison.methods
    assert format_row(first, comparison) == (
        *("m0", "80.5 ±0.7", "–", "-2.0 ±0.0 m1", "5.0 ±0.0", "71.5 ±0.7", "70.5 ±0.7", "70.0 ±0.0", "3.0 MB"),
        *("30 r, 3.0 MB, 6.0 s", "4.5"),
    )
    assert format_row(second, comparison)[2:4] == ("+2.0 ±0.0", "+2.0 ±0.0 m0")
    assert format_seed_row(second, comparison.figure) == ("m1", "82.0", "83.0")
    assert format_cost(None) == "not reached"
    assert format_cost(Cost(round=3, bytes=2_000_000, seconds=9.4)) == "3 r, 2.0 MB, 9.4 s"


def test_the_methods_own_numbers_are_on_the_page() -> None:
    runs = [a_run("m", seed, details={"silhouette": 0.5 + 0.2 * seed, "tau": 0.25}) for seed in (0, 1)]
    found = compare_runs(Scenario(), runs, ["m"], (0, 1), "m", None)
    assert list_own_rows(found) == [("m", "silhouette", "0.60 ±0.14"), ("m", "tau", "0.25 ±0.00")]
    assert "0.60 ±0.14" in make_comparison_report(found).page
    assert list_own_rows(a_comparison()) == []
    assert "own numbers" not in make_comparison_report(a_comparison()).page


def test_further_figures_and_right_and_wrong_answers_are_on_the_page() -> None:
    plain = make_run_report(a_run(), Scenario()).page
    assert "Right and wrong answers" not in plain
    counts = Counts.from_table("samples", ("cat", "<dog>"), ("cat", "<dog>"), np.array([[7, 1], [2, 30]]))
    score = msgspec.structs.replace(a_run().devices[0].score, metrics={"rmse": 12.345678})
    devices = [msgspec.structs.replace(device, score=score) for device in a_run().devices]
    shown = make_run_report(a_run(counts=counts, devices=tuple(devices), metrics={"rmse": 12.345678}), Scenario())
    assert "<td>&lt;dog&gt;</td><td>2</td><td>30</td>" in shown.page
    assert "<td>12.35</td>" in shown.page, "in its own units, not in percent"
    assert shown.rows[0]["rmse"] == 12.345678
    runs = [a_run("m", seed, metrics={"rmse": 2.0 + seed}) for seed in (0, 1)]
    assert list_further_rows(compare_runs(Scenario(), runs, ["m"], (0, 1), "m", None)) == [("m", "RMSE", "2.5 ±0.7071")]


def test_late_joiners_have_a_column_where_there_are_any() -> None:
    runs = [a_run("m", seed, cold_start=0.6 + 0.1 * seed) for seed in (0, 1)]
    some = compare_runs(Scenario(late_joiners=1), runs, ["m"], (0, 1), "m", None)
    assert format_row(some.methods[0], some)[7:9] == ("70.0 ±0.0", "65.0 ±7.1")
    assert list_headings(some)[8] == "Late joiners"
    assert [column.header for column in make_table(some).columns][7] == "new"
    assert "training was over" in describe_columns(some)
    assert ("late joiners", "60.0 %  over 0 devices") in list_figures(runs[0], None)
    assert len(list_headings(a_comparison())) + 1 == len(format_row(some.methods[0], some)) == len(list_headings(some))


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
    write_results(tmp_path, make_comparison_report(comparison), tmp_path / "too.json")
    assert (tmp_path / "too.json").read_bytes() == (tmp_path / "figures.json").read_bytes()
    text = (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "figures.json").read_bytes())["baseline"] == "m0"
    rows = (tmp_path / "figures.csv").read_text().splitlines()
    assert rows[0].startswith("method,seed,accuracy,")
    assert [row.split(",")[0] for row in rows[1:]] == ["m0", "m1", "m2"] * 2
    page = Page()
    page.feed(text)
    assert page.open == []
    assert all(target.startswith("#") for target in page.loads)
    assert text.count("<svg") == 3
    assert text == make_comparison_report(comparison).page
    for method in comparison.methods:
        assert all(
            cell in text for cell in (*format_row(method, comparison), *format_seed_row(method, comparison.figure))
        )
    assert "$" not in text


def test_the_report_of_a_run_has_its_figures_its_curves_and_its_devices() -> None:
    outcome = a_run()
    text = make_run_report(outcome, Scenario()).page
    page = Page()
    page.feed(text)
    assert page.open == []
    assert text.count("<svg") == 3
    assert "80.0 %  ± 5.0 over 2 devices" in text
    cells = ("device-1", "1", "40", "20", "30", "yes", "no", "80.0", "70.0", "75.0")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "Shade" not in text, "one seed has none"


def test_a_notebook_shows_the_table_and_the_curves() -> None:
    shown = a_comparison(2)._repr_html_()
    assert "<svg" in shown
    assert "var(" not in shown
    assert all(cell in shown for cell in format_row(a_comparison(2).methods[1], a_comparison(2)))


def test_the_report_of_a_demo_needs_nothing_from_outside() -> None:
    html = make_demo_report(a_demonstration()).page
    assert "http" not in html
    assert not re.search(r"<script|<link|@import|\ssrc=", html)
    assert html.count("<svg") == 3
    assert "$" not in html


def test_it_holds_every_figure_of_every_device() -> None:
    html = make_demo_report(a_demonstration()).page
    for cells in (
        "<td>camera-00</td><td>80</td><td>30</td><td>6</td><td>0</td><td>50.0</td><td>60.0</td><td>70.0</td><td>80.0</td><td>90.0</td>",
        "<td>camera-03</td><td>83</td><td>30</td><td>3</td><td>1</td><td>47.0</td><td>57.0</td><td>67.0</td><td>77.0</td><td>87.0</td>",
    ):
        assert cells in html
    assert "<td>personal</td><td>88.5</td><td>+40.0</td>" in html
    assert "+30.0" in html  # points above FedAvg


def test_plots_take_their_colours_from_the_page() -> None:
    html = make_demo_report(a_demonstration()).page
    plots = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): #", plots)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html))
    assert {"--cluster-4", "--cluster-0", "--cluster-1", "--ink", "--surface"} <= used
    light, dark = html.split("@media", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark


def test_the_curve_of_the_federation_has_its_methods_name() -> None:
    assert ">a-method<" in plots.draw_validation({"a-method": {1: 0.5, 2: 0.6}})


def test_a_history_without_any_measurement_is_an_empty_plot() -> None:
    assert "<svg" in plots.draw_validation({"fedge": {}})


def test_what_comes_from_a_user_is_text_not_markup() -> None:
    html = make_demo_report(a_demonstration(task="<script>alert(1)</script>")).page
    assert "<script>" not in html


def test_the_curve_of_the_shared_model_is_not_called_as_the_bundles_are() -> None:
    shared, *rest = re.findall(r"<svg.*?</svg>", make_demo_report(a_demonstration()).page, flags=re.DOTALL)
    assert ">fedge, shared<" in shared
    assert ">fedavg<" in shared
    assert ">personal<" not in shared
    assert any(">personal<" in plot for plot in rest), "there it is what devices have installed"


def test_without_clusters_there_is_no_map_of_them() -> None:
    html = make_demo_report(a_demonstration(split=False)).page
    assert html.count("<svg") == 2
    assert "This method made no clusters: there is nothing to draw." in html
    assert "Ring: true group" not in html


def test_one_seed_has_neither_a_deviation_nor_a_table_of_seeds() -> None:
    runs = [a_run(method, 7) for method in ("a", "b")]
    one = compare_runs(Scenario(), runs, ["a", "b"], (7,), "a", None)
    page = make_comparison_report(one).page
    assert "Percent, of one seed: how far another would be from it is not known." in page
    assert "Seed by seed" not in page
    assert "; seed 7. " in page
    assert "±" not in str(one)
    assert "seed by seed" not in str(one)
    two = a_comparison(2)
    assert "Seed by seed" in make_comparison_report(two).page
    assert "± over seeds" in str(two)


def test_a_method_without_updates_to_compare_has_no_map() -> None:
    html = make_demo_report(a_demonstration(split=False, places={})).page
    assert html.count("<svg") == 2
    assert "compares no updates" in html
