"""The grid from which a federation chooses its mixtures' energy strength (fedge.md section 9)."""

from __future__ import annotations

from typing import Final

BETAS: Final = (0.0, 0.5, 1.0)
"""Grid of energy strengths beta. Devices report losses at every point, and the coordinator adds the losses up."""
