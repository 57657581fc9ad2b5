"""Masks beside images: `NAME.mask.png` is the mask of `NAME.jpg` or `NAME.png`, anywhere in a folder or .zip.

A mask is a grey or palette PNG whose pixels are class numbers; 255 counts nowhere. `classes.txt` at the top of the
folder names the classes, one a line; without it they have numbers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.data import images
from fedge.data.preprocessing import load_mask, measure_image
from fedge.data.problems.segmentation import IGNORED, ONLY_IGNORED
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as

SUFFIX: Final = ".mask.png"
CLASSES_FILE: Final = "classes.txt"


def list_images(source: Path, *, labelled: bool = True) -> list[str]:
    """List the images in a folder or .zip by relative path, sorted, without masks. If `labelled`, all must have one.

    Raises:
        ConfigError: the source is neither, holds no image, an image has no mask, or a mask has no image.
    """
    found = images.list_images(source, labelled=False)
    masks = {name for name in found if name.endswith(SUFFIX)}
    plain = [name for name in found if name not in masks]
    if missing := [name for name in plain if get_mask_name(name) not in masks] if labelled else []:
        raise ConfigError(f"{source}: {missing[0]} has no mask: put {get_mask_name(missing[0])} beside it")
    if foreign := sorted(masks - {get_mask_name(name) for name in plain}):
        raise ConfigError(f"{source}: {foreign[0]} is the mask of no image: name both alike, NAME.jpg and NAME{SUFFIX}")
    return plain


def get_mask_name(image: str) -> str:
    """Return the path of an image's mask."""
    return str(PurePosixPath(image).with_suffix(SUFFIX))


def load_masks(task: TaskSpec, source: Path, names: Sequence[str]) -> NDArray[np.uint8]:
    """Load the masks of these images, (n, height, width), each pixel as its nearest one in the file.

    Raises:
        ConfigError: a mask cannot be read, or is of another size than its image; the text names it.
    """
    _, height, width = task.input_shape
    masks = [get_mask_name(name) for name in names]
    sizes = (images.read_each(source, files, measure_image) for files in (names, masks))
    for mask, wanted, found in zip(masks, *sizes, strict=True):
        if (found != wanted).any():
            raise ConfigError(
                f"{source}: {mask} has {found[0]} x {found[1]} pixels, and its image {wanted[0]} x {wanted[1]}: save "
                "the mask in the image's size"
            )
    return images.read_each(source, masks, lambda file, name: load_mask(file, name, (width, height)))


def list_classes(source: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the classes that `classes.txt` names, or class 0, class 1, ... up to the largest pixel of all masks.

    Raises:
        ConfigError: a mask cannot be read, all pixels are 0 or 255, or there are fewer names than classes.
    """
    largest, ignores = 0, False
    for name in names:
        (mask,) = images.read_each(source, [get_mask_name(name)], load_mask)
        largest = max(largest, int(mask[mask != IGNORED].max(initial=0)))
        ignores = ignores or bool((mask == IGNORED).any())
    if ignores and not largest:
        raise ConfigError(f"{source}: {ONLY_IGNORED}")
    largest = max(largest, 1)
    given = _read_names(source)
    if given and len(given) <= largest:
        raise ConfigError(f"{source / CLASSES_FILE} names {len(given)} classes, and masks have pixels of {largest}")
    return given or tuple(f"class {k}" for k in range(largest + 1))


def _read_names(source: Path) -> tuple[str, ...]:
    """Return the lines of `classes.txt`; none without that file."""
    with raise_as(
        ConfigError, f"{CLASSES_FILE} of {source} must name a class a line, in UTF-8", on=(OSError, ValueError)
    ):
        if source.is_dir():
            text = (source / CLASSES_FILE).read_text("utf-8") if (source / CLASSES_FILE).exists() else ""
        else:
            with zipfile.ZipFile(source) as archive:
                text = archive.read(CLASSES_FILE).decode() if CLASSES_FILE in archive.namelist() else ""
    return tuple(line.strip() for line in text.splitlines() if line.strip())
