"""Which precision a scale needs, and what a network cannot see."""

import numpy as np
import pytest

from fedge.data.scaling import LARGEST, choose_precision, explain_unfit


@pytest.mark.parametrize(
    ("mean", "std", "wanted"),
    [
        (0.3053, 0.3761, np.float32),
        (16.0, 1.0, np.float32),
        (-16.1, 1.0, np.float64),
        (101349.0, 1.2, np.float64),
        ([0.0, 101349.0], [1.0, 1.0], np.float64),
        ([0.0, 101349.0], [1.0, 1e5], np.float32),
    ],
)
def test_a_mean_that_is_large_beside_its_deviation_needs_double_precision(
    mean: object, std: object, wanted: type
) -> None:
    assert choose_precision(mean, std) is wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.nan, "is not a finite number"),
        (-np.inf, "is not a finite number"),
        (1e39, "is more than single precision holds"),
    ],
)
def test_the_first_number_that_does_not_fit_is_named_with_its_sample_and_column(value: float, says: str) -> None:
    x = np.ones((4, 3))
    x[2, 1] = x[3, 0] = value
    assert explain_unfit(x).startswith("sample 2, column 1 (counted from 0) is ")
    assert says in explain_unfit(x)
    assert "sample 2, place (0, 1) (counted from 0)" in explain_unfit(x[:, np.newaxis])


def test_what_fits_is_not_named() -> None:
    for x in (np.full((2, 2), LARGEST), np.ones((2, 2), np.float16), np.ones((2, 2), np.int64), np.ones((0, 2))):
        assert explain_unfit(x) == ""


def test_an_input_whose_square_is_not_finite_is_named_too() -> None:
    x = np.array([[-1.8e19, 1.8e19], [0.5, 3e38]], np.float32)
    assert "sample 1, column 1 (counted from 0) is so far from the task's mean" in explain_unfit(x, x)
    assert explain_unfit(x) == explain_unfit(x[:1], x[:1]) == ""


def test_what_is_finite_and_not_once_it_is_scaled_is_named_too() -> None:
    x = np.array([[0.5], [3e38]], np.float32)
    with np.errstate(over="ignore"):
        inputs = (x - np.float32(0.5)) / np.float32(0.1)
    assert "sample 1, column 0 (counted from 0) is so far from the task's mean" in explain_unfit(x, inputs)
