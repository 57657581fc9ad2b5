"""Samples in an .npz file: x (n, ...), y (n,), and optionally split, sensitive, user and classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.npz import load
from fedge.scaling import unfit
from fedge.task import TEST
from fedge.text import nearest, printable

Arrays = dict[str, NDArray[Any]]
KEYS: Final = ("x", "y", "split", "sensitive", "user", "classes")


def read(file: Path, *, labelled: bool = True) -> Arrays:
    """Read and check the arrays of a file. If not `labelled`, y may be missing.

    Returns: as `checked`.

    Raises:
        ConfigError: the file cannot be read, x or y is missing, an array has a wrong shape, type or value, or a name is
            not in `KEYS` (a typo must not lose the marks).
    """
    table = load(file)
    if "x" not in table or ("y" not in table and labelled):
        raise ConfigError(f"{file} must hold the arrays x{' and y' if labelled else ''}")
    if unknown := sorted(table.keys() - set(KEYS)):
        hint = nearest(unknown[0].lower(), KEYS)
        raise ConfigError(
            f"{file} holds an array {unknown[0]!r}, which means nothing here{hint}: name it one of "
            f"{', '.join(KEYS)}, or leave it out"
        )
    return checked(table, str(file))


def checked(table: Mapping[str, NDArray[Any]], where: str) -> Arrays:
    """Check samples and the arrays that go with them; error messages begin with `where`.

    Returns:
        x (n, ...) numbers, finite in single precision; y (n,) int64, not negative; split (n,) int64 in 0..2; sensitive
        (n,) bool; user (n,) int64, the person behind each sample, 0, 1, ...; classes (C,).

    Raises:
        ConfigError: an array has a wrong shape, type or value.
    """
    found = dict(table)
    x = found["x"]
    if x.ndim < 2 or len(x) == 0 or x.dtype.kind not in "buif":
        raise ConfigError(f"{where}: x must be samples of numbers (n, ...), not {x.dtype}{x.shape}")
    if fault := unfit(x):
        raise ConfigError(f"{where}: {fault}")
    largest = {"y": np.iinfo(np.int64).max, "split": TEST, "sensitive": 1, "user": len(x) - 1}
    for name in (name for name in largest if name in found):
        found[name] = _whole_numbers(found[name], len(x), largest[name], f"{where}: {name}")
    if "sensitive" in found:
        found["sensitive"] = found["sensitive"].astype(np.bool_)
    return found


def find(data: Path, usual: str) -> Path:
    """The file of a data set: `data` itself, or a file in the folder `data` under its usual path or name.

    Raises:
        ConfigError: no such file.
    """
    candidates = [data, data / usual, data / Path(usual).name]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise ConfigError(f"{Path(usual).name} is not at {', '.join(str(file) for file in candidates)}")
    return found


def columns(file: Path, names: tuple[str, ...]) -> Arrays:
    """Read the named arrays of a data set's file.

    Raises:
        ConfigError: the file cannot be read, or an array is missing.
    """
    table = load(file, names)
    if missing := [name for name in names if name not in table]:
        raise ConfigError(f"{file} must hold the arrays {', '.join(names)}; {', '.join(missing)} is missing")
    return table


def class_names(table: Mapping[str, NDArray[Any]], file: Path | str) -> tuple[str, ...]:
    """The names in `classes`, or "0", "1", ... up to the largest label.

    Raises:
        ConfigError: fewer names than labels, only one class, or an unprintable name.
    """
    largest = int(table["y"].max())
    names = tuple(str(name) for name in table["classes"].ravel()) if "classes" in table else None
    if largest == 0 or largest >= (len(names) if names else 10_000):
        raise ConfigError(f"{file}: the largest label is {largest}, with {len(names or ())} names in classes")
    if odd := [name for name in names or () if not name.isprintable()]:
        raise ConfigError(f"{file}: the class name {printable(odd[0])[:100]} holds control characters")
    return names or tuple(str(number) for number in range(largest + 1))


def _whole_numbers(values: NDArray[Any], n_samples: int, largest: int, what: str) -> NDArray[np.int64]:
    """One whole number per sample, from 0 to `largest`. A mask with gaps is an error; nothing is guessed."""
    if values.shape != (n_samples,) or values.dtype.kind not in "bui":
        raise ConfigError(
            f"{what} must be one whole number per sample ({n_samples},), not {values.dtype}{values.shape}"
        )
    if values.min() < 0 or values.max() > largest:
        raise ConfigError(f"{what} must be in 0..{largest}, found {values.min()}..{values.max()}")
    return values.astype(np.int64)
