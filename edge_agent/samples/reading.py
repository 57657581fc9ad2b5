"""Samples in files that a store takes: images in folders of classes, .npz, .csv and .parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.data import images, npz, tables
from fedge.data.classes import HOW_TO_ADD
from fedge.data.preprocessing import load_image
from fedge.data.problems.labels import require_class_numbers, require_whole_numbers
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.text import suggest_nearest

ARRAYS: Final = ("x", "y", "sensitive")


@dataclass(frozen=True, slots=True)
class Arriving:
    """A raw sample that arrives, with its class number if it has one, its mark and its origin."""

    x: NDArray[Any]
    label: int | None
    sensitive: bool
    origin: str


def read_image(task: TaskSpec, folder: Path, name: str, *, label: int | None, marked: bool) -> Arriving:
    """Read an image of a folder; without a `label`, that of its own folder's name, or none if it lies in no folder.

    Raises:
        ConfigError: it cannot be read, or its folder is no class of the task.
    """
    if label is None and "/" in name:
        label = find_class(task, PurePosixPath(name).parent.name)
    return Arriving(load_image(task, folder / name), label, marked, f"folder:{name}")


def find_class(task: TaskSpec, name: str) -> int:
    """Return the number of a class.

    Raises:
        ConfigError: the task has no class of this name.
    """
    if name not in task.classes:
        hint = suggest_nearest(name, task.classes)
        raise ConfigError(f"{name} is no class of the task ({', '.join(task.classes)}){hint}; {HOW_TO_ADD}")
    return task.classes.index(name)


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
    labels: list[int | None] = [label] * n
    if "y" in found:
        labels = [*require_class_numbers(found["y"], n, task.n_classes, f"{file}: y").tolist()]
    marks = require_whole_numbers(found.get("sensitive", np.zeros(n, np.bool_)), n, 1, f"{file}: sensitive")
    for one, own, marked in zip(x, labels, marks.tolist(), strict=True):
        yield Arriving(one, own, bool(marked), f"file:{file.name}")
