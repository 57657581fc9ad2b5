import re

import pytest

from coordinator.simulation.plots import by_bytes, by_round, by_seconds, common_points, floor_of
from tests.support.comparison import a_comparison, a_run


@pytest.mark.parametrize(
    ("plot", "label"), [(by_round, "round"), (by_bytes, "MB up and down"), (by_seconds, "simulated seconds")]
)
def test_a_line_for_each_method_in_the_colours_of_the_page(plot, label: str) -> None:
    svg = plot(a_comparison(10).runs)
    assert svg.startswith("<svg")
    assert f">{label}</text>" in svg
    for k in range(10):
        assert f">m{k}</text>" in svg
    assert not re.search(r"#0[1-6]0", svg), "a placeholder was left"
    assert {f"var(--cluster-{k})" for k in range(8)} <= set(re.findall(r"var\(--cluster-\d\)", svg))
    assert "stroke-dasharray" in svg, "the ninth method has the first one's colour and another style"


def test_one_seed_and_a_method_without_traffic_can_be_drawn() -> None:
    still = [a_run("local", curve=a_run().curve[:1])]
    assert "local" in by_bytes(still)


def test_a_seed_that_ended_early_is_drawn_with_the_others() -> None:
    whole = a_run("fedepc", 0).curve
    early = (*whole[:2], whole[3])
    assert [[point.round for point in curve] for curve in common_points([whole, early])] == [[0, 10, 30]] * 2
    assert "fedepc" in by_round([a_run("fedepc", 0), a_run("fedepc", 1, curve=early)])


@pytest.mark.parametrize(("final", "floor"), [([0.95, 0.87], 0.7), ([0.9], 0.8), ([0.05], 0.0)])
def test_the_axis_begins_below_the_lowest_end(final: list[float], floor: float) -> None:
    assert floor_of(final) == pytest.approx(floor)
