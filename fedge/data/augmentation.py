"""Changes of training samples at random, each time anew: usual ones for images by name, or a user's own function.

    flip     mirrors half of the images
    crop     moves an image by up to an eighth of its sides; what comes in from outside repeats the edge
    rotate   turns it by up to 15 degrees, to the nearest pixels
    erase    sets a rectangle of 2 to 20 % of half of the images to 0 (Zhong et al., "Random Erasing", AAAI 2020)
    noise    adds normal noise of deviation 0.1 to model inputs, also to those that are no images

Model inputs are standardised, so 0 is the mean. Masks move with their images (`Problem.move_targets`). All numbers come
from the order, so a repeated order gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.settings import CODE
from fedge.system.loading import FAILURES, describe_error, is_code_path, is_registered, load_object
from fedge.system.text import Heading, suggest_nearest

SHIFT: Final = 8
"""An image is moved by at most one part in so many of its side."""
TURN: Final = np.pi / 12
"""Largest angle, 15 degrees."""
ERASED: Final = (0.02, 0.2)
"""Smallest and largest share of an image that is erased."""
NOISE: Final = 0.1
"""Deviation of the noise, in deviations of the inputs."""

Augment = Annotated[
    str | None,
    CODE,
    Heading.TASK,
    "Training samples are changed at random by these, parted by commas: flip, crop, rotate, noise, erase, or your own "
    "function package.module:function.",
]
Images = NDArray[np.float32]
Sources = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows and columns from which the pixels of images come, in shapes that fit (n, H, W)."""


def _flip(n: int, height: int, width: int, rng: np.random.Generator) -> Sources:
    mirrored = rng.random((n, 1, 1)) < 0.5
    columns = np.arange(width)
    return np.arange(height)[:, np.newaxis], np.where(mirrored, columns[::-1], columns)


def _crop(n: int, height: int, width: int, rng: np.random.Generator) -> Sources:
    most = [max(1, side // SHIFT) for side in (height, width)]
    down, right = (rng.integers(-far, far + 1, (n, 1, 1)) for far in most)
    return np.arange(height)[:, np.newaxis] + down, np.arange(width) + right


def _rotate(n: int, height: int, width: int, rng: np.random.Generator) -> Sources:
    angle = rng.uniform(-TURN, TURN, (n, 1, 1))
    y, x = np.arange(height)[:, np.newaxis] - (height - 1) / 2, np.arange(width) - (width - 1) / 2
    rows = np.cos(angle) * y - np.sin(angle) * x + (height - 1) / 2
    columns = np.sin(angle) * y + np.cos(angle) * x + (width - 1) / 2
    return np.rint(rows).astype(np.int64), np.rint(columns).astype(np.int64)


def _erase(x: Images, rng: np.random.Generator) -> Images:
    n, _, height, width = x.shape
    share, ratio = rng.uniform(*ERASED, n), np.exp(rng.uniform(np.log(0.5), np.log(2.0), n))
    tall = np.clip(np.rint(np.sqrt(share * ratio) * height), 1, height)
    wide = np.clip(np.rint(np.sqrt(share / ratio) * width), 1, width)
    top, left = np.floor(rng.random(n) * (height - tall + 1)), np.floor(rng.random(n) * (width - wide + 1))
    rows, columns = np.arange(height), np.arange(width)
    in_rows = (rows >= top[:, np.newaxis]) & (rows < (top + tall)[:, np.newaxis])
    in_columns = (columns >= left[:, np.newaxis]) & (columns < (left + wide)[:, np.newaxis])
    chosen = rng.random((n, 1, 1)) < 0.5
    gone = chosen & in_rows[:, :, np.newaxis] & in_columns[:, np.newaxis, :]
    return np.where(gone[:, np.newaxis], np.float32(0), x)


def _add_noise(x: Images, rng: np.random.Generator) -> Images:
    return x + np.float32(NOISE) * rng.standard_normal(x.shape, np.float32)


_MOVES: Final[Mapping[str, Callable[[int, int, int, np.random.Generator], Sources]]] = {
    "flip": _flip,
    "crop": _crop,
    "rotate": _rotate,
}
_CHANGES: Final[Mapping[str, Callable[[Images, np.random.Generator], Images]]] = {
    "noise": _add_noise,
    "erase": _erase,
}
NAMES: Final = ("flip", "crop", "rotate", "noise", "erase")
"""Changes that have a name."""
ANYTHING: Final = ("noise",)
"""Those that suit samples which are no images."""


def with_augment(task: TaskSpec, given: str | None) -> TaskSpec:
    """Return the task whose training samples are changed; `given` as in `Augment`, None for the task as it is.

    Raises:
        ConfigError: a change is unknown, does not suit the samples, or cannot be loaded.
    """
    if given is None:
        return task
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in NAMES and not is_registered(name) and not is_code_path(name):
            raise ConfigError(
                f"unknown augmentation {name}{suggest_nearest(name, NAMES)}: use {', '.join(NAMES)}, or your own "
                "function package.module:function"
            )
        if name in NAMES and name not in ANYTHING and len(task.input_shape) != 3:
            raise ConfigError(
                f"the augmentation {name} is for images (channels, height, width), and the samples are "
                f"{task.input_shape}: leave it out, or give your own function"
            )
        if name not in NAMES and not callable(load_object(name)):
            raise ConfigError(f"the augmentation {name} is no function: it is called with (x, rng)")
    return msgspec.structs.replace(task, augment=names) if names else task


def find_own(task: TaskSpec) -> tuple[str, ...]:
    """Return the user's own functions among a task's changes."""
    return tuple(name for name in task.augment or () if name not in NAMES)


def change_samples(task: TaskSpec, x: Images, y: NDArray[Any], rng: np.random.Generator) -> tuple[Images, NDArray[Any]]:
    """Return n >= 1 training samples, (n, *input_shape), and their targets, changed as the task says.

    Raises:
        ConfigError: a user's own function fails, or returns something else than such samples.
    """
    for name in task.augment or ():
        if name in _MOVES:
            n, _, height, width = x.shape
            rows, columns = _MOVES[name](n, height, width, rng)
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
            rows, columns = np.clip(rows, 0, height - 1), np.clip(columns, 0, width - 1)
            shape = (n, height, width)
            rows, columns, inside = (np.broadcast_to(each, shape) for each in (rows, columns, inside))
            number, channel = np.arange(n)[:, None, None, None], np.arange(x.shape[1])[:, None, None]
            x = x[number, channel, rows[:, np.newaxis], columns[:, np.newaxis]]
            y = task.problem.move_targets(y, rows, columns, inside)
        elif name in _CHANGES:
            x = _CHANGES[name](x, rng)
        else:
            x = _call_own(name, x, rng)
    return x, y


def _call_own(path: str, x: Images, rng: np.random.Generator) -> Images:
    """Return what the user's function makes of samples."""
    own = load_object(path)
    name = getattr(own, "__name__", path)
    try:
        found = np.asarray(own(x.copy(), rng))
    except FAILURES as error:
        raise ConfigError(f"the augmentation {name} fails with {describe_error(error)}") from error
    if found.shape != x.shape or found.dtype.kind not in "buif":
        raise ConfigError(f"the augmentation {name} must return numbers {x.shape}, not {found.dtype}{found.shape}")
    return found.astype(np.float32, copy=False)
