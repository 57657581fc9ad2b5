"""What is one whole number per sample, and what is said of that which is none."""

import numpy as np
import pytest

from fedge.data.problems.labels import require_class_numbers, require_whole_numbers
from fedge.errors import ConfigError


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.uint64])
def test_whole_numbers_of_any_type(dtype: type) -> None:
    found = require_whole_numbers(np.array([0, 1, 1], dtype), 3, 1, "y")
    assert (found.dtype, found.tolist()) == (np.int64, [0, 1, 1])
    assert require_whole_numbers(np.zeros(0, dtype), 0, 1, "y").tolist() == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.array([0, 2]), r"marks must be in 0\.\.1, found 0\.\.2$"),
        (np.array([0.0, np.nan]), r"marks must be one whole number per sample \(2,\), not float64\(2,\)$"),
        (np.array([0, 1, 0]), r"not int64\(3,\)$"),
        (np.array([[0, 1], [1, 1]]), r"not int64\(2, 2\)$"),
    ],
)
def test_nothing_is_guessed(values: np.ndarray, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_whole_numbers(values, 2, 1, "marks")


def test_class_numbers_outside_the_tasks_classes() -> None:
    assert require_class_numbers(np.array([0, 9]), 2, 10, "y").tolist() == [0, 9]
    with pytest.raises(
        ConfigError, match=r"^y holds 1\.\.10, and class numbers are 0\.\.9 here, a place in the list of cl"
    ):
        require_class_numbers(np.arange(1, 11), 10, 10, "y")
    with pytest.raises(ConfigError, match=r"^y holds -1\.\.1, and class numbers begin with 0, .*np\.unique"):
        require_class_numbers(np.array([-1, 1]), 2, None, "y")
