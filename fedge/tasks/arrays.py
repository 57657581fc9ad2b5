"""Samples in an .npz file: x (n, ...), y (n,), and optionally split, sensitive, user, block and classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.data.npz import load_arrays
from fedge.data.problems.labels import NUMBERING, require_whole_numbers
from fedge.data.scaling import explain_unfit
from fedge.data.task import TEST
from fedge.data.text import is_text
from fedge.errors import ConfigError
from fedge.system.moved import alias_names
from fedge.system.text import escape_controls, suggest_nearest

Arrays = dict[str, NDArray[Any]]
KEYS: Final = ("x", "y", "split", "sensitive", "user", "block", "classes")
MOST_UNNAMED: Final = 10_000
"""Most classes without names; so many labels are hardly classes."""


def read_arrays(file: Path, *, labelled: bool = True) -> Arrays:
    """Read and check the arrays of a file. If not `labelled`, y may be missing.

    Returns: the arrays, as for `require_arrays`.

    Raises:
        ConfigError: the file cannot be read, x or y is missing, an array has a wrong shape, type or value, or a name is
            not in `KEYS` (a typo must not lose the marks).
    """
    table = load_arrays(file)
    if "x" not in table or ("y" not in table and labelled):
        raise ConfigError(f"{file} must hold the arrays x{' and y' if labelled else ''}")
    if unknown := sorted(table.keys() - set(KEYS)):
        hint = suggest_nearest(unknown[0].lower(), KEYS)
        raise ConfigError(
            f"{file} holds an array {unknown[0]!r}, which means nothing here{hint}: name it one of "
            f"{', '.join(KEYS)}, or leave it out"
        )
    return require_arrays(table, str(file))


def require_arrays(table: Mapping[str, NDArray[Any]], where: str) -> Arrays:
    """Check samples and the arrays that go with them; error messages begin with `where`.

    Returns:
        x (n, ...) numbers, finite in single precision, or texts (n,); y as it is, for the task's problem to check;
        split (n,) int64 in 0..2; sensitive (n,) bool; user (n,) int64, the person behind each sample, 0, 1, ...; block
        (n,) int64, the recording from which each sample was cut, 0, 1, ...; classes (C,).

    Raises:
        ConfigError: an array has a wrong shape, type or value.
    """
    found = dict(table)
    x = found["x"]
    text = len(x) > 0 and is_text(x)
    if text:
        found["x"] = x = x.astype(str)
    elif x.ndim < 2 or len(x) == 0 or x.dtype.kind not in "buif":
        do = ""
        if x.ndim == 1 and x.dtype.kind in "buif" and len(x):
            do = ": give x[:, np.newaxis] for one number per sample"
        elif x.dtype.kind in "OSU":
            do = ": turn categories into one-hot columns; of texts, give one for each sample, (n,)"
        raise ConfigError(f"{where}: x must be samples of numbers (n, ...), not {x.dtype}{x.shape}{do}")
    if not text and (fault := explain_unfit(x)):
        raise ConfigError(f"{where}: {fault}")
    largest = {"split": TEST, "sensitive": 1, "user": len(x) - 1}
    for name in (name for name in largest if name in found):
        found[name] = require_whole_numbers(found[name], len(x), largest[name], f"{where}: {name}")
    if "sensitive" in found:
        found["sensitive"] = found["sensitive"].astype(np.bool_)
    if "block" in found:
        found["block"] = number_blocks(found["block"], len(x), found.get("split"), where)
    return found


def number_blocks(values: NDArray[Any], n: int, split: NDArray[np.int64] | None, where: str) -> NDArray[np.int64]:
    """Number the blocks of n samples 0, 1, ...; they are named by whole numbers or text.

    Raises:
        ConfigError: there is not one for each sample, or a given split has samples of a block in several parts.
    """
    if values.shape != (n,) or values.dtype.kind not in "buiUSO":
        raise ConfigError(
            f"{where}: block must be one number or name per sample ({n},), not {values.dtype}{values.shape}"
        )
    names = values.astype(str) if values.dtype.kind == "O" else values
    there, found = np.unique(names, return_inverse=True)
    if split is not None:
        parts = np.bincount(np.unique(np.stack([found, split]), axis=1)[0])
        if (parts > 1).any():
            name = escape_controls(str(there[int(np.argmax(parts > 1))]))[:100]
            raise ConfigError(f"{where}: samples of block {name} are in several parts of split: put all into one")
    return found.astype(np.int64)


def find_file(data: Path, usual: str) -> Path:
    """Find a data set's file: `data` itself, or one in this folder under its usual path or name.

    Raises:
        ConfigError: there is no such file.
    """
    candidates = [data, data / usual, data / Path(usual).name]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise ConfigError(f"{Path(usual).name} is not at {', '.join(str(file) for file in candidates)}")
    return found


def read_columns(file: Path, names: tuple[str, ...]) -> Arrays:
    """Read the named arrays of a data set's file.

    Raises:
        ConfigError: the file cannot be read, or an array is missing.
    """
    table = load_arrays(file, names)
    if missing := [name for name in names if name not in table]:
        raise ConfigError(f"{file} must hold the arrays {', '.join(names)}; {', '.join(missing)} is missing")
    return table


def get_class_names(table: Mapping[str, NDArray[Any]], file: Path | str) -> tuple[str, ...]:
    """Return the names in `classes`, or "0", "1", ... up to the largest label.

    Raises:
        ConfigError: there are fewer names than labels, there are no names and the labels have gaps, there is only one
            class, or a name is unprintable or stands twice.
    """
    there = np.unique(table["y"])
    largest = int(there[-1])
    names = tuple(str(name) for name in table["classes"].ravel()) if "classes" in table else None
    if names is None and len(there) <= largest:
        some = ", ".join(map(str, there[:5])) + ", ..." * (len(there) > 5)
        problem = f"the labels {some} are {len(there)} classes or {largest + 1}: {NUMBERING} numbers them without gaps"
        raise ConfigError(f"{file}: {problem}; or name all classes, those without samples, too (`classes`)")
    if largest >= (len(names) if names else MOST_UNNAMED):
        problem = f"the largest label is {largest}, with {len(names or ())} names in classes"
        raise ConfigError(f"{file}: {problem}: name 0..{largest}, or number the labels by their place among the names")
    if len(names or there) < 2:
        what = "there is one name in classes" if names else "all labels are 0"
        raise ConfigError(f"{file}: {what}, and a task has two classes or more: name them all (`classes`)")
    if names and (twice := [name for name in names if names.count(name) > 1]):
        raise ConfigError(
            f"{file}: the class {escape_controls(twice[0])[:100]} stands twice in classes: name each once"
        )
    if odd := [name for name in names or () if not name.isprintable()]:
        raise ConfigError(f"{file}: the class name {escape_controls(odd[0])[:100]} holds control characters")
    return names or tuple(str(number) for number in range(largest + 1))


__getattr__ = alias_names(__name__, read="read_arrays")
