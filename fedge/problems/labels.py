"""Checks of labels and other whole numbers per sample; refusals say how to convert the values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError

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
    except ConfigError:
        if values.shape != (n_samples,) or values.dtype.kind not in "bui":
            raise
    known = "begin with 0" if n_classes is None else f"are 0..{last} here"
    found = f"{what} holds {values.min()}..{values.max()}, and class numbers {known}, a place in the list of classes"
    raise ConfigError(
        f"{found}: number the labels so, the same on all machines, such as by {NUMBERING} over all samples"
    )


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
