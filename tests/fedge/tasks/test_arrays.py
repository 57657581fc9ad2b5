from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.own import Own
from fedge.data.problems.problem import Problem
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import Task, arrays, load_task, read_device_data, read_parts
from tests.support.own_problem import NEAREST


def file_of(folder: Path, **content: Any) -> Path:
    np.savez(folder / "data.npz", **content)
    return folder / "data.npz"


X, Y = np.zeros((4, 3), np.float32), np.array([0, 1, 1, 0], np.uint8)


def test_reads_and_converts(tmp_path: Path) -> None:
    table = arrays.read_arrays(file_of(tmp_path, x=X, y=Y, split=[0, 0, 1, 2], sensitive=[True, False, 1, 0]))
    assert set(table) == {"x", "y", "split", "sensitive"}
    assert (table["y"].dtype, table["split"].dtype, table["sensitive"].dtype) == (np.uint8, np.int64, np.bool_)
    assert table["sensitive"].tolist() == [True, False, True, False]


def test_blocks_are_numbered_by_any_name(tmp_path: Path) -> None:
    by_name = arrays.read_arrays(
        file_of(tmp_path, x=X, y=Y, block=["run 7", "run 3", "run 7", "x"], split=[1, 0, 1, 2])
    )
    assert by_name["block"].tolist() == [1, 0, 1, 2]
    assert arrays.read_arrays(file_of(tmp_path, x=X, y=Y, block=[-5, 900, 900, 7]))["block"].tolist() == [0, 2, 2, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no x": ({"y": Y}, "x and y"),
    "no y": ({"x": X}, "x and y"),
    "no samples": ({"x": X[:0], "y": Y[:0]}, "samples of numbers"),
    "flat x": ({"x": X[:, 0], "y": Y}, "samples of numbers"),
    "text": ({"x": X.astype(str), "y": Y}, "samples of numbers"),
    "NaN": ({"x": np.full_like(X, np.nan), "y": Y}, r"sample 0, column 0 .* is not a finite"),
    "too large": ({"x": np.eye(4, 3, k=-1) * 1e39, "y": Y}, r"sample 1, column 0 .* is more than single"),
    "mask too short": ({"x": X, "y": Y, "sensitive": [True, False, True]}, "sensitive must be"),
    "mask with gaps": ({"x": X, "y": Y, "sensitive": [1.0, 0.0, np.nan, 0.0]}, "sensitive must be"),
    "people that are no numbers": ({"x": X, "y": Y, "user": [0, 1, -1, 0]}, "user must be"),
    "mask of other numbers": ({"x": X, "y": Y, "sensitive": [0, 1, 2, 0]}, "sensitive must be"),
    "unknown part": ({"x": X, "y": Y, "split": [0, 1, 3, 0]}, "split must be"),
    "mark under another name": ({"x": X, "y": Y, "Sensitive": [True] * 4}, r"'Sensitive'.*did you mean sensitive"),
    "mark in capitals": ({"x": X, "y": Y, "SENSITIVE": [True] * 4}, "did you mean sensitive"),
    "unknown array": ({"x": X, "y": Y, "weather": X}, "x, y, split, sensitive, user, block, classes"),
    "blocks that are shares": ({"x": X, "y": Y, "block": [0.5] * 4}, "block must be one number or name per sample"),
    "too few blocks": ({"x": X, "y": Y, "block": [1, 2]}, "block must be one number or name per sample"),
    "a block on two sides": (
        {"x": X, "y": Y, "block": ["a", "b", "b", "c"], "split": [0, 0, 2, 1]},
        "samples of block b are in several parts of split",
    ),
    "objects": ({"x": np.array([[{}]] * 4, dtype=object), "y": Y}, "not an .npz"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_wrong_content_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrays.read_arrays(file_of(tmp_path, **content))


LABELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "numbers": (Y, ("0", "1")),
    "whole floats": (Y.astype(float), ("0", "1")),
    "truth values": (Y.astype(bool), ("0", "1")),
    "from 3 on": (Y + 3, ("3", "4")),
    "text": (["cat", "dog", "dog", "cat"], ("cat", "dog")),
    "one-hot rows": (np.eye(2)[Y], ("0", "1")),
    "a column": (Y[:, np.newaxis], ("0", "1")),
}


@pytest.mark.parametrize(("y", "classes"), LABELS.values(), ids=LABELS)
def test_labels_of_any_form_are_the_same_classes_from_every_source(
    y: Any, classes: tuple[str, ...], tmp_path: Path
) -> None:
    """The file that describes the task, a device's own file, and arrays in memory."""
    file = file_of(tmp_path, x=X + Y[:, np.newaxis], y=y)
    task = load_task("arrays", file)
    assert task.classes == classes
    assert read_parts(task, file, seed=0).y.tolist() == Y.tolist()
    only = np.asarray(y)[1:3]
    assert read_parts(task, file_of(tmp_path, x=X[:2], y=only), seed=0).y.tolist() == [1, 1], "one class of two"
    own = Task.from_arrays(X + Y[:, np.newaxis], y)
    assert own.spec.classes == classes
    assert own.spec.problem.convert_targets(own.pool.y, 4, (3,), "y").tolist() == Y.tolist()


def test_names_of_classes_are_kept_whatever_the_labels_are(tmp_path: Path) -> None:
    names = np.array(["cat", "dog"])
    for y in (Y, np.eye(2)[Y], names[Y]):
        assert load_task("arrays", file_of(tmp_path, x=X + Y[:, np.newaxis], y=y, classes=names)).classes == (*names,)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        ([1, 1, -1, 1], r"y holds -1\.\.1, and class numbers begin with 0.*np\.unique"),
        ([0.5, 1, 0, 0], r"y must be one whole number per sample \(4,\), not float64"),
        (Y[:3], r"y must be one whole number per sample \(4,\), not uint8\(3,\)"),
        (np.eye(4)[:, :3], "y must be one whole number per sample"),
    ],
)
def test_labels_that_are_none_are_refused(y: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_task("arrays", file_of(tmp_path, x=X, y=y))


PROBLEMS: dict[str, tuple[Problem, Any]] = {
    "multi-label": (MultiLabel(labels=("a", "b")), [[0, 1], [1, 1], [0, 0], [1, 0]]),
    "regression": (Regression(targets=("a",), mean=(2.0,), std=(4.0,)), [2.0, 6.0, -2.0, 4.0]),
    "own": (Own(code=NEAREST, outputs=(1, 2), targets=(2,)), np.eye(4, 2)),
    "reconstruction": (Reconstruction(), None),
}


@pytest.mark.parametrize(("problem", "y"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_device_reads_its_own_file_by_the_tasks_problem_and_converts_it_once(
    problem: Any, y: Any, tmp_path: Path
) -> None:
    task = TaskSpec(name="t", asked=problem, input_shape=(3,), model="mlp")
    found = read_device_data(task, file_of(tmp_path, x=X, **({} if y is None else {"y": y})), seed=0)
    assert found.to_task_types(task) is found
    wanted = np.zeros(4, np.int64) if y is None else problem.convert_targets(np.asarray(y), 4, (3,), "y")
    (x, targets), order = found.labelled, np.lexsort(wanted.reshape(4, -1).T)
    assert len(x) == 4
    assert targets.dtype == wanted.dtype
    assert targets[np.lexsort(targets.reshape(4, -1).T)].tolist() == wanted[order].tolist()


def test_what_is_no_npz_is_named(tmp_path: Path) -> None:
    whole = file_of(tmp_path, x=X, y=Y).read_bytes()
    np.save(tmp_path / "array.npy", X)
    for content in (b"", b"text", whole[:50], whole[:-30], (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.npz"):
            arrays.read_arrays(tmp_path / "bad.npz")
    with pytest.raises(ConfigError, match=r"none\.npz"):
        arrays.read_arrays(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 2500, 5000], "the labels 0, 2500, 5000 are 3 classes or 5001: `classes, y = np.unique"),
        (range(1, 11), r"the labels 1, 2, 3, 4, 5, \.\.\. are 10 classes or 11: "),
        ([0, 2], "name all classes, those without samples, too"),
    ],
)
def test_labels_with_gaps_are_not_taken_for_classes_that_nobody_meant(labels: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        arrays.get_class_names({"y": np.array(labels)}, Path("data.npz"))


def test_class_names() -> None:
    here = Path("data.npz")
    assert arrays.get_class_names({"y": np.array([2, 0, 1, 1])}, here) == ("0", "1", "2")
    assert arrays.get_class_names({"y": np.array([0, 1]), "classes": np.array(["sit", "stand", "lie"])}, here) == (
        "sit", "stand", "lie",
    )  # fmt: skip
    assert arrays.get_class_names({"y": np.array([0, 0]), "classes": np.array(["sit", "stand"])}, here) == (
        "sit",
        "stand",
    )
    for one in ({"y": np.array([0, 0])}, {"y": np.array([0, 0]), "classes": np.array(["sit"])}):
        with pytest.raises(ConfigError, match="a task has two classes or more: name them all"):
            arrays.get_class_names(one, here)
    with pytest.raises(ConfigError, match="the class sit stands twice"):
        arrays.get_class_names({"y": np.array([0, 1]), "classes": np.array(["sit", "lie", "sit"])}, here)
    with pytest.raises(ConfigError, match="largest label is 2, with 2 names"):
        arrays.get_class_names({"y": np.array([0, 2]), "classes": np.array(["a", "b"])}, here)
