"""ONNX Runtime leaves no trace of what it does, and so sends none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "deploy" / "golden" / "bundle"
PREDICT = f"import numpy as np, deploy; deploy.load({str(GOLDEN)!r}).predict(np.zeros((1, 8, 8), np.uint8))"


def left_by(code: str, home: Path) -> list[str]:
    """What a process with an empty home and no other setting has written there."""
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=home, check=True)
    return [str(path.relative_to(home)) for path in home.rglob("*") if "onnxruntime" in path.name]


@pytest.mark.torch_free
def test_a_prediction_leaves_no_telemetry(tmp_path: Path) -> None:
    assert left_by(PREDICT, tmp_path) == []


@pytest.mark.parametrize(
    "module", ["edge_agent.steps.descriptions.route", "export.int8", "coordinator.simulation.evaluation"]
)
def test_nor_do_the_other_sides(tmp_path: Path, module: str) -> None:
    code = f"import {module}; from fedge.bundle.runtime import onnxruntime; onnxruntime.SessionOptions()"
    assert left_by(code, tmp_path) == []
