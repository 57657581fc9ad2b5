"""The conversion of raw samples to model inputs, the same for training and inference, without torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedge.data import tables
from fedge.data.scaling import are_inputs, choose_precision, explain_unfit
from fedge.data.task import TaskSpec
from fedge.data.text import is_text, make_tokens
from fedge.errors import ConfigError, raise_as
from fedge.system.moved import alias_names

if TYPE_CHECKING:
    from PIL import Image


def preprocess(task: TaskSpec, raw: NDArray[Any]) -> NDArray[np.float32]:
    """Reshape raw samples into model inputs and scale them: (x / scale - mean) / std.

    If the task has a mean and a std for each column or channel, these are used. The numbers are computed in double
    precision if a mean is large compared with its std.

    `raw` is (n, *input_shape), or for images (n, height, width, channels), or (n, height, width) with one channel. For
    a task of texts it may be texts (n,).

    Returns:
        (n, *input_shape) float32, finite, a new array.

    Raises:
        ConfigError: the samples have another shape, are not numbers, or are too large to compute with in single
            precision; the text says where.
    """
    if task.preprocessing.text and is_text(raw):
        return make_tokens(task.preprocessing.text, raw).astype(np.float32)
    if raw.dtype.kind not in "buif":
        raise ConfigError(f"samples must be numbers, not {raw.dtype}")
    shaped = reshape_samples(task.input_shape, raw)
    mean, std = _get_scale(task)
    kind = choose_precision(mean, std)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # numbers that are not finite are refused below
        x: NDArray[np.floating] = np.array(shaped, dtype=kind, order="C")
        np.subtract(x, mean.astype(kind), out=x)
        np.divide(x, std.astype(kind), out=x)
        inputs = x.astype(np.float32, copy=False)
    if (kind is np.float64 or not are_inputs(inputs)) and (fault := explain_unfit(shaped, inputs)):
        raise ConfigError(fault)
    return inputs


def is_square_image(input_shape: tuple[int, ...]) -> bool:
    """Return whether model inputs of this shape, (channels, height, width), can be turned by quarters."""
    return len(input_shape) == 3 and input_shape[1] == input_shape[2]


def turn_images(x: NDArray[np.float32], quarters: int) -> NDArray[np.float32]:
    """Turn model inputs that are square images, (n, channels, size, size), counter-clockwise by quarters."""
    return np.ascontiguousarray(np.rot90(x, quarters, axes=(2, 3))) if quarters else x


def choose_input_precision(task: TaskSpec) -> type[np.float32 | np.float64]:
    """Return the type in which raw samples keep their differences until they are scaled."""
    return choose_precision(*_get_scale(task))


def load_image(
    task: TaskSpec, source: Path | IO[bytes], name: str = "", max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """Read an image file in the task's colours, size and upright orientation.

    Args:
        task: a task with an `image_mode` and an input shape (channels, height, width).
        source: the path of a PNG or JPEG file, or the open file.
        name: name of an open file for error messages.
        max_pixels: limit for untrusted images; None for Pillow's own limit, 89 million.

    Returns:
        (height, width) uint8 for a grey task, (height, width, 3) for colour.

    Raises:
        ConfigError: the task has no images, the file cannot be read, or it has too many pixels.
    """
    from PIL import Image

    mode = task.preprocessing.image_mode
    if mode is None or len(task.input_shape) != 3:
        raise ConfigError(f"task {task.name} takes arrays, not images")
    _, height, width = task.input_shape
    with raise_as(ConfigError, f"cannot read the image {name or source}", on=Exception):  # Pillow raises many kinds
        upright = _load_upright(source, mode, max_pixels)
    if upright.size != (width, height):
        upright = upright.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(upright)


def load_mask(source: Path | IO[bytes], name: str = "", size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Read a mask, a grey or palette PNG whose pixels are class numbers, (height, width) uint8.

    Args:
        source: the path of the file, or the open file.
        name: name of an open file for error messages.
        size: width and height; each pixel is then the nearest one of the file. None for those of the file.

    Raises:
        ConfigError: the file cannot be read, or is in colours.
    """
    from PIL import Image

    with (
        raise_as(ConfigError, f"cannot read the mask {name or source}", on=Exception),
        Image.open(  # as in load_image
            source, formats=("PNG",)
        ) as mask,
    ):
        if mask.mode not in {"1", "L", "P"}:
            raise ValueError(f"its pixels are {mask.mode}, not class numbers: save it as a grey or palette PNG")
        return np.asarray(mask if size is None else mask.resize(size, Image.Resampling.NEAREST), np.uint8)


def measure_image(source: Path | IO[bytes], name: str = "") -> NDArray[np.int64]:
    """Return width and height of an image or a mask, upright, (2,), of which only the head is read.

    Raises:
        ConfigError: the file cannot be read.
    """
    from PIL import ExifTags, Image

    with (
        raise_as(ConfigError, f"cannot read the image {name or source}", on=Exception),
        Image.open(source, formats=("PNG", "JPEG")) as image,
    ):
        lies = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
        return np.array(image.size[::-1] if lies else image.size)


def _load_upright(source: Path | IO[bytes], mode: str, max_pixels: int | None) -> Image.Image:
    """Return the image upright and in these colours, copied only if needed, since memory is short."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(source, formats=("PNG", "JPEG")) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels, at most {max_pixels} allowed")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == mode else image.convert(mode)


def _get_scale(task: TaskSpec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the std of raw samples, in the samples' unit and broadcastable over them."""
    how = task.preprocessing
    if how.table:
        return tables.get_scale(how.table)
    one_each = (-1, *(1,) * (len(task.input_shape) - 1))
    mean, std = (np.reshape(v, one_each if isinstance(v, tuple) else ()) * how.scale for v in (how.mean, how.std))
    return np.asarray(mean), np.asarray(std)


def reshape_samples(shape: tuple[int, ...], raw: NDArray[Any]) -> NDArray[Any]:
    """Return a view of raw samples as (n, *shape).

    Raises:
        ConfigError: they have no shape that a task with inputs of this shape takes.
    """
    if raw.shape[1:] == shape and raw.ndim > 1:
        return raw
    if len(shape) == 3:
        channels, height, width = shape
        if raw.shape[1:] == (height, width, channels):
            return np.moveaxis(raw, -1, 1)
        if channels == 1 and raw.shape[1:] == (height, width):
            return raw[:, np.newaxis]
    raise ConfigError(f"samples have the shape {raw.shape[1:]}, but the task takes {shape}")


__getattr__ = alias_names(__name__, apply="preprocess")
