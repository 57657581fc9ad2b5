"""Samples in files that a store takes: images in folders of classes, .npz, .csv and .parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.data import images, npz, tables
from fedge.data.preprocessing import load_image
from fedge.data.problems.labels import require_whole_numbers
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.text import suggest_nearest

ARRAYS: Final = ("x", "y", "sensitive")


@dataclass(frozen=True, slots=True)
class Arriving:
    """A raw sample that arrives, with its class number or converted target if it has one, its mark and its origin."""

    x: NDArray[Any]
    label: int | NDArray[Any] | None
    sensitive: bool
    origin: str


def read_image(task: TaskSpec, folder: Path, name: str, *, label: int | None, marked: bool) -> Arriving:
    """Read an image of a folder; without a `label`, that of its own folder's name, or none if it lies in no folder.

    A task whose samples have a target if nothing is told of them needs no such folders.

    Raises:
        ConfigError: it cannot be read, or its folder is no class of the task.
    """
    problem, own, default = task.problem, PurePosixPath(name).parent.name, task.problem.get_default_target()
    if label is None and own and problem.GROUPED and (default is None or own in problem.name_groups()):
        label = find_class(task, own)
    target = default if label is None else label
    return Arriving(load_image(task, folder / name), target, marked, f"folder:{name}")


def find_class(task: TaskSpec, name: str) -> int:
    """Return the number of a class.

    Raises:
        ConfigError: the task has no class of this name.
    """
    classes = task.problem.name_groups()
    if not classes:
        raise ConfigError(f"{name} is no class, since task {task.name} has none: its problem is {task.problem.NAME}")
    if name not in classes:
        hint = suggest_nearest(name, classes)
        raise ConfigError(f"{name} is no class of the task ({', '.join(classes)}){hint}; {HOW_TO_ADD}")
    return classes.index(name)


def list_images(folder: Path) -> tuple[list[str], frozenset[str]]:
    """List the images of a folder, hidden ones aside, and those that its `sensitive.txt` marks.

    Raises:
        ConfigError: the marks cannot be read, so no image may count as free of them.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in images.SUFFIXES)
    names = sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
    return names, frozenset(np.array(names)[images.read_sensitive_flags(folder, names)].tolist())


def read_rows(task: TaskSpec, file: Path, *, label: int | None = None) -> Iterator[Arriving]:
    """Read the samples of an .npz, .csv or .parquet in order; `label` is for all of a file that says none.

    Raises:
        ConfigError: the file cannot be read, or does not fit the task.
    """
    if file.suffix.lower() in tables.SUFFIXES:
        found = tables.read_table(tables.get_schema(task), file, labelled=False)
    elif file.suffix.lower() == ".npz":
        found = npz.load_arrays(file, ARRAYS)
    else:
        raise ConfigError(f"{file} is no folder of images, .npz, .csv or .parquet")
    if "x" not in found:
        raise ConfigError(f"{file} has no array x, the samples")
    x, n = found["x"], len(found["x"])
    labels: list[int | NDArray[Any] | None] = [task.problem.get_default_target() if label is None else label] * n
    if "y" in found:
        labels = [*task.problem.convert_targets(found["y"], n, task.input_shape, f"{file}: y")]
    marks = require_whole_numbers(found.get("sensitive", np.zeros(n, np.bool_)), n, 1, f"{file}: sensitive")
    for one, own, marked in zip(x, labels, marks.tolist(), strict=True):
        yield Arriving(one, own, bool(marked), f"file:{file.name}")
