import re
from pathlib import Path

import pytest

from coordinator.demo import plots
from coordinator.demo.report import lead, render, write_report
from tests.support.demo import a_background, an_outcome


def test_the_report_needs_nothing_from_outside() -> None:
    html = render(an_outcome(), a_background())
    assert "http" not in html
    assert not re.search(r"<script|<link|@import|\ssrc=", html)
    assert html.count("<svg") == 4
    assert "$" not in html


def test_it_holds_every_figure_of_every_device() -> None:
    html = render(an_outcome(), a_background())
    for row in (
        "<td>camera-00</td><td>80</td><td>30</td><td>0</td><td>50.0</td><td>60.0</td><td>70.0</td><td>80.0</td><td>90.0</td>",
        "<td>camera-03</td><td>83</td><td>30</td><td>1</td><td>47.0</td><td>57.0</td><td>67.0</td><td>77.0</td><td>87.0</td>",
    ):
        assert row in html
    assert "<td>Personalised</td><td>88.5 %</td>" in html
    assert "+30.0" in html  # points above FedAvg


def test_plots_take_their_colours_from_the_page() -> None:
    html = render(an_outcome(), a_background())
    plots = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): #", plots)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html))
    assert {"--method-0", "--method-4", "--cluster-0", "--cluster-1", "--ink", "--surface"} <= used
    light, dark = html.split("@media", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark


def test_the_curve_of_the_federation_has_its_methods_name() -> None:
    svg = plots.accuracy_by_round(a_background(method="a-method"))
    assert ">a-method<" in svg
    assert ">FedAvg<" in svg
    assert ">Personalised<" not in svg


def test_a_history_without_any_measurement_is_an_empty_plot() -> None:
    assert "<svg" in plots.accuracy_by_round(a_background(accuracy_by_round={"personalised": [], "fedavg": []}))


def test_what_comes_from_a_user_is_text_not_markup() -> None:
    html = render(an_outcome(task="<script>alert(1)</script>"), a_background())
    assert "<script>" not in html


def test_a_method_without_updates_to_compare_has_no_map() -> None:
    outcome = an_outcome(split=False, clusters={}, selection={"camera-00": 1})
    html = render(outcome, a_background(places=None, ids=()))
    assert html.count("<svg") == 3
    assert "compares no updates" in html


@pytest.mark.parametrize(("split", "words"), [(True, "2 overlapping clusters"), (False, "No split")])
def test_the_lead_says_whether_there_was_a_split(split: bool, words: str) -> None:
    assert words in lead(an_outcome(split=split), a_background())


@pytest.mark.parametrize(("split", "words"), [(True, "2 clusters with a model each"), (False, "It made no clusters")])
def test_the_lead_tells_of_no_trial_where_there_was_none(split: bool, words: str) -> None:
    text = lead(an_outcome(split=split), a_background(method="fedepc"))
    assert words in text
    assert "trial" not in text
    assert "better" not in text


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, an_outcome(), a_background())
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
