"""Reads a device's data (`fedge agent --data`): an .npz file, a table or a folder of images, with split and marks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedge.data import folders, images, preprocessing, tables
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.system.files import require_there
from fedge.system.loading import FAILURES, describe_error
from fedge.tasks import arrays
from fedge.tasks.data import DeviceData, hold_out, load_user_task


def read_device_data(task: TaskSpec, source: Path, *, seed: int) -> DeviceData:
    """Read the training and validation samples of one device.

    Args:
        task: the task; a user-defined task reads its own data.
        source: an .npz with x (n, ...) and y (n, ...), a .csv or .parquet for a task with a schema, or a folder of
            images `<class>/*.jpg`, or with masks (`fedge.data.masks`). Optional: `split` (0 train, 1 validation, 2
            test) or split.json, and `sensitive` or sensitive.txt. Without a split, a fifth of each class is held out
            for validation, or of the recordings if an .npz says them (`block`); without marks, nothing is sensitive.
        seed: seed of the hold-out.

    Raises:
        ConfigError: the source cannot be read or does not fit the task.
    """
    if ":" in task.name:
        return _read_by_own_task(task, source, seed)
    x, y, split, sensitive, block = _read(task, source)
    groups = task.problem.group_targets(y)
    return DeviceData.from_samples(
        x, y, sensitive=sensitive, split=split, groups=groups, block=block, converted=True, seed=seed
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """All samples of a source, also test samples: inputs (n, ...), labels, marks and parts (n,).

    `is_given`: whether the source says which part a sample belongs to; otherwise it was drawn by the seed. `n_unknown`:
    samples that were left out, since the task does not have their class.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    sensitive: NDArray[np.bool_]
    split: NDArray[np.int64]
    is_given: bool
    n_unknown: int = 0


def read_parts(task: TaskSpec, source: Path, *, seed: int, only_known: bool = False) -> Parts:
    """Read all samples of one device with their parts; arguments and errors are those of `read_device_data`.

    `only_known`: samples whose class the task does not have are left out; otherwise they are refused.
    """
    if ":" in task.name:
        data, n_unknown = _read_own_known(task, source, seed, only_known=only_known)
        (x, y), n_val = data.labelled, len(data.y_val)
        parts = np.repeat([TRAIN, VALIDATION], [data.n_train, n_val])
        return Parts(x, y, np.concatenate([data.sensitive, data.marks_val]), parts, True, n_unknown)
    x, y, split, sensitive, block = _read(task, source, only_known=only_known)
    known = task.problem.find_known(y)
    x, y, sensitive, block = x[known], y[known], sensitive[known], None if block is None else block[known]
    parts = hold_out(task.problem.group_targets(y), sensitive, seed, block) if split is None else split[known]
    return Parts(x, y, sensitive, parts, split is not None, int((~known).sum()))


def read_labelled(task: TaskSpec, source: Path) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Read all labelled samples of a source but test samples; raises the same errors as `read_device_data`."""
    return read_device_data(task, source, seed=0).labelled


def read_device_inputs(task: TaskSpec, source: Path) -> NDArray[np.float32]:
    """Read model inputs (n, *input_shape) of a device that does not train; labels are ignored.

    Sensitive samples and test samples are left out. Arguments and errors are those of `read_device_data`.
    """
    if ":" in task.name:
        return _read_by_own_task(task, source, 0, labelled=False).shared[0]
    x, _, split, sensitive, _ = _read(task, source, labelled=False)
    return x[~sensitive if split is None else ~sensitive & (split != TEST)]


def _read_own_known(task: TaskSpec, source: Path, seed: int, *, only_known: bool) -> tuple[DeviceData, int]:
    """Read the data by the user's own code; return them, and how many samples of unknown classes were left out."""
    data = _read_by_own_task(task, source, seed, only_known=only_known)
    train, validation = (task.problem.find_known(y) for y in (data.y_train, data.y_val))
    n_unknown = int((~train).sum() + (~validation).sum())
    if not n_unknown:
        return data, 0
    known = DeviceData(
        *(data.x_train[train], data.y_train[train], data.sensitive[train]),
        *(data.x_val[validation], data.y_val[validation], data.marks_val[validation]),
        converted=True,
    )
    return known, n_unknown


def _read_by_own_task(
    task: TaskSpec, source: Path, seed: int, *, labelled: bool = True, only_known: bool = False
) -> DeviceData:
    try:
        own = load_user_task(task.name).device_data(source, seed=seed)
        if not isinstance(own, DeviceData):
            raise ConfigError(f"device_data returned {type(own).__name__}, not a fedge.tasks.DeviceData")
        if not labelled:
            train, validation = (_make_targets(task, len(x)) for x in (own.x_train, own.x_val))
            own = replace(own, y_train=train, y_val=validation)
        return own.to_task_types(task, only_known=only_known)
    except FAILURES as error:
        require_there(source, "file or folder of samples")
        reason = error if isinstance(error, (OSError, ConfigError)) else describe_error(error)
        raise ConfigError(f"{task.name} cannot read {source}: {reason}") from error


def _make_targets(task: TaskSpec, n: int) -> NDArray[Any]:
    """Return targets of n samples whose targets do not matter."""
    return np.zeros_like(task.problem.make_targets(n, task.input_shape))


class _Read(NamedTuple):
    """Model inputs (n, ...), targets, split or None, marks, and blocks or None."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    split: NDArray[np.int64] | None
    sensitive: NDArray[np.bool_]
    block: NDArray[np.int64] | None = None


def _read(task: TaskSpec, source: Path, *, labelled: bool = True, only_known: bool = False) -> _Read:
    """Read a source; there are no targets if they are not needed.

    If `only_known`, the caller leaves out samples whose class the task does not have; they have higher labels.
    """
    if source.is_dir():
        folders.require_known(task.problem, source)
        names = folders.list_samples(task.problem, source, labelled=labelled)
        y = folders.read_targets(task, source, names, only_known=only_known) if labelled else _make_targets(task, 0)
        x = preprocessing.preprocess(task, images.load_images(task, source, names))
        return _Read(x, y, images.read_split_numbers(source, names), images.read_sensitive_flags(source, names))
    needed = labelled and task.problem.LABELLED
    if source.suffix.lower() in tables.SUFFIXES:
        found = tables.read_table(tables.get_schema(task), source, labelled=needed, only_known=only_known)
    else:
        found = arrays.read_arrays(source, labelled=needed)
    n, asked = len(found["x"]), task.problem.allow_unknown() if only_known else task.problem
    given = found["y"] if "y" in found else task.problem.make_targets(n, task.input_shape)
    y = asked.convert_targets(given, n, task.input_shape, f"{source}: y") if labelled else _make_targets(task, 0)
    with raise_as(ConfigError, str(source), on=ConfigError):
        x = preprocessing.preprocess(task, found["x"])
    return _Read(x, y, found.get("split"), found.get("sensitive", np.zeros(n, dtype=np.bool_)), found.get("block"))
