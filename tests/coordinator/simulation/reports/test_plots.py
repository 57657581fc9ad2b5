import re
import subprocess
import sys

import numpy as np
import pytest

from coordinator.simulation.reports import plots
from coordinator.simulation.reports.plots import compute_floor, draw_curves, select_common_points
from tests.support.comparison import a_comparison, a_run


@pytest.mark.parametrize("label", ["round", "MB up and down", "simulated seconds"])
def test_a_line_for_each_method_in_the_colours_of_the_page(label: str) -> None:
    svg = draw_curves(a_comparison(10).runs, label)
    assert svg.startswith("<svg")
    assert f">{label}</text>" in svg
    for k in range(10):
        assert f">m{k}</text>" in svg
    assert not re.search(r"#0[1-6]0", svg), "a placeholder was left"
    assert {f"var(--cluster-{k})" for k in range(8)} <= set(re.findall(r"var\(--cluster-\d\)", svg))
    assert "stroke-dasharray" in svg, "the ninth method has the first one's colour and another style"


def test_one_seed_and_a_method_without_traffic_can_be_drawn() -> None:
    still = [a_run("local", curve=a_run().curve[:1])]
    assert "local" in draw_curves(still, "MB up and down")


def test_a_seed_that_ended_early_is_drawn_with_the_others() -> None:
    whole = a_run("fedepc", 0).curve
    early = (*whole[:2], whole[3])
    assert [[point.round for point in curve] for curve in select_common_points([whole, early])] == [[0, 10, 30]] * 2
    assert "fedepc" in draw_curves([a_run("fedepc", 0), a_run("fedepc", 1, curve=early)])


@pytest.mark.parametrize(
    ("final", "floor"), [([0.95, 0.87], 0.7), ([0.9], 0.8), ([0.05], 0.0), ([0.93, 0.81], 0.7), ([1.0], 0.9)]
)
def test_the_axis_begins_below_the_lowest_end(final: list[float], floor: float) -> None:
    assert compute_floor(final) == pytest.approx(floor)


def test_outside_a_page_colours_are_fixed() -> None:
    svg = plots.fix_colours(draw_curves(a_comparison(10).runs))
    assert "var(" not in svg
    assert plots.read_light_colours()["--cluster-0"] in svg


def test_curves_are_drawn_on_axes_of_the_callers_own() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert a_comparison(2).plot(axes) is axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["m0", "m1"]
    assert a_run().plot(Figure().add_subplot()).get_xlabel() == "round"


@pytest.mark.parametrize(("lowest", "highest"), [(0.82, 0.9), (0.815, 0.905), (0.95, 0.97), (0.0, 1.0), (0.9, 0.901)])
def test_ticks_say_where_they_are_and_lie_evenly(lowest: float, highest: float) -> None:
    """Between 82 and 90 % they read 82, 85, 88, 90, and were at 82.5, 85, 87.5."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5.4, 3.4)).add_subplot()
    axes.set_ylim(lowest, highest)
    plots.set_axis(axes.yaxis, "accuracy", 0.0)
    places = axes.yaxis.get_majorticklocs()
    told = [float(tick.removesuffix("%")) for tick in axes.yaxis.get_major_formatter().format_ticks(places)]
    np.testing.assert_allclose(told, 100 * places, atol=1e-6)
    assert len(told) >= 4
    assert all(tick == round(tick) for tick in told) or highest - lowest < 0.05


def test_an_axis_that_does_not_begin_at_zero_says_so() -> None:
    from matplotlib.figure import Figure

    assert a_run(accuracy=0.95).plot(Figure().add_subplot()).get_ylabel() == "accuracy, from 80%"
    assert a_run(accuracy=0.05).plot(Figure().add_subplot()).get_ylabel() == "accuracy"
    assert "test accuracy, from 80%" in plots.draw_device_bars([a_run(accuracy=0.95)])
    assert "validation accuracy, from 40%" in plots.draw_validation({"m": {1: 0.55, 2: 0.7}})


def test_a_bar_is_as_long_as_the_accuracy() -> None:
    svg = plots.draw_device_bars([a_run(accuracy=0.95), a_run(accuracy=0.9)])
    lengths = []
    for colour in ("cluster-0", "cluster-1"):
        bars = [
            np.array(re.findall(r"-?[\d.]+", path), float)
            for path in re.findall(rf'<path d="([^"]*)"[^>]*clip-path[^>]*{colour}', svg)
        ]
        lengths.append(np.ptp(bars[0][0::2]))
    assert lengths[0] / lengths[1] == pytest.approx(0.95 / 0.9, rel=1e-3)


def test_groups_take_the_colour_of_the_cluster_that_found_them() -> None:
    groups = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
    assert plots.choose_group_colours(groups, {"a": 1, "b": 1, "c": 0, "d": 0, "e": 2}) == {0: 1, 1: 0, 2: 2}


def test_no_two_groups_have_one_colour_even_if_one_cluster_holds_all() -> None:
    numbers = plots.choose_group_colours({"a": 0, "b": 1, "c": 2}, {"a": 1, "b": 1})
    assert numbers[0] == 1
    assert len(set(numbers.values())) == 3


def test_matplotlib_is_imported_only_to_draw() -> None:
    script = "import sys, coordinator.simulation.reports.report; print('matplotlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
