"""Calibrations: how a candidate's outputs are read, the same on all devices."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

Deviation = Annotated[float, Meta(gt=0, le=1e30)]


class Calibration(Struct, frozen=True, kw_only=True):
    """Temperature T_k > 0, strength kappa_k >= 0 of the offset and, if its problem needs one, the deviation s_k.

    `deviation` has one number per target (regression), or a single one (reconstruction); omitted elsewhere.
    """

    temperature: Annotated[float, Meta(gt=0, le=100)]
    kappa: Annotated[float, Meta(ge=0, le=100)]
    deviation: Annotated[tuple[Deviation, ...], Meta(min_length=1, max_length=4096)] | UnsetType = UNSET


PLAIN: Final = Calibration(temperature=1.0, kappa=0.0)
"""Calibration that leaves a model's outputs as they are."""
TEMPERATURES: Final = (1.0, 1.4, 2.0, 2.8)
"""Grid of temperatures T (fedge.md section 7)."""


def make_grid(kappas: tuple[float, ...]) -> tuple[Calibration, ...]:
    """Return the points (T, kappa), T outermost.

    >>> make_grid((0.0, 0.5))[3]
    Calibration(temperature=1.4, kappa=0.5, deviation=UNSET)
    """
    return tuple(Calibration(temperature=t, kappa=kappa) for t in TEMPERATURES for kappa in kappas)
