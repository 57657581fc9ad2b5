from pathlib import Path

import numpy as np
import pytest

from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.tasks.data import DeviceData, load_user_task


def data(**changes: np.ndarray) -> DeviceData:
    fields = {
        "x_train": np.arange(8, dtype=np.float32).reshape(4, 2),
        "y_train": np.array([0, 2, 2, 1]),
        "sensitive": np.array([True, False, False, True]),
        "x_val": np.zeros((2, 2), np.float32),
        "y_val": np.array([0, 0]),
    }
    return DeviceData(**(fields | changes))


def test_shared_samples_are_those_that_are_not_sensitive() -> None:
    x, y = data().shared
    assert x.tolist() == [[2, 3], [4, 5]]
    assert y.tolist() == [2, 2]
    assert (data().n_train, data().n_shared) == (4, 2)


def test_labelled_samples_are_those_for_training_and_then_those_for_validation() -> None:
    x, y = data().labelled
    assert x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 0], [0, 0]]
    assert y.tolist() == [0, 2, 2, 1, 0, 0]


def test_further_samples_follow_in_each_part_and_the_former_ones_are_views() -> None:
    first, more = data(), data(y_train=np.array([1, 1, 0, 0]), sensitive_val=np.array([True, False]))
    both, own = first.join(more)
    assert both.y_train.tolist() == [0, 2, 2, 1, 1, 1, 0, 0]
    assert both.sensitive.tolist() == [True, False, False, True] * 2
    assert both.marks_val.tolist() == [False, False, True, False]
    assert own.compute_digest() == first.compute_digest()
    assert own.x_train.base is both.x_train


def test_nothing_is_learned_from_known_anomalies_and_nothing_chosen_by_them() -> None:
    task = TaskSpec(name="t", asked=Reconstruction(), input_shape=(2,), model="autoencoder")
    given = data(y_train=np.array([0, 1, 0, 1]), y_val=np.array([1, 0]))
    found = given.to_task_types(task).select_usual(task)
    assert found.x_train.tolist() == given.x_train[[0, 2]].tolist()
    assert found.sensitive.tolist() == given.sensitive[[0, 2]].tolist()
    assert found.x_val.tolist() == given.x_val[[1]].tolist()
    assert found.marks_val.tolist() == [False]
    labelled = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp")
    assert data().select_usual(labelled).n_train == 4


def test_class_counts() -> None:
    assert data().count_classes(4).tolist() == [1, 1, 2, 0]
    assert data().count_classes(4, with_validation=True).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(("field", "label"), [("y_train", 3), ("y_val", 3), ("y_train", -1)])
def test_labels_that_the_task_does_not_have_are_refused(field: str, label: int) -> None:
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp")
    data().to_task_types(task)
    labels = getattr(data(), field)
    labels[0] = label
    part = {"y_train": "training", "y_val": "validation"}[field]
    with pytest.raises(
        ConfigError, match=rf"y of the {part} samples holds .*{label}.*, and class numbers are 0\.\.2 here"
    ):
        data(**{field: labels}).to_task_types(task)


def test_what_a_task_class_returns_in_other_types_is_taken_if_it_is_the_same() -> None:
    task, wanted = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp"), data()
    found = data(
        x_train=wanted.x_train.astype(np.float64),
        y_train=wanted.y_train.astype(np.uint8),
        sensitive=wanted.sensitive.astype(np.int64),
        y_val=np.array(["a", "b", "c"])[wanted.y_val],
    ).to_task_types(task)
    for name in ("x_train", "y_train", "sensitive", "y_val"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert found.shared[0].tolist() == wanted.shared[0].tolist(), "marks of integers would pick other samples"
    assert found.compute_digest() == wanted.compute_digest()


@pytest.mark.parametrize(
    ("field", "values", "says"),
    [
        ("y_train", [0.5, 1.0, 2.0, 1.0], r"y of the training samples must be one whole number per sample"),
        ("y_train", ["a", "b", "c", "d"], r"y of the training samples holds the label 'd'; the classes are a, b, c"),
        ("sensitive", [0, 1, 2, 0], r"sensitive of the training samples must be in 0\.\.1, found 0\.\.2"),
        ("sensitive", ["no", "yes", "no", "no"], "sensitive of the training samples must be one whole number"),
        ("x_train", [["a", "b"]] * 4, "x of the training samples must be numbers"),
    ],
)
def test_what_it_returns_that_is_none_is_refused(field: str, values: list, says: str) -> None:
    task = TaskSpec(name="t", classes=("a", "b", "c"), input_shape=(2,), model="mlp")
    with pytest.raises(ConfigError, match=says):
        data(**{field: np.array(values)}).to_task_types(task)


@pytest.mark.parametrize("field", ["y_train", "sensitive", "y_val"])
def test_lengths_must_agree(field: str) -> None:
    with pytest.raises(ConfigError, match="one target and one mark"):
        data(**{field: getattr(data(), field)[:1]})


def test_user_task_is_an_object_of_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text("class Mine:\n    answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_user_task("my_tasks:Mine").answer == 42  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="my_tasks:Yours"):
        load_user_task("my_tasks:Yours")
