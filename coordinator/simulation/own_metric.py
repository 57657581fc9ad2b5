"""A figure of the user's own about each device's answers: `metric=function`, or `--metric package.module:function`.

    def compute_cost(said, y):
        return {"missed alarms": float(((said.class_index != 1) & (y == 1)).mean())}

`said` is what `fedge.load(bundle).predict(x)` returns for the device's test samples, and `y` their targets as the data
have them. The function returns a number, or numbers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.system.loading import FAILURES, describe_error, load_object

Metric = Callable[[Any, NDArray[Any]], object]


def load_metric(path: str | None) -> Metric | None:
    """Return the user's function, or None if there is none.

    Raises:
        ConfigError: it is not there, or is no function.
    """
    if path is None:
        return None
    found = load_object(path)
    if not callable(found):
        raise ConfigError(f"the metric {path} is no function, but {type(found).__name__}: it is called with (said, y)")
    metric: Metric = found
    return metric


def compute_own(metric: Metric, said: object, y: NDArray[Any]) -> dict[str, float]:
    """Return the figures of the user's function, by name; a single number has the function's name.

    Raises:
        ConfigError: it fails, or returns something else.
    """
    name = getattr(metric, "__name__", type(metric).__name__)
    try:
        found = metric(said, y)
        figures: Mapping[Any, Any] = found if isinstance(found, Mapping) else {name: found}
        return {str(key): float(value) for key, value in figures.items()}
    except FAILURES as error:
        raise ConfigError(f"the metric {name} fails with {describe_error(error)}: it returns a number") from error
