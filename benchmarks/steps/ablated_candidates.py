"""`fit_candidates` with another start, or a fixed number of steps, of the private model: rows of fedge.md 15.4."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from edge_agent.steps.mixture import fit_candidates
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates

if TYPE_CHECKING:
    from edge_agent.device.device import Device


class FitAblatedCandidates(FitCandidates, frozen=True, kw_only=True):
    STEP: ClassVar = "fit_ablated_candidates"
    DEVICE: ClassVar = __name__

    private_start: str = ""  # "initial"; empty: as in the step itself
    private_steps: int | None = None


def run(device: Device, action: FitAblatedCandidates) -> CandidatesFitted:
    return fit_candidates.run(device, action, private_start=action.private_start, private_steps=action.private_steps)
