"""Classes that join a federation after it has begun: the same task with further classes at the end of its list.

So the numbers of the earlier classes hold everywhere: in labels, counts, and the outputs of networks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from fedge.data.problems.names import PRINTABLE
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError

MAX_ADDED: Final = 50
"""Most classes that can join a federation, so that a message has room for their names."""
MAX_NAME: Final = 100
"""Longest name of such a class."""
ClassName = Annotated[str, Meta(pattern=PRINTABLE, min_length=1, max_length=MAX_NAME)]


class AddedClasses(Struct, frozen=True, kw_only=True):
    """The classes that joined a federation, in order, and the fingerprint of its present task, which has them."""

    names: Annotated[tuple[ClassName, ...], Meta(max_length=MAX_ADDED)] = ()
    fingerprint: Annotated[str, Meta(max_length=64)] = ""


def add_classes(task: TaskSpec, names: Sequence[str]) -> TaskSpec:
    """Return the task with further classes after its own, also in a table's schema.

    Raises:
        ConfigError: a name is empty, too long, unprintable, or a class already.
    """
    for i, name in enumerate(names):
        if not (0 < len(name) <= MAX_NAME and re.match(PRINTABLE, name)):
            raise ConfigError(f"{name!r:.100} is no name of a class: write 1 to {MAX_NAME} printable characters")
        if name in (*task.classes, *names[:i]):
            raise ConfigError(f"{name} is a class already: the task has {', '.join(task.classes)}")
    classes, how = (*task.classes, *names), task.preprocessing
    if how.table:
        how = replace(how, table=replace(how.table, classes=classes))
    return replace(task, classes=classes, preprocessing=how)


def find_grown_task(task: TaskSpec, added: AddedClasses) -> TaskSpec | None:
    """Return a federation's present task, found from the one with which a machine was started; None if it is another.

    The machine's own task may have none of the added classes, or the first few.
    """
    for known in range(len(added.names) + 1):
        if known and task.classes[-known:] != added.names[:known]:
            continue
        missing = added.names[known:]
        if set(missing).isdisjoint(task.classes) and len(set(missing)) == len(missing):
            grown = add_classes(task, missing)
            if grown.compute_fingerprint() == added.fingerprint:
                return grown
    return None


def iterate_earlier(task: TaskSpec, added: AddedClasses) -> Iterator[TaskSpec]:
    """Yield the tasks that a federation had before the last of the added classes joined, the latest first."""
    for n in range(1, len(added.names) + 1):
        classes, how = task.classes[:-n], task.preprocessing
        if how.table:
            how = replace(how, table=replace(how.table, classes=classes))
        yield replace(task, classes=classes, preprocessing=how)


def has_grown(old: TaskSpec, new: TaskSpec) -> bool:
    """Return whether a task is another one with further classes, or the same."""
    old, new = old.with_head_class(""), new.with_head_class("")  # a method's head is not the task's
    added = new.classes[len(old.classes) :]
    return new == old or (new.classes[: len(old.classes)] == old.classes and add_classes(old, added) == new)
