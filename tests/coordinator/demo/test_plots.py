import re

import numpy as np
import pytest

from coordinator.demo import plots


def test_a_bar_is_as_long_as_its_count() -> None:
    svg = plots.selection_counts({"a": 4, "b": 2, "c": 0})
    bars = [
        np.array(re.findall(r"-?[\d.]+", path), float) for path in re.findall(r'<path d="([^"]*)"[^>]*method-4', svg)
    ]
    widths = [np.ptp(bar[0::2]) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1], rel=1e-3)
    assert widths[2] == 0


@pytest.mark.parametrize(("values", "floor"), [([0.93, 0.81], 0.7), ([0.05], 0.0), ([1.0], 0.9)])
def test_the_axis_begins_below_the_smallest_value(values: list[float], floor: float) -> None:
    assert plots._floor(values) == pytest.approx(floor)


def test_groups_take_the_colour_of_the_cluster_that_found_them() -> None:
    groups = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
    assert plots.group_colours(groups, {"a": 1, "b": 1, "c": 0, "d": 0, "e": 2}) == {0: 1, 1: 0, 2: 2}


def test_no_two_groups_have_one_colour_even_if_one_cluster_holds_all() -> None:
    numbers = plots.group_colours({"a": 0, "b": 1, "c": 2}, {"a": 1, "b": 1})
    assert numbers[0] == 1
    assert len(set(numbers.values())) == 3
