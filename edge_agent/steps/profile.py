"""The ReLU-sparsity profile of D_L (fedepc.md section 3)."""

from __future__ import annotations

from typing import Final

from edge_agent.device import Device
from edge_agent.sparsity import sparsity_profile, with_noise
from fedge.messages import Why
from fedge.step import Declined, Result
from fedge.steps.profile import Profile, Profiled

THREADED: Final = True


def run(device: Device, action: Profile) -> Result:
    """The profile by the order's extractor, with noise if requested."""
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    x, _ = device.data.shared
    device.network.load(device.model(action.extractor))
    found = sparsity_profile(device.network.module, x, device.network.processor)
    if action.noise:
        found = with_noise(found, len(x), sigma=action.noise, home=device.home)
    return Profiled(
        extractor=action.extractor.digest,
        profile=tuple(found.shares.tolist()),
        halves=found.halves,
        n_samples=len(x),
    )
