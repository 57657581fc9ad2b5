"""The Python interface is found when it is asked for."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import fedge
from fedge.errors import ConfigError


def said(code: str) -> str:
    """What code prints in an interpreter of its own that has no torch."""
    code = f"import sys; sys.modules['torch'] = None\nimport fedge\ntry: {code}\nexcept Exception as e: print(e)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_what_there_is() -> None:
    assert set(fedge.__all__) < set(dir(fedge))
    for name in fedge.__all__:
        assert callable(getattr(fedge, name))
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        fedge.simulat  # noqa: B018


def test_what_is_missing_is_said_with_the_extra_that_brings_it() -> None:
    lacks = "fedge.simulate needs the package torch: in fedge's clone, pip install '.[coordinator]'"
    assert lacks in said("fedge.simulate()")
    assert "ok" in said("fedge.load; print('ok')"), "which needs no torch"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fedge.Task.from_arrays([[0.0]], [0], clases=["a"]),
            "from_arrays has no argument 'clases' (did you mean",
        ),
        (lambda: fedge.Task.from_arrays(X=[[0.0]]), "Task.from_arrays has no argument 'X' (did you mean x?)"),
        (
            lambda: fedge.Task.from_arrays([[0.0]], optimizer="adam"),
            "has no argument 'optimizer': it has x, y, problem",
        ),
        (
            lambda: fedge.Task.from_dataset([], modle="mlp"),
            "from_dataset has no argument 'modle' (did you mean model?)",
        ),
        (
            lambda: fedge.Task.from_folder("x", problm="segmentation"),
            "has no argument 'problm' (did you mean problem?)",
        ),
        (lambda: fedge.load("x", budget=3), "load has no argument 'budget' (did you mean budget_"),
    ],
)
def test_a_mistyped_argument_is_answered_with_the_nearest(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        call()


def test_arguments_can_still_be_read() -> None:
    assert list(inspect.signature(fedge.Task.from_arrays).parameters)[:3] == ["x", "y", "problem"]
    assert "budget_ms" in inspect.signature(fedge.load).parameters
