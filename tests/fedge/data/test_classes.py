"""A task grows by classes at its end, and machines that were started with an earlier one find the present one."""

import msgspec
import pytest

from fedge.data.classes import MAX_NAME, AddedClasses, add_classes, find_grown_task, has_grown, iterate_earlier
from fedge.data.task import Column, Preprocessing, Schema, TaskSpec
from fedge.errors import ConfigError

TASK = TaskSpec(name="pets", classes=("cat", "dog"), input_shape=(3,), model="mlp")
GROWN = add_classes(TASK, ("bird", "fish"))
ADDED = AddedClasses(names=("bird", "fish"), fingerprint=GROWN.compute_fingerprint())


def test_classes_come_last_and_nothing_else_changes() -> None:
    assert msgspec.structs.replace(TASK, classes=("cat", "dog", "bird", "fish")) == GROWN
    assert add_classes(TASK, ()) == TASK


def test_the_schema_of_a_table_has_them_too() -> None:
    schema = Schema(target="pet", classes=("cat", "dog"), columns=(Column(name="legs"),))
    table = TaskSpec(
        name="table", classes=schema.classes, input_shape=(1,), model="mlp", preprocessing=Preprocessing(table=schema)
    )
    grown = add_classes(table, ("bird",))
    assert grown.preprocessing.table == msgspec.structs.replace(schema, classes=("cat", "dog", "bird"))
    assert [*iterate_earlier(grown, AddedClasses(names=("bird",)))] == [table]


@pytest.mark.parametrize("names", [("cat",), ("bird", "bird"), ("",), ("a\x1b",), ("x" * (MAX_NAME + 1),)])
def test_a_name_that_is_none_or_stands_twice_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        add_classes(TASK, names)


@pytest.mark.parametrize("given", [TASK, add_classes(TASK, ("bird",)), GROWN])
def test_the_present_task_is_found_from_any_earlier_one(given: TaskSpec) -> None:
    assert find_grown_task(given, ADDED) == GROWN
    assert has_grown(given, GROWN)


@pytest.mark.parametrize(
    "given",
    [
        msgspec.structs.replace(TASK, model="cnn"),
        msgspec.structs.replace(TASK, classes=("dog", "cat")),
        add_classes(TASK, ("fish",)),
        add_classes(TASK, ("fish", "bird")),
        add_classes(GROWN, ("snake",)),
    ],
)
def test_another_task_does_not_become_the_present_one(given: TaskSpec) -> None:
    assert find_grown_task(given, ADDED) is None
    assert not has_grown(given, GROWN)


def test_a_federation_without_further_classes_has_the_task_with_which_it_began() -> None:
    none = AddedClasses(fingerprint=TASK.compute_fingerprint())
    assert find_grown_task(TASK, none) == TASK
    assert find_grown_task(GROWN, none) is None


def test_earlier_tasks() -> None:
    assert [*iterate_earlier(GROWN, ADDED)] == [add_classes(TASK, ("bird",)), TASK]
