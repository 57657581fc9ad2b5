"""The device's own validation samples, kept beside its bundles: what a new one is measured on. They never leave it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.files import write_atomically
from fedge.npz import load
from fedge.task import TaskSpec

FILE: Final = "validation.npz"


@dataclass(frozen=True, slots=True)
class Validation:
    """x: (n, *input_shape) float32 model inputs; y: (n,) int64 class numbers, None without labels."""

    x: NDArray[np.float32]
    y: NDArray[np.int64] | None

    def save(self, home: Path) -> None:
        """Write HOME/validation.npz, readable by its owner alone.

        Raises:
            StoreError: the disk is full or broken.
        """
        buffer = io.BytesIO()
        if self.y is None:
            np.savez(buffer, x=self.x)
        else:
            np.savez(buffer, x=self.x, y=self.y)
        write_atomically(home / FILE, buffer.getvalue())


def load_validation(home: Path, task: TaskSpec) -> Validation:
    """Read HOME/validation.npz; without one there are no samples.

    Raises:
        ConfigError: it cannot be read, or does not hold samples of this task.
    """
    path = home / FILE
    if not path.exists():
        return Validation(np.zeros((0, *task.input_shape), np.float32), None)
    arrays = load(path, ("x", "y"))
    if "x" not in arrays or arrays["x"].dtype.kind not in "buif":
        raise ConfigError(f"{path} holds no samples")
    x, y = np.asarray(arrays["x"], np.float32), arrays.get("y")
    if x.shape[1:] != task.input_shape or (y is not None and y.shape != x.shape[:1]):
        raise ConfigError(f"{path} holds samples of shape {x.shape[1:]}, the task has {task.input_shape}")
    if not np.isfinite(x).all() or (y is not None and y.dtype.kind not in "iu"):
        raise ConfigError(f"{path} holds samples that are not finite, or labels that are no class numbers")
    return Validation(x, y)
