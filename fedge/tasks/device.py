"""What `fedge agent --data SOURCE` reads: an .npz file, a table or a folder of images, with hold-out and marks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedge.data import images, preprocessing, tables
from fedge.data.labels import class_numbers
from fedge.data.task import TEST, TaskSpec
from fedge.errors import ConfigError, failing_as
from fedge.system.files import require_there
from fedge.system.loading import FAILURES, reason_of
from fedge.tasks import arrays
from fedge.tasks.data import DeviceData, user_task


def device_data(task: TaskSpec, source: Path, *, seed: int) -> DeviceData:
    """Read the training and validation samples of one device.

    Args:
        task: what is learned; a user-defined task reads its own data.
        source: an .npz with x (n, ...) and y (n,), a .csv or .parquet for a task with a schema, or a folder of images
            `<class>/*.jpg`. Optional: `split` (0 train, 1 validation, 2 test) or split.json, and `sensitive` or
            sensitive.txt. Without a split, a fifth of each class is held out for validation; without marks, nothing is
            sensitive.
        seed: of the hold-out.

    Raises:
        ConfigError: the source cannot be read or does not fit the task.
    """
    if ":" in task.name:
        return _by_its_own_task(task, source, seed)
    x, y, split, sensitive = _read(task, source)
    return DeviceData.of(x, y, sensitive=sensitive, split=split, seed=seed)


def labelled(task: TaskSpec, source: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All labelled samples of a source as devices read it, except test samples. Errors: as `device_data`."""
    return device_data(task, source, seed=0).labelled


def device_inputs(task: TaskSpec, source: Path) -> NDArray[np.float32]:
    """Model inputs (n, *input_shape) of a device that does not train; labels are optional and ignored.

    Sensitive samples and test samples are left out. Arguments and errors: as `device_data`.
    """
    if ":" in task.name:
        return _by_its_own_task(task, source, 0, labelled=False).shared[0]
    x, _, split, sensitive = _read(task, source, labelled=False)
    return x[~sensitive if split is None else ~sensitive & (split != TEST)]


def _by_its_own_task(task: TaskSpec, source: Path, seed: int, *, labelled: bool = True) -> DeviceData:
    try:
        own = user_task(task.name).device_data(source, seed=seed)
        if not isinstance(own, DeviceData):
            raise ConfigError(f"device_data returned {type(own).__name__}, not a fedge.tasks.DeviceData")
        if not labelled:
            none = (np.zeros(len(x), np.int64) for x in (own.x_train, own.x_val))
            own = replace(own, y_train=next(none), y_val=next(none))
        return own.of_task(task)
    except FAILURES as error:
        require_there(source, "file or folder of samples")
        reason = error if isinstance(error, (OSError, ConfigError)) else reason_of(error)
        raise ConfigError(f"{task.name} cannot read {source}: {reason}") from error


_Read = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.bool_]]


def _read(task: TaskSpec, source: Path, *, labelled: bool = True) -> _Read:
    """Model inputs, labels (none if not needed), split and marks of a source."""
    if source.is_dir():
        images.require_known(source)
        names = images.names(source, labelled=labelled)
        y = images.labels(names, task.classes) if labelled else np.zeros(0, np.int64)
        x = preprocessing.apply(task, images.load(task, source, names))
        return x, y, images.split_numbers(source, names), images.sensitive_flags(source, names)
    if source.suffix.lower() in tables.SUFFIXES:
        found = tables.read(tables.schema_of(task), source, labelled=labelled)
    else:
        found = arrays.read(source, labelled=labelled)
    n = len(found["x"])
    y = class_numbers(found["y"], n, task.n_classes, f"{source}: y") if labelled else np.zeros(0, np.int64)
    with failing_as(ConfigError, str(source), on=ConfigError):
        x = preprocessing.apply(task, found["x"])
    return x, y, found.get("split"), found.get("sensitive", np.zeros(n, dtype=np.bool_))
