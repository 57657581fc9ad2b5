"""Checks of labels and other whole numbers per sample; refusals say how to convert the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.system.text import escape_controls, suggest_nearest

NUMBERING: Final = "`classes, y = np.unique(y, return_inverse=True)`"
"""Code that turns labels of any kind into class numbers without gaps."""


def require_whole_numbers(values: NDArray[Any], n_samples: int, largest: int, what: str) -> NDArray[np.int64]:
    """Check that values are one whole number per sample, (n,), 0 to `largest`, and return them as int64.

    Raises:
        ConfigError: the values are something else; the text begins with `what`.
    """
    if values.shape != (n_samples,) or values.dtype.kind not in "bui":
        message = f"{what} must be one whole number per sample ({n_samples},), not {values.dtype}{values.shape}"
        raise ConfigError(message + _explain_conversion(values, n_samples))
    if values.min(initial=0) < 0 or values.max(initial=0) > largest:
        found = f"found {values.min()}..{values.max()}"
        raise ConfigError(f"{what} must be in 0..{largest}, {found}")
    return values.astype(np.int64)


def require_class_numbers(values: NDArray[Any], n_samples: int, n_classes: int | None, what: str) -> NDArray[np.int64]:
    """Check that values are class numbers, (n,), places in the list of classes; `n_classes` is None if unknown.

    Raises:
        ConfigError: the values are something else; the text begins with `what` and says how to convert them.
    """
    last = np.iinfo(np.int64).max if n_classes is None else n_classes - 1
    try:
        return require_whole_numbers(values, n_samples, int(last), what)
    except ConfigError as error:
        if values.shape != (n_samples,) or values.dtype.kind not in "bui":
            raise ConfigError(f"{error}{_suggest_problem(values, n_samples)}") from error
    known = "begin with 0" if n_classes is None else f"are 0..{last} here"
    found = f"{what} holds {values.min()}..{values.max()}, and class numbers {known}, a place in the list of classes"
    raise ConfigError(
        f"{found}: number the labels so, the same on all machines, such as by {NUMBERING} over all samples"
    )


def _suggest_problem(values: NDArray[Any], n_samples: int) -> str:
    """Return a hint at the problem whose targets these may be, or ""."""
    if len(values) != n_samples or values.dtype.kind not in "buif":
        return ""
    if values.ndim == 3:
        return "; a class for each pixel is another problem: segmentation (--problem segmentation)"
    if values.ndim == 2 and values.shape[1] > 1 and ((values == 0) | (values == 1)).all():
        ones = values.sum(axis=1)
        odd = np.flatnonzero(ones != 1)
        if 0 < len(odd) < n_samples / 2:
            return (
                f"; nearly all rows are one-hot, but row {odd[0]} holds {int(ones[odd[0]])} ones: leave it out, or if "
                "samples may have no label or several, ask for another problem: multi-label (--problem multi-label)"
            )
        return "; several labels at once are another problem: multi-label (--problem multi-label)"
    if values.dtype.kind == "f" and values.ndim <= 2:
        return "; amounts are another problem: regression (--problem regression)"
    return ""


def read_labels(
    values: NDArray[Any], n_samples: int, names: Sequence[str], first: int, n_classes: int | None, what: str
) -> NDArray[np.int64]:
    """Return the class numbers (n,) of labels in any form that leaves no doubt.

    These are whole numbers from `first` on, whole floats, one-hot rows (n, C), and text that is in `names`.

    Args:
        values: the labels, (n,), (n, 1) or (n, C).
        n_samples: n.
        names: the names of the classes.
        first: the number of the first class.
        n_classes: C; None if samples may be of classes that have no name yet.
        what: the beginning of error messages.

    Raises:
        ConfigError: the labels are something else; the text says how to convert them.
    """
    y = values[:, 0] if values.shape == (n_samples, 1) else values
    if y.shape == (n_samples, len(names)) and is_one_hot(y):
        return np.asarray(y.argmax(axis=1), np.int64)
    if y.shape == (n_samples,) and y.dtype.kind in "USO":
        return _find_names(y, names, what)
    if y.shape == (n_samples,) and y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.rint(y)).all():
        y = y.astype(np.int64)
    if first and y.dtype.kind in "bui":
        y = y.astype(np.int64) - first
    return require_class_numbers(y, n_samples, n_classes, what)


def is_one_hot(y: NDArray[Any]) -> bool:
    """Return whether each row (n, C) of two columns or more holds a single 1 among zeros."""
    return (
        y.ndim == 2
        and y.shape[1] > 1
        and y.dtype.kind in "buif"
        and bool(((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all())
    )


def _find_names(y: NDArray[Any], names: Sequence[str], what: str) -> NDArray[np.int64]:
    place = {name: k for k, name in enumerate(names)}
    found = np.array([place.get(str(label), -1) for label in y], np.int64)
    if (found < 0).any():
        label = escape_controls(str(y[int(np.argmin(found))]))[:100]
        some = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        raise ConfigError(f"{what} holds the label {label!r}{suggest_nearest(label, names)}; the classes are {some}")
    return found


def _explain_conversion(values: NDArray[Any], n_samples: int) -> str:
    """Return how to convert these values to whole numbers, if that is obvious, or ""."""
    if values.ndim == 2 and len(values) == n_samples and values.dtype.kind in "buif":
        if values.shape[1] == 1:
            return ": `y[:, 0]` is such an array"
        if ((values == 0) | (values == 1)).all() and (values.sum(axis=1) == 1).all():
            return ": `y.argmax(axis=1)` makes class numbers of one-hot rows"
    if values.shape != (n_samples,):
        return ""
    if values.dtype.kind == "f" and (np.isfinite(values) & (values == np.rint(values))).all():
        return ": `y.astype(int)` makes them of whole floats"
    if values.dtype.kind in "USO":
        return (
            f": {NUMBERING} over all samples numbers text or objects, the same on all machines; give the classes, too"
        )
    return ""
