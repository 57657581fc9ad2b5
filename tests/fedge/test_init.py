"""The Python interface is found when it is asked for."""

import subprocess
import sys

import pytest

import fedge


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
