"""The user's own figure: what it may be and return, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordinator.simulation.own_metric import compute_own, load_metric
from fedge.errors import ConfigError
from fedge.system.loading import register_object

Y = np.array([1, 0, 1])


def share_of_ones(said: Any, y: np.ndarray) -> float:
    return float((said == y).mean())


class Several:
    def __call__(self, said: Any, y: np.ndarray) -> dict[str, np.floating]:
        return {"missed": np.float32(0.25), "cost": np.float64(3)}


def test_a_function_or_an_object_that_can_be_called_gives_figures_by_name() -> None:
    assert compute_own(share_of_ones, np.ones(3), Y) == {"share_of_ones": pytest.approx(2 / 3)}
    assert compute_own(Several(), Y, Y) == {"missed": 0.25, "cost": 3.0}


def test_it_is_found_by_its_path_or_in_this_process() -> None:
    assert load_metric(None) is None
    assert load_metric("numpy:mean") is np.mean
    assert load_metric(register_object(share_of_ones)) is share_of_ones
    with pytest.raises(ConfigError, match="cannot load numpy:meen"):
        load_metric("numpy:meen")
    with pytest.raises(ConfigError, match=r"the metric numpy:pi is no function, but float"):
        load_metric("numpy:pi")


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda _said, _y: 1 / 0, "ZeroDivisionError"),
        (lambda _said, _y: None, "TypeError"),
        (lambda _said: 1.0, "TypeError"),
        (lambda _said, _y: {"a": "b"}, "ValueError"),
    ],
)
def test_one_that_fails_or_gives_no_number_is_named(metric: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"the metric <lambda> fails with {says}.*: it returns a number"):
        compute_own(metric, Y, Y)
