import csv
import io
import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports.comparison import Comparison
from coordinator.simulation.reports.outcome import (
    Cost,
    Point,
    RunOutcome,
    Score,
    compute_class_score,
    compute_cost,
    compute_sample_score,
    compute_worst_decile,
    decode_figures,
    encode_figures,
    format_csv,
)
from coordinator.simulation.reports.report import make_comparison_report, make_run_report
from coordinator.simulation.settings import Scenario
from fedge.data.problems.scores import get_figure
from tests.support.comparison import a_comparison, a_regression, a_run


def test_a_worked_score() -> None:
    # class 0: TP 2, FP 1, FN 0: 4/5; class 1: TP 1, FP 0, FN 1: 2/3; class 2 is not there: it does not count
    found = compute_class_score(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]))
    assert found.n == 4
    assert found.accuracy == 0.75
    assert found.macro_f1 == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert found.weighted_f1 == pytest.approx((2 * 4 / 5 + 2 * 2 / 3) / 4)


def test_the_worked_accuracy_over_all_samples() -> None:
    """Accuracies (0.9, 0.5, 1) on (10, 30, 60) samples: 0.84 (pm_moe.md section 12)."""
    scores = [Score(n=n, value=a, macro_f1=0.0, weighted_f1=0.0) for n, a in ((10, 0.9), (30, 0.5), (60, 1.0))]
    assert compute_sample_score(scores) == pytest.approx(0.84)


def test_a_class_that_is_only_predicted_counts_with_zero() -> None:
    found = compute_class_score(np.array([0, 3]), np.array([0, 0]))
    assert found.macro_f1 == pytest.approx((2 / 3 + 0) / 2)
    assert found.weighted_f1 == pytest.approx(2 / 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_scores_agree_with_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    predicted, y = np.array(pairs).T
    found = compute_class_score(predicted, y)
    assert found.accuracy == pytest.approx((predicted == y).mean())
    assert found.macro_f1 == pytest.approx(f1_score(y, predicted, average="macro", zero_division=0))
    assert found.weighted_f1 == pytest.approx(f1_score(y, predicted, average="weighted", zero_division=0))


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.7], 0.7),
        ([0.9, 0.5, 0.8], 0.5),
        ([k / 10 for k in range(10)], 0.0),
        ([k / 20 for k in range(20)], 0.025),
        ([k / 20 for k in range(21)], 0.05),  # a tenth of 21 is rounded up to 3
    ],
)
def test_the_worst_decile_is_a_tenth_and_at_least_one(accuracies: list[float], expected: float) -> None:
    assert compute_worst_decile(accuracies[::-1]) == pytest.approx(expected)


def test_the_cost_is_that_of_the_first_point_at_or_above_the_target() -> None:
    curve = a_run(accuracy=0.7).curve  # 0.1, 0.3, 0.5, 0.7
    assert compute_cost(curve, 0.1) == Cost(round=0, bytes=0, seconds=0.0)
    assert compute_cost(curve, curve[2].accuracy) == Cost(round=20, bytes=2_000_000, seconds=4.0)
    assert compute_cost(curve, 0.71) is None
    falling = [Point(round=r, score=a, bytes_up=0, bytes_down=0, seconds=0) for r, a in ((0, 0.2), (5, 0.9), (9, 0.4))]
    assert compute_cost(falling, 0.5) == Cost(round=5, bytes=0, seconds=0.0)


FORMULAS = {
    **{name: f"'{name}" for name in ("=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("x","y")')},
    **{f"{c}=1": f"{repr(c)[1:-1]}=1" for c in "\t\r\n"},
}


@pytest.mark.parametrize("name", FORMULAS)
def test_no_name_of_a_device_class_or_reason_is_a_formula_in_a_spreadsheet(name: str) -> None:
    text = format_csv([{"device": name, f"{name} f1": -0.5, "why": name}])
    header, row = csv.reader(io.StringIO(text, newline=""))
    assert header == ["device", f"{FORMULAS[name]} f1", "why"]
    assert row == [FORMULAS[name], "-0.5", FORMULAS[name]]


def test_accuracies_are_called_so_only_where_they_are() -> None:
    """A score that is no accuracy is `score` in files, undefined ones are null, and both are read again."""
    run = a_regression(r2=-0.25)
    encoded = encode_figures(run, run.figure)
    found = json.loads(encoded)
    assert b"accuracy" not in encoded
    assert b"macro_f1" not in encoded
    assert (found["score_name"], found["score"], found["metrics"]) == ("r2", -0.25, {"rmse": 618.75})
    assert [device["score"].get("score") for device in found["devices"]] == [None, -0.25]
    again = decode_figures(encoded, RunOutcome)
    assert math.isnan(again.devices[0].score.value)
    assert again.curve == run.curve
    assert again.score == -0.25


def test_results_of_classes_are_encoded_as_ever() -> None:
    run = a_run(details={"silhouette": 0.5}, validation={1: 0.5})
    encoded = encode_figures(run, run.figure)
    assert encoded == msgspec.json.format(msgspec.json.encode(run), indent=1)
    assert b"score_name" not in encoded
    assert decode_figures(encoded, RunOutcome) == run


def test_rows_have_the_score_and_further_figures_by_name() -> None:
    first, second = a_regression().to_rows()
    assert list(first)[-2:] == ["r2", "rmse"]
    assert (second["r2"], second["rmse"]) == (0.5, 1234.5)


def test_a_comparison_of_another_score_is_read_again() -> None:
    runs = [a_regression(method, 0, r2) for method, r2 in (("local", -0.1), ("fedge", 0.4))]
    comparison = compare_runs(Scenario(), runs, ["local", "fedge"], [0], "local", None)
    encoded = encode_figures(comparison, comparison.figure)
    assert b"accuracy" not in encoded
    again = Comparison.read(encoded)
    assert again.methods == comparison.methods
    assert comparison.target == pytest.approx(0.38)
    assert comparison.to_rows()[1]["r2"] == 0.4
    shown = str(comparison)
    assert "accuracy" not in shown
    assert "-0.100" in shown
    assert "+0.500" in shown
    assert "RMSE: mean RMSE over the devices" in shown
    page = make_comparison_report(comparison).page
    assert "ccurac" not in page
    assert "R² by round" in page
    assert "ccurac" not in make_run_report(runs[1], Scenario()).page


@pytest.mark.parametrize(
    ("name", "value", "cell", "whole"),
    [
        ("accuracy", 0.8125, "81.2", "81.2 %"),
        ("r2", -0.4321, "-0.432", "-0.432"),
        ("mean_iou", 0.5, "50.0", "50.0 %"),
        ("rmse power", 1234.56, "1235", "1235"),
        ("likelihood", float("nan"), "–", "–"),
        ("own_thing", 0.25, "0.25", "0.25"),
    ],
)
def test_each_figure_has_its_format(name: str, value: float, cell: str, whole: str) -> None:
    figure = get_figure(name)
    assert (figure.format_cell(value), figure.format(value)) == (cell, whole)


def test_a_score_is_called_accuracy_where_it_is_one() -> None:
    run = a_run(accuracy=0.8)
    assert (run.score, run.global_score, run.sample_score) == (0.8, 0.7, 0.8)
    assert (run.accuracy, run.global_accuracy, run.sample_accuracy) == (0.8, 0.7, 0.8)
    assert run.devices[0].score.value == run.devices[0].score.accuracy == 0.8
    assert [point.score for point in run.curve] == [point.accuracy for point in run.curve]
    (method, *_) = a_comparison().methods
    assert method.accuracy == method.score


def test_another_score_is_no_accuracy() -> None:
    run = a_regression(r2=0.5)
    assert (run.score, run.devices[1].score.value) == (0.5, 0.5)
    (method,) = compare_runs(Scenario(), [run], ["fedavg"], (0,), "fedavg", None).methods
    for one, name in (
        (run, "accuracy"),
        (run, "sample_accuracy"),
        (run.devices[1].score, "accuracy"),
        (method, "accuracy"),
    ):
        with pytest.raises(AttributeError, match="the score of this problem is R², no accuracy: read "):
            getattr(one, name)
    assert not hasattr(decode_figures(encode_figures(run, run.figure), RunOutcome), "accuracy")
    assert method.score.mean == 0.5
