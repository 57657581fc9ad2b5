"""Folders and zip files of images, one folder per class: `<class>/*.jpg`, or below train/ and test/."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedge.data.npz import INPUT_BYTES, require_room
from fedge.data.preprocessing import load_image
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.errors import MALFORMED, ConfigError, raise_as
from fedge.system.files import require_there
from fedge.system.text import is_text, suggest_nearest

log = logging.getLogger("fedge.tasks")

D = TypeVar("D", bound=np.generic)

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png"})
SENSITIVE_FILE: Final = "sensitive.txt"
SPLIT_FILE: Final = "split.json"
OTHERS: Final = frozenset({".heic", ".heif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"})
"""Suffixes of image formats that are not read."""
MANY: Final = 20
"""Most images that an error message names."""
LEFT_BY_DESKTOPS: Final = frozenset({"Thumbs.db", "desktop.ini"})
"""Names of files that are ignored, like those whose names begin with a dot."""


def list_images(source: Path, *, labelled: bool = True) -> list[str]:
    """List the images in a folder or .zip by relative path, sorted. If `labelled`, all must lie in class folders.

    Raises:
        ConfigError: the source is neither, holds no image, or holds one outside class folders although `labelled`.
    """
    found = _list_paths(source)
    images = sorted(n for n in found if PurePosixPath(n).suffix.lower() in SUFFIXES)
    where = f"{source} must hold images in one folder per class, <class>/*.jpg or *.png"
    if not images:
        others = sorted(n for n in found if PurePosixPath(n).suffix)
        raise ConfigError(f"{where}: there is no image in it" + "".join(f", but {n}" for n in others[:1]))
    if labelled and (foreign := [n for n in images if not is_text(n)]):
        raise ConfigError(f"{where}: {foreign[0]!a} is not UTF-8; rename it")
    if labelled and (loose := [n for n in images if "/" not in n]):
        raise ConfigError(f"{where}: {loose[0]} lies in none")
    return images


def _list_paths(source: Path) -> list[str]:
    require_there(source, "folder or .zip of images")
    with raise_as(ConfigError, f"{source} is not a folder or .zip of images", on=(OSError, zipfile.BadZipFile)):
        if source.is_dir():
            return [p.relative_to(source).as_posix() for p in source.rglob("*")]
        with zipfile.ZipFile(source) as archive:
            return archive.namelist()


def warn_of_unread(source: Path) -> None:
    """Log how many images in a folder or .zip have formats that fedge does not read.

    Raises:
        ConfigError: the source is neither.
    """
    if unread := sorted(n for n in _list_paths(source) if PurePosixPath(n).suffix.lower() in OTHERS):
        log.warning(
            "event=images_not_read n=%d file=%s reason='only .jpg and .png are read: convert the others'",
            *(len(unread), source / unread[0]),
        )


def has_classes(images: Sequence[str], classes: Sequence[str]) -> bool:
    """Return whether all images lie in folders and at least one of the folders is named like a class."""
    return all("/" in image for image in images) and any(get_class(image) in classes for image in images)


def get_class(name: str) -> str:
    """Return the class of an image, which is the name of its folder."""
    return PurePosixPath(name).parent.name


def list_classes(images: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
    """Return the classes, and after them those of images that are none of these."""
    return tuple(dict.fromkeys((*classes, *sorted({get_class(image) for image in images}))))


def get_labels(images: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the class numbers of images, (n,).

    Raises:
        ConfigError: a folder name is not a class of the task.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = sorted({get_class(image) for image in images} - set(numbers))
    if unknown:
        hint = suggest_nearest(unknown[0], classes)
        text = f"folders {unknown} are not classes of the task ({', '.join(classes)}){hint}"
        raise ConfigError(f"{text}; {HOW_TO_ADD}")
    return np.array([numbers[get_class(image)] for image in images], dtype=np.int64)


def load_images(task: TaskSpec, source: Path, images: Sequence[str]) -> NDArray[np.uint8]:
    """Load the images as (n, height, width[, 3]) uint8, in the order of their names.

    Raises:
        ConfigError: an image cannot be read (the text names it), or all images take more than a quarter of the memory.
    """
    require_room(source, INPUT_BYTES * len(images) * math.prod(task.input_shape))
    return read_each(source, images, lambda file, name: load_image(task, file, name))


def read_each(source: Path, images: Sequence[str], load: Callable[[Path | IO[bytes], str], NDArray[D]]) -> NDArray[D]:
    """Load the named files of a folder or .zip with `load`, of a path or an open file and its name, as one array.

    Raises:
        ConfigError: files cannot be read; the text names them.
    """
    with zipfile.ZipFile(source) if source.is_file() else contextlib.nullcontext() as archive:
        found: list[NDArray[D]] = []
        broken: dict[str, ConfigError] = {}
        for image in images:
            try:
                found.append(_read_from_archive(archive, image, load) if archive else load(source / image, ""))
            except ConfigError as error:
                broken[image] = error
    if broken:
        first, *others = broken
        raise ConfigError(
            f"{broken[first]}; {len(broken)} of {len(images)} images cannot be read: remove or replace {first}"
            + "".join(f", {other}" for other in others[:MANY])
            + ", ..." * (len(others) > MANY)
        )
    return np.stack(found)


def require_known(folder: Path, more: Sequence[str] = ()) -> None:
    """Refuse unknown files beside the images, since a typo in a file's name must not lose the marks.

    Hidden files are allowed anywhere, and files named `more` at the top of the folder.

    Raises:
        ConfigError: a file is neither an image nor, at the top of the folder, `sensitive.txt` or `split.json`.
    """
    known = (SENSITIVE_FILE, SPLIT_FILE, *more)
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts) or path.name in LEFT_BY_DESKTOPS
        if path.is_dir() or hidden or path.suffix.lower() in SUFFIXES or inside.as_posix() in known:
            continue
        hint = suggest_nearest(path.name.lower(), known)
        raise ConfigError(
            f"{path} means nothing here{hint}: beside images there may be {' and '.join(known)} in {folder} "
            "itself; move other files away"
        )


def read_sensitive_flags(folder: Path, images: Sequence[str]) -> NDArray[np.bool_]:
    """Return flags (n,) of the images that `sensitive.txt` lists by path; all False without that file.

    Raises:
        ConfigError: the file lists an image that does not exist, or is not text.
    """
    file = folder / SENSITIVE_FILE
    if not os.path.lexists(file):  # a broken link counts as a file, since its marks are somewhere else
        return np.zeros(len(images), dtype=np.bool_)
    with raise_as(ConfigError, f"{file} must name an image a line, in UTF-8", on=(OSError, UnicodeDecodeError)):
        lines = file.read_text(encoding="utf-8").splitlines()
    marked = {line.strip() for line in lines if line.strip()}
    if missing := sorted(marked - set(images)):
        raise ConfigError(f"{file} marks {missing[0]}, which is not there: a marked image must not be lost by a typo")
    return np.array([image in marked for image in images], dtype=np.bool_)


def read_split_numbers(folder: Path, images: Sequence[str]) -> NDArray[np.int64] | None:
    """Return each image's part by `split.json` (0 train, 1 validation, 2 test), or None without that file.

    The file is {"val": [paths], "test": [paths]}; all other images are for training.

    Raises:
        ConfigError: the file is malformed, names a missing image, or lists an image twice.
    """
    file = folder / SPLIT_FILE
    if not file.exists():
        return None
    parts = _read_split(file)
    numbers = dict.fromkeys(images, TRAIN)
    for number, part in ((VALIDATION, parts.get("val", [])), (TEST, parts.get("test", []))):
        for image in part:
            if numbers.get(image) != TRAIN:
                raise ConfigError(f"{file}: {image} is not there, or stands twice")
            numbers[image] = number
    return np.array([numbers[image] for image in images], dtype=np.int64)


def _read_split(file: Path) -> dict[Literal["val", "test"], list[str]]:
    with raise_as(ConfigError, f'{file} must be {{"val": [paths], "test": [paths]}}', on=(OSError, *MALFORMED)):
        return msgspec.json.decode(file.read_bytes(), type=dict[Literal["val", "test"], list[str]])


def _read_from_archive(
    archive: zipfile.ZipFile, image: str, load: Callable[[Path | IO[bytes], str], NDArray[D]]
) -> NDArray[D]:
    with archive.open(image) as file:
        return load(file, image)
