"""The grids from which a federation chooses its mixtures' temperature, prior strength and energy strength.

Source: fedge.md sections 7 and 9. Devices report losses at every grid point; the coordinator adds the losses up and
chooses a point by its index. Both use the grids here.
"""

from __future__ import annotations

from typing import Final

from fedge.steps.mixture.fit_weights import Calibration
from fedge.wire.messages import Role

TEMPERATURES: Final = (1.0, 1.4, 2.0, 2.8)
"""Grid of temperatures T (section 7)."""
_SHARED: Final = (0.0, 0.5, 1.0, 1.5)
_OWN: Final = (0.0, 0.3, 0.6, 1.0)  # trained on the device's own classes, so part of the prior is included
KAPPAS: Final = {Role.PRIVATE: _OWN, Role.GLOBAL: _SHARED, Role.EXPERT: _SHARED, Role.LOCAL: _OWN}
"""Grid of prior strengths kappa, by role (section 7)."""
BETAS: Final = (0.0, 0.5, 1.0)
"""Grid of energy strengths beta (section 9)."""


def make_grid(role: Role) -> tuple[Calibration, ...]:
    """Return the 16 points (T, kappa) of a role, T outermost.

    >>> make_grid(Role.PRIVATE)[4]
    Calibration(temperature=1.4, kappa=0.0)
    """
    return tuple(Calibration(temperature=t, kappa=kappa) for t in TEMPERATURES for kappa in KAPPAS[role])
