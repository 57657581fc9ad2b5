"""One device's data, in the form that its worker uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedge.data.problems.labels import require_whole_numbers
from fedge.data.scaling import are_inputs, explain_unfit
from fedge.data.task import TRAIN, VALIDATION, TaskSpec
from fedge.errors import ConfigError
from fedge.system.files import compute_digest
from fedge.system.loading import FAILURES, describe_error, load_object
from fedge.system.moved import alias_members
from fedge.tasks.partitioners import make_units
from fedge.tasks.sampling import count_validation, draw_stratified


@alias_members(of="from_samples", unlabelled="from_inputs", of_task="to_task_types")
@dataclass(frozen=True, slots=True)
class DeviceData:
    """A device's model inputs and targets, without test samples, which no step may see.

    Shapes: x_train (n, *input_shape) float32, y_train (n, ...), sensitive (n,) bool, x_val (m, *input_shape) float32,
    y_val (m, ...). Targets are class numbers (n,) int64, or what `Problem.convert_targets` of the task's problem makes.
    A sample marked `sensitive` trains no model that is uploaded. `quarters`: by how many the inputs are turned,
    counter-clockwise, against what the device sees now (`edge_agent.samples.past`). `converted`: whether targets are
    those of training already, and not as the task's own code returned them.
    """

    x_train: NDArray[np.float32]
    y_train: NDArray[Any]
    sensitive: NDArray[np.bool_]
    x_val: NDArray[np.float32]
    y_val: NDArray[Any]
    sensitive_val: NDArray[np.bool_] | None = None
    quarters: int = 0
    converted: bool = False

    def __post_init__(self) -> None:
        n, m = len(self.x_train), len(self.x_val)
        shapes = (self.y_train.shape[:1], self.sensitive.shape, self.y_val.shape[:1], self.marks_val.shape)
        if shapes != ((n,), (n,), (m,), (m,)):
            raise ConfigError("there must be one target and one mark for each sample")

    @property
    def marks_val(self) -> NDArray[np.bool_]:
        """Marks of the validation samples, (m,)."""
        return np.zeros(len(self.x_val), np.bool_) if self.sensitive_val is None else self.sensitive_val

    def compute_digest(self) -> str:
        """Return the hexadecimal SHA-256 of all samples, labels and marks, in order and part by part."""
        arrays = (self.x_train, self.y_train, self.sensitive, self.x_val, self.y_val, self.marks_val)
        return compute_digest(
            *(part for a in arrays for part in (repr(a.shape).encode(), np.ascontiguousarray(a).data))
        )

    @property
    def has_sensitive(self) -> bool:
        """Whether any sample is marked."""
        return bool(self.sensitive.any() or self.marks_val.any())

    @classmethod
    def from_inputs(cls, x: NDArray[np.float32]) -> DeviceData:
        """Make data of a device that does not train: inputs only, (n, *input_shape)."""
        marks, y = np.zeros(len(x), np.bool_), np.zeros(len(x), np.int64)
        return cls(x, y, marks, x[:0], y[:0], converted=True)

    @classmethod
    def from_samples(
        cls,
        x: NDArray[np.float32],
        y: NDArray[Any],
        *,
        sensitive: NDArray[np.bool_] | None = None,
        split: NDArray[np.int64] | None = None,
        groups: NDArray[np.int64] | None = None,
        block: NDArray[np.int64] | None = None,
        converted: bool = False,
        seed: int,
    ) -> DeviceData:
        """Make training and validation samples of one device.

        Args:
            x: model inputs, (n, *input_shape).
            y: targets, (n, ...).
            sensitive: marks, (n,); None if nothing is sensitive.
            split: 0 train, 1 validation, 2 test, (n,); if None, a fifth of each group is held out for validation.
            groups: the group of each sample (`Problem.group_targets`), (n,); if None, the targets are class numbers.
            block: the recording from which each sample was cut, (n,); the hold-out keeps recordings whole.
            converted: as the field.
            seed: seed of the hold-out.
        """
        marks = np.zeros(len(y), np.bool_) if sensitive is None else sensitive
        parts = hold_out(y if groups is None else groups, marks, seed, block) if split is None else split
        train, validation = parts == TRAIN, parts == VALIDATION
        arrays = (x[train], y[train], marks[train], x[validation], y[validation], marks[validation])
        return cls(*arrays, converted=converted)

    def to_task_types(self, task: TaskSpec, *, only_known: bool = False) -> DeviceData:
        """Return the same data in the types that training takes, since a user's own class may return other types.

        If `only_known`, the caller leaves out samples whose class the task does not have.

        Raises:
            ConfigError: the inputs are not numbers (n, *input_shape), a number is not finite in single precision, a
                label is not a class number of the task, or a mark is neither 0 nor 1.
        """
        if self.converted:
            return self
        training, validation = (self.x_train, self.y_train, self.sensitive), (self.x_val, self.y_val, self.marks_val)
        x_train, y_train, sensitive = _convert_part(task, "training", *training, only_known=only_known)
        x_val, y_val, marks = _convert_part(task, "validation", *validation, only_known=only_known)
        marks_val = None if self.sensitive_val is None else marks
        return DeviceData(x_train, y_train, sensitive, x_val, y_val, marks_val, self.quarters, converted=True)

    def select_usual(self, task: TaskSpec) -> DeviceData:
        """Return the converted data without known anomalies, from which nothing is learned and nothing chosen."""
        train, validation = (task.problem.find_usual(y) for y in (self.y_train, self.y_val))
        if train.all() and validation.all():
            return self
        return replace(
            self,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            sensitive=self.sensitive[train],
            x_val=self.x_val[validation],
            y_val=self.y_val[validation],
            sensitive_val=self.marks_val[validation],
        )

    def join(self, more: DeviceData) -> tuple[DeviceData, DeviceData]:
        """Return the data with further samples, and the data themselves, now as part of the former in memory."""
        n, m = self.n_train, len(self.y_val)
        x_train = np.concatenate([self.x_train, more.x_train])
        y_train = np.concatenate([self.y_train, more.y_train])
        x_val, y_val = np.concatenate([self.x_val, more.x_val]), np.concatenate([self.y_val, more.y_val])
        marks = np.concatenate([self.sensitive, more.sensitive])
        marks_val = np.concatenate([self.marks_val, more.marks_val])
        whole = (x_train, y_train, marks, x_val, y_val, marks_val)
        own = (x_train[:n], y_train[:n], marks[:n], x_val[:m], y_val[:m], marks_val[:m])
        return DeviceData(*whole, converted=self.converted), DeviceData(*own, converted=self.converted)

    @property
    def n_train(self) -> int:
        """|D_i|, the number of training samples."""
        return len(self.y_train)

    @property
    def n_shared(self) -> int:
        """|D_iL|, the number of non-sensitive training samples."""
        return self.n_train - int(np.count_nonzero(self.sensitive))

    @property
    def shared(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Inputs and labels of the non-sensitive training samples, D_iL."""
        if not self.sensitive.any():
            return self.training
        return self.x_train[~self.sensitive], self.y_train[~self.sensitive]

    @property
    def shared_validation(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """The non-sensitive validation samples, V_iL, the only ones behind any reported validation result."""
        kept = ~self.marks_val
        return self.x_val[kept], self.y_val[kept]

    @property
    def validation(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """The validation samples, used for selection. They train nothing until selection is over."""
        return self.x_val, self.y_val

    @property
    def training(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """All training samples, including sensitive ones, for models that never leave the device."""
        return self.x_train, self.y_train

    @property
    def labelled(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Inputs and labels of the training samples, then of the validation samples."""
        return np.concatenate([self.x_train, self.x_val]), np.concatenate([self.y_train, self.y_val])

    def count_classes(self, n_classes: int, *, with_validation: bool = False) -> NDArray[np.int64]:
        """Count the training samples, and optionally the validation samples, per class: c_i, (C,)."""
        labels = np.concatenate([self.y_train, self.y_val]) if with_validation else self.y_train
        return np.bincount(labels, minlength=n_classes)

    def count_shared_classes(self, n_classes: int) -> NDArray[np.int64]:
        """Count the non-sensitive training samples per class, (C,)."""
        return np.bincount(self.shared[1], minlength=n_classes)


def _convert_part(
    task: TaskSpec, part: str, x: NDArray[Any], y: NDArray[Any], marks: NDArray[Any], *, only_known: bool
) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[np.bool_]]:
    """Check inputs, targets and marks of a part of the samples, and convert them to the types of `DeviceData`."""
    n, what, problem = len(x), f"of the {part} samples", task.problem
    if not n:
        none = problem.make_no_targets(task.input_shape)
        return np.zeros((0, *task.input_shape), np.float32), none, np.zeros(0, np.bool_)
    if x.shape[1:] != task.input_shape:
        raise ConfigError(f"samples of shape {x.shape[1:]} found, but the task has inputs of {task.input_shape}")
    if x.dtype.kind not in "buif":
        raise ConfigError(f"x {what} must be numbers, not {x.dtype}")
    if not are_inputs(x) and (fault := explain_unfit(x, x)):
        raise ConfigError(f"{what}, {fault}")
    asked = problem.allow_unknown() if only_known else problem
    y = asked.convert_targets(y, n, task.input_shape, f"y {what}")
    marks = require_whole_numbers(marks, n, 1, f"sensitive {what}").astype(np.bool_)
    return x.astype(np.float32, copy=False), y, marks


def hold_out(
    y: NDArray[np.int64], sensitive: NDArray[np.bool_], seed: int, block: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Hold out a fifth of each class for validation; sensitive and other samples are drawn separately.

    Samples with the same number in `block` stay together, a fifth of the blocks is held out, and a block with a
    sensitive sample counts as sensitive.
    """
    units = make_units(y, block)
    marks = np.bincount(units.of_sample, weights=sensitive, minlength=len(units.y)) > 0
    split = np.zeros(len(units.y), dtype=np.int64)
    for marked, stream in ((False, seed), (True, [seed, 1])):
        (own,) = np.nonzero(marks == marked)
        if len(own):
            rng = np.random.default_rng(stream)
            split[own[draw_stratified(units.y[own], count_validation(len(own)), rng)]] = VALIDATION
    return split[units.of_sample]


class UserTask(Protocol):
    """A user-defined task: a class whose constructor takes no arguments, named as `package.module:Class`."""

    def spec(self, data: Path | None) -> TaskSpec:
        """Describe the task; the class path replaces the name in it."""

    def device_data(self, source: Path, *, seed: int) -> DeviceData:
        """Read the data of one device, as model inputs."""


def load_user_task(path: str) -> UserTask:
    """Make an instance of the user's task class.

    Raises:
        ConfigError: there is no such class, or its constructor fails.
    """
    make = load_object(path)
    try:
        task: UserTask = make()
    except FAILURES as error:
        raise ConfigError(f"{path} fails with {describe_error(error)}") from error
    return task
