"""The device's comparison of the trial's global model and expert (fedge.md section 5)."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from edge_agent.device.device import Device
from edge_agent.learning.evaluation import compute_loss
from edge_agent.learning.noisy_choice import compare_models
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.trial import Trial, Tried

THREADED: Final = True


def run(device: Device, action: Trial) -> Result:
    """Return the mean loss on V_L of the global model minus that of the expert, with noise if `privacy` is set."""
    samples = device.data.shared_validation
    m = len(samples[1])
    if not m:
        return Tried(delta=None)
    models = [device.fetch_model(ref) for ref in (action.global_model, action.expert)]
    if action.privacy is not UNSET:
        found = compare_models(device, action.privacy, models, with_prior=True)
        return found if isinstance(found, Declined) else Tried(delta=float(found[1] - found[0]))
    shared, expert = (compute_loss(device, model, samples) for model in models)
    return Tried(delta=(shared - expert) / m)
