"""Folders and zip files of images, read as a problem asks: by class folders, with masks, or images alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedge.data import images, masks
from fedge.data.problems.problem import Problem
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError


def list_samples(problem: Problem, source: Path, *, labelled: bool = True) -> list[str]:
    """List the images that are samples of a problem, by relative path, sorted. If `labelled`, all must have targets.

    Raises:
        ConfigError: the source is no folder or .zip of such images, or the problem's targets are none of images.
    """
    match problem.FOLDER:
        case "masks":
            return masks.list_images(source, labelled=labelled)
        case "classes":
            return images.list_images(source, labelled=labelled)
        case "alone":
            return images.list_images(source, labelled=False)
    if labelled:
        raise ConfigError(f"{source}: a folder of images does not tell the targets of {problem.NAME}: give an .npz")
    return images.list_images(source, labelled=False)


def read_targets(task: TaskSpec, source: Path, names: Sequence[str], *, only_known: bool = False) -> NDArray[Any]:
    """Read the targets of these images, (n, ...), in the type that training takes.

    If `only_known`, the caller leaves out images whose class the task does not have; they have higher numbers.

    Raises:
        ConfigError: a folder's name is no class of the task, or a mask cannot be read or holds other classes.
    """
    match task.problem.FOLDER:
        case "masks":
            found = masks.load_masks(task, source, names)
            return task.problem.convert_targets(found, len(names), task.input_shape, f"{source}: a mask")
        case "classes":
            return images.get_labels(names, images.list_classes(names, task.classes) if only_known else task.classes)
    return np.zeros_like(task.problem.make_targets(len(names), task.input_shape))


def require_known(problem: Problem, folder: Path) -> None:
    """Refuse unknown files beside the images.

    Raises:
        ConfigError: as `images.require_known`.
    """
    images.require_known(folder, (masks.CLASSES_FILE,) if problem.FOLDER == "masks" else ())
