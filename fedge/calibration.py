"""What a federation may choose for its mixtures: temperature, prior strength, strength of the energy.

Source: fedge.md sections 7 and 9. Devices tell the losses of every point of a grid, the coordinator adds them up and
picks a point by its place: both read the grids here.
"""

from __future__ import annotations

from typing import Final

from fedge.messages import Role
from fedge.steps.fit_weights import Calibration

TEMPERATURES: Final = (1.0, 1.4, 2.0, 2.8)
"""T, section 7."""
_SHARED: Final = (0.0, 0.5, 1.0, 1.5)
_OWN: Final = (0.0, 0.3, 0.6, 1.0)  # trained on the device's own classes: part of the prior is in them
KAPPAS: Final = {Role.PRIVATE: _OWN, Role.GLOBAL: _SHARED, Role.EXPERT: _SHARED, Role.LOCAL: _OWN}
"""kappa by role, section 7."""
BETAS: Final = (0.0, 0.5, 1.0)
"""beta, section 9."""


def grid(role: Role) -> tuple[Calibration, ...]:
    """The 16 points (T, kappa) of a role, T outermost.

    >>> grid(Role.PRIVATE)[4]
    Calibration(temperature=1.4, kappa=0.0)
    """
    return tuple(Calibration(temperature=t, kappa=kappa) for t in TEMPERATURES for kappa in KAPPAS[role])
