"""The device's comparison of the trial's global model and expert (fedge.md section 5)."""

from __future__ import annotations

from typing import Final

from edge_agent.device.device import Device
from edge_agent.learning.evaluation import compute_loss
from fedge.steps.descriptions.trial import Trial, Tried

THREADED: Final = True


def run(device: Device, action: Trial) -> Tried:
    """Return the mean loss on V_L of the global model minus that of the expert."""
    samples = device.data.shared_validation
    m = len(samples[1])
    if not m:
        return Tried(delta=None)
    shared, expert = (
        compute_loss(device, device.fetch_model(ref), samples) for ref in (action.global_model, action.expert)
    )
    return Tried(delta=(shared - expert) / m)
