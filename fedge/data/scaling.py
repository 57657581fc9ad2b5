"""The precision in which samples are scaled, and checks for numbers that networks, in single precision, cannot take."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST: Final = float(np.finfo(np.float32).max)
FURTHEST: Final = LARGEST**0.5
"""Largest absolute model input. The square of a larger one is not finite, so the gradient's norm is not, and training
diverges."""
FAR: Final = 16
"""Largest mean, in standard deviations, for single precision; it costs 4 of the 24 bits."""


def choose_precision(mean: ArrayLike, std: ArrayLike) -> type[np.float32 | np.float64]:
    """Return the type in which to compute (x - mean) / std: double if the mean is too large for single precision."""
    return np.float64 if (np.abs(mean) > FAR * np.asarray(std)).any() else np.float32


def are_inputs(x: NDArray[Any]) -> bool:
    """Return whether a network can take all numbers of x (n, ...). Cheap; `explain_unfit` says what is wrong."""
    return bool(x.max(initial=0) <= FURTHEST and x.min(initial=0) >= -FURTHEST)  # not if there is NaN


def explain_unfit(x: NDArray[Any], inputs: NDArray[np.float32] | None = None) -> str:
    """Return what is wrong with the first unfit sample, and what to do, or "" if all are fit.

    `x` (n, ...) holds the raw numbers, `inputs` the scaled ones; if `inputs` is None, only `x` is checked.
    """
    fits = _is_finite(x) if inputs is None else _is_finite(x) & (np.abs(inputs) <= FURTHEST)
    if fits.all():
        return ""
    at = np.unravel_index(int(np.argmin(fits)), x.shape)
    if not np.isfinite(x[at]):
        return describe_fault(at, "not a finite number")
    if not abs(x[at]) <= LARGEST:
        return describe_fault(at, f"more than single precision holds ({LARGEST:.2g})")
    return describe_fault(at, "so far from the task's mean that no network can compute with it")


def describe_fault(at: tuple[np.intp, ...], fault: str) -> str:
    """Describe the fault of the number at a place of samples (n, ...), and what to do.

    The text does not contain the number, since it gets into logs, which people send to others.
    """
    sample, *place = (int(i) for i in at)
    where = f"column {place[0]}" if len(place) == 1 else f"place {tuple(place)}"
    return (
        f"sample {sample}, {where} (counted from 0) is {fault}: if it stands for a missing value, fill it "
        "in, or leave the sample out"
    )


def _is_finite(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether single precision can hold each number."""
    fits: NDArray[np.bool_] = np.abs(x) <= LARGEST if x.dtype.kind == "f" and x.dtype.itemsize > 4 else np.isfinite(x)
    return fits
