"""The device's own validation samples, kept beside its bundles to evaluate new ones. They never leave the device."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.data.npz import load_arrays
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.files import write_atomically

FILE: Final = "validation.npz"


@dataclass(frozen=True, slots=True)
class Validation:
    """Model inputs x (n, *input_shape) float32 with converted targets y (n, ...), or None without any.

    The targets of classification are class numbers, (n,) int64.

    `sensitive` (n,) bool marks samples about which nothing may be reported; None if there are none.
    """

    x: NDArray[np.float32]
    y: NDArray[Any] | None
    sensitive: NDArray[np.bool_] | None = None

    @property
    def reportable(self) -> NDArray[np.bool_]:
        """Whether each sample is non-sensitive, (n,); figures on such samples may be reported."""
        return np.ones(len(self.x), np.bool_) if self.sensitive is None else ~self.sensitive

    def save(self, home: Path) -> None:
        """Write HOME/validation.npz, readable by its owner alone.

        Raises:
            StoreError: the disk is full or broken.
        """
        buffer = io.BytesIO()
        optional = {"y": self.y, "sensitive": self.sensitive}
        arrays = {"x": self.x, **{name: array for name, array in optional.items() if array is not None}}
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # allow_pickle is not an array
        write_atomically(home / FILE, buffer.getvalue())


def load_validation(home: Path, task: TaskSpec) -> Validation:
    """Read HOME/validation.npz; return no samples if there is no such file.

    Raises:
        ConfigError: the file cannot be read, or does not hold samples of this task.
    """
    path = home / FILE
    if not path.exists():
        return Validation(np.zeros((0, *task.input_shape), np.float32), None)
    arrays = load_arrays(path)
    if strange := sorted(set(arrays) - {"x", "y", "sensitive"}):  # misnamed marks would be lost
        raise ConfigError(f"{path} holds unknown arrays {', '.join(strange)}: only x, y and sensitive are known")
    if "x" not in arrays or arrays["x"].dtype.kind not in "buif":
        raise ConfigError(f"{path} holds no samples")
    x, y, sensitive = np.asarray(arrays["x"], np.float32), arrays.get("y"), arrays.get("sensitive")
    targets = (len(x), *task.problem.get_target_shape(task.input_shape))
    if x.shape[1:] != task.input_shape or (y is not None and y.shape != targets):
        raise ConfigError(f"{path} holds samples of shape {x.shape[1:]}, but the task has {task.input_shape}")
    if not np.isfinite(x).all() or (y is not None and y.dtype.kind not in task.problem.TARGET_KINDS):
        raise ConfigError(f"{path} holds samples that are not finite, or labels that are not class numbers")
    if y is not None and not np.isfinite(y).all():
        raise ConfigError(f"{path} holds targets that are not finite")
    if sensitive is not None and (sensitive.shape != x.shape[:1] or sensitive.dtype != np.bool_):
        raise ConfigError(f"{path} holds marks that are not one truth value for each sample")
    return Validation(x, y, sensitive)
