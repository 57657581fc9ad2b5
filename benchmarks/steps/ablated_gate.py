"""`fit_gate` without its gate, guard or final fit: rows of fedge.md section 15.4."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from edge_agent.steps.mixture import fit_gate
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.install import Installed

if TYPE_CHECKING:
    from edge_agent.device.device import Device


class FitAblatedGate(FitGate, frozen=True, kw_only=True):
    STEP: ClassVar = "fit_ablated_gate"
    DEVICE: ClassVar = __name__

    trains_gate: bool = True
    guards: bool = True
    refits: bool = True


def run(device: Device, action: FitAblatedGate) -> Installed:
    return fit_gate.run(device, action, trains_gate=action.trains_gate, guards=action.guards, refits=action.refits)
