"""The problem of samples in memory or in a file: what their targets say of it, and targets of other forms than ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from fedge.data import images, masks
from fedge.data.problems.labels import is_one_hot, read_labels, require_class_numbers
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.own import state_own
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import IGNORED, ONLY_IGNORED, Segmentation
from fedge.data.task import Asked, Schema, TaskSpec
from fedge.errors import ConfigError
from fedge.settings import CODE
from fedge.system.loading import allow_code, is_code_path, is_registered
from fedge.system.text import Heading, suggest_nearest
from fedge.tasks import arrays

log = logging.getLogger("fedge.tasks")

Kind = Literal["classification", "multi-label", "regression", "segmentation", "reconstruction"]
"""The problems that can be told from samples; another one is a class of the user's, package.module:Class."""
FolderKind = Literal["classification", "segmentation", "reconstruction"]
"""The problems that can be told from a folder of images."""
KINDS: Final[tuple[Kind, ...]] = ("classification", "multi-label", "regression", "segmentation", "reconstruction")


ProblemName = Annotated[
    str | None,
    CODE,
    Heading.TASK,
    "This is asked about arrays or a folder of images: classification (default), multi-label, regression, "
    "segmentation, reconstruction, or package.module:Class.",
]


class Stated(NamedTuple):
    """What a task says of its problem, and the targets of its samples, (n, ...), in the users' units."""

    classes: tuple[str, ...]
    asked: Asked | UnsetType
    y: NDArray[Any]
    first_label: int = 0


def state_problem(kind: str, table: Mapping[str, NDArray[Any]], where: str, n_train: int | None = None) -> Stated:
    """Make the problem of samples.

    Args:
        kind: one of `KINDS`, or a class of the user's (`fedge.data.problems.own`), named on this machine.
        table: x (n, ...), y (n, ...) unless nothing is labelled, and perhaps the names `classes`.
        where: the beginning of error messages.
        n_train: how many samples, the first ones, are no test samples; None for all.

    Raises:
        ConfigError: there is no such kind, or the targets do not fit; the text says what to do.
    """
    own = is_code_path(kind) or is_registered(kind)
    if kind not in KINDS and not own:
        known = ", ".join(KINDS)
        raise ConfigError(f"unknown problem {kind}{suggest_nearest(kind, KINDS)}: use {known}, or package.module:Class")
    n, y = len(table["x"]), table.get("y")
    if y is not None and y.dtype.kind == "b":
        y = y.astype(np.int64)
    names = tuple(str(name) for name in table["classes"].ravel()) if "classes" in table else None
    if kind == "reconstruction":
        marks = np.zeros(n, np.int64) if y is None else y
        return Stated((), Reconstruction(), Reconstruction().convert_targets(marks, n, (), f"{where}: y"))
    if y is None:
        raise ConfigError(
            f"{where}: there is no y, and {kind} learns from targets; without any, ask for reconstruction"
        )
    if own:
        allow_code([kind])
        return Stated((), state_own(kind, y), y)
    if kind == "classification":
        return _state_classes(table, where)
    if kind == "multi-label":
        width = y.shape[1] if y.ndim == 2 else 0
        labels = _name(names, width, "label", where)
        if width == 0 or y.dtype.kind not in "buif":
            raise ConfigError(
                f"{where}: y must be 0 or 1 for each label (n, labels), not {y.dtype}{y.shape}: make such columns of "
                "words or lists, as by sklearn.preprocessing.MultiLabelBinarizer, and name them in `classes`"
            )
        numbers = MultiLabel(labels=labels).convert_targets(y, n, table["x"].shape[1:], f"{where}: y")
        shares = numbers[:n_train].mean(axis=0).round(4).tolist()
        return Stated((), MultiLabel(labels=labels, shares=tuple(shares)), y)
    if kind == "regression":
        return Stated((), _measure_targets(y, n, names, where, n_train), y)
    counted = y[y != IGNORED]
    if y.size > counted.size and not counted.any():
        raise ConfigError(f"{where}: {ONLY_IGNORED}")
    n_classes = int(counted.max(initial=0)) + 1 if y.dtype.kind in "bui" else 2
    return Stated((), Segmentation(classes=_name(names, max(n_classes, 2), "class", where)), y)


def require_problem(task: TaskSpec, kind: str | None) -> TaskSpec:
    """Return a task that says its problem itself.

    Raises:
        ConfigError: `kind` is another problem; None is any.
    """
    if kind not in {None, task.problem.request}:
        raise ConfigError(
            f"the task {task.name} asks for {task.problem.request}, not {kind}: leave out the problem, which is said "
            "for arrays and image folders alone"
        )
    return task


def require_classes(task: TaskSpec, what: str) -> None:
    """Refuse a task whose samples are not of one class each.

    Raises:
        ConfigError: it is such a task; the text begins with `what`.
    """
    if not task.problem.CLASSED:
        raise ConfigError(f"{what} needs samples of one class each, and {task.name} asks for {task.problem.NAME}")


def state_folder(kind: str, source: Path) -> Stated:
    """Make the problem of a folder or .zip of images (`fedge.data.folders`); no targets are read.

    Raises:
        ConfigError: the folder holds no such images, or images do not tell targets of this problem.
    """
    none = np.zeros(0, np.int64)
    match kind:
        case "classification":
            return Stated(tuple(sorted({images.get_class(name) for name in images.list_images(source)})), UNSET, none)
        case "segmentation":
            return Stated((), Segmentation(classes=masks.list_classes(source, masks.list_images(source))), none)
        case "reconstruction":
            images.list_images(source, labelled=False)
            return Stated((), Reconstruction(), none)
    raise ConfigError(
        f"{source}: a folder of images tells classes by its folders, masks beside images, or images alone "
        f"(classification, segmentation, reconstruction), not {kind}: give an .npz, --task arrays"
    )


def state_table(schema: Schema) -> Asked | UnsetType:
    """Return the problem that the schema of a table states; UNSET for classification."""
    if schema.targets:
        units = tuple(target.unit or "" for target in schema.targets)
        return Regression(
            targets=schema.target_columns,
            mean=tuple(target.mean for target in schema.targets),
            std=tuple(target.std for target in schema.targets),
            units=units if any(units) else UNSET,
        )
    if schema.labels:
        return MultiLabel(labels=schema.labels)
    return UNSET if schema.classes else Reconstruction()


def _state_classes(table: Mapping[str, NDArray[Any]], where: str) -> Stated:
    """Make single-label classification of labels in any form (`fedge.data.problems.labels.read_labels`)."""
    n, y = len(table["x"]), table["y"]
    if is_one_hot(y) and len(y) == n:
        log.warning("event=one_hot_rows where=%s classes=%d taken_as=class_numbers", where, y.shape[1])
        y = y.argmax(axis=1)
    if y.shape == (n, 1):
        y = y[:, 0]
    if y.shape == (n,) and y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.rint(y)).all():
        y = y.astype(np.int64)
    if y.shape == (n,) and y.dtype.kind in "USO":
        names = table["classes"] if "classes" in table else np.unique(y.astype(str))
        numbers = read_labels(y, n, [str(name) for name in names.ravel()], 0, None, f"{where}: y")
        return Stated(arrays.get_class_names({"y": numbers, "classes": names}, where), UNSET, numbers)
    there = np.unique(y) if y.dtype.kind in "bui" else np.zeros(0, np.int64)
    if "classes" not in table and len(there) > 1 and there[0] > 0 and there[-1] - there[0] == len(there) - 1:
        return Stated(tuple(map(str, there)), UNSET, y, int(there[0]))
    y = require_class_numbers(y, n, None, f"{where}: y")
    return Stated(arrays.get_class_names({**table, "y": y}, where), UNSET, y)


def _name(names: tuple[str, ...] | None, n: int, what: str, where: str) -> tuple[str, ...]:
    """Return the names of n things, numbers if they have none.

    Raises:
        ConfigError: there are as many names as things, or none.
    """
    if names is not None and len(names) < n:
        raise ConfigError(f"{where}: there are {len(names)} names in classes, but {n} {what}s")
    return names or tuple(f"{what} {k}" for k in range(n))


def _measure_targets(
    y: NDArray[Any], n: int, names: tuple[str, ...] | None, where: str, n_train: int | None
) -> Regression:
    """Make the problem of numbers with mean and deviation of the targets that are not for tests."""
    values = y[:, np.newaxis] if y.shape == (n,) else y
    if values.ndim != 2 or values.dtype.kind not in "buif":
        raise ConfigError(f"{where}: y must be numbers ({n},) or ({n}, targets), not {y.dtype}{y.shape}")
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        raise ConfigError(
            f"{where}: y holds {values[at].tolist()} in row {at}: leave such samples out, or fill them in"
        )
    measured = values[:n_train]
    mean, std = measured.mean(axis=0, dtype=np.float64), measured.std(axis=0, dtype=np.float64)
    if constant := [k for k, s in enumerate(std) if not s > 0]:
        do = "leave it out" if values.shape[1] > 1 else "there is nothing to learn"
        raise ConfigError(f"{where}: target {constant[0]} is {values[0, constant[0]]} in all samples: {do}")
    targets = _name(names, values.shape[1], "target", where) if values.shape[1] > 1 or names else ("target",)
    return Regression(targets=targets, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
