"""What is asked about arrays: the problem by its name, refusals that say what to do, and targets of other forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedge.errors import ConfigError
from fedge.tasks import Task, load_pool, load_task, read_device_data

N = 30
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(N, 1, 16, 16)).astype(np.float32)
KINDS = {
    "classification": (X, np.arange(N) % 3),
    "multi-label": (X, np.random.default_rng(2).integers(0, 2, (N, 3))),
    "regression": (X, X[:, 0] + 5.0),
    "segmentation": (IMAGES, (IMAGES[:, 0] > 0).astype(np.int64)),
    "reconstruction": (X, None),
}


def write_arrays(folder: Path, **named: Any) -> Path:
    file = folder / "all.npz"
    np.savez(file, **{name: value for name, value in named.items() if value is not None})
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_any_problem(tmp_path: Path, kind: str) -> None:
    x, y = KINDS[kind]
    file = write_arrays(tmp_path, x=x, y=y)
    task = load_task("arrays", file, problem=kind)
    assert task.problem.kind == kind
    assert len(load_pool("arrays", file, problem=kind).y) == N
    assert len(read_device_data(task, file, seed=0).labelled[0]) == N


def test_classification_is_the_default(tmp_path: Path) -> None:
    file = write_arrays(tmp_path, x=X, y=np.arange(N) % 3)
    assert load_task("arrays", file) == load_task("arrays", file, problem="classification")


@pytest.mark.parametrize(
    ("y", "kind", "says"),
    [
        (X[:, 0], "classification", r"--problem regression"),
        (X[:, :2], "classification", r"--problem regression"),
        (KINDS["multi-label"][1], "classification", r"--problem multi-label"),
        (np.zeros((N, 4, 4), np.int64), "classification", r"--problem segmentation"),
        (np.eye(3)[np.arange(N) % 3] * (np.arange(N) != 4)[:, None], "classification", "row 4 holds 0 ones: leave it"),
        (np.maximum(np.eye(3)[np.arange(N) % 3], (np.arange(N) == 2)[:, None]), "classification", "row 2 holds 3 ones"),
        (X[:, 0], "regresion", r"did you mean regression\?"),
        (X[:, 0], "multi-label", "0 or 1 for each label"),
        (np.zeros(N, np.int64), "segmentation", r"segmentation takes images"),
        (None, "regression", r"must hold the arrays x and y"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(tmp_path: Path, y: Any, kind: str, says: str) -> None:
    file = write_arrays(tmp_path, x=X, y=y)
    with pytest.raises(ConfigError, match=says):
        load_task("arrays", file, problem=kind)


def test_another_problem_than_that_of_the_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="digits asks for classification, not regression: leave out the problem"):
        load_task("digits", problem="regression")
    assert load_task("digits", problem="classification") == load_task("digits")


def test_one_hot_rows_are_told(caplog: pytest.LogCaptureFixture) -> None:
    task = Task.from_arrays(X, np.eye(3)[np.arange(N) % 3])
    assert task.pool.y.tolist() == (np.arange(N) % 3).tolist()
    assert "event=one_hot_rows" in caplog.text
