"""A device takes up the classes that have joined, and finds them again after a restart."""

from pathlib import Path

import msgspec
import pytest

from edge_agent.device.own_task import FILE, UNNAMED, adopt_classes, explain_other_task, read_own_task
from fedge.data.classes import AddedClasses, add_classes
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError

TASK = TaskSpec(name="pets", classes=("cat", "dog"), input_shape=(3,), model="mlp")
GROWN = add_classes(TASK, ("bird",))
ADDED = AddedClasses(names=("bird",), fingerprint=GROWN.compute_fingerprint())


def test_classes_that_joined_are_there_after_a_restart(tmp_path: Path) -> None:
    assert read_own_task(TASK, tmp_path) == TASK
    assert adopt_classes(TASK, tmp_path, ADDED)
    assert read_own_task(TASK, tmp_path) == GROWN
    assert read_own_task(GROWN, tmp_path) == GROWN


def test_classes_of_another_task_change_nothing(tmp_path: Path) -> None:
    other = msgspec.structs.replace(TASK, model="cnn")
    assert not adopt_classes(other, tmp_path, ADDED)
    assert not (tmp_path / FILE).exists()
    adopt_classes(TASK, tmp_path, ADDED)
    assert read_own_task(other, tmp_path) == other


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match="delete it"):
        read_own_task(TASK, tmp_path)


def test_what_differs_is_said_in_words() -> None:
    own = msgspec.structs.replace(TASK, model="cnn", input_shape=(1, 8, 8))
    assert explain_other_task(own, msgspec.json.encode(GROWN)) == (
        "the task is one without class bird; the input 1 x 8 x 8 in place of 3; the network cnn in place of mlp"
    )
    assert explain_other_task(TASK, b"") == explain_other_task(TASK, b"nonsense") == UNNAMED
