"""The ReLU-sparsity profile of D_L (fedepc.md section 3)."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from edge_agent.device.device import Device
from edge_agent.learning.profile import make_profile, randomise_sums, sum_zeros, with_noise
from edge_agent.privacy.answers import take_noise
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.wire.messages import Why

THREADED: Final = True


def run(device: Device, action: Profile) -> Result:
    """Measure the profile by the order's extractor, with noise if requested."""
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    x, _ = device.data.shared
    device.network.load(device.fetch_model(action.extractor))
    sums = sum_zeros(device.network.module, x, device.network.processor)
    if action.privacy is not UNSET:
        noise = take_noise(device, action.privacy, "training")
        if isinstance(noise, Declined):
            return noise
        sums = randomise_sums(sums, len(x), noise)
    found = make_profile(sums, len(x))
    if action.noise:
        found = with_noise(found, len(x), sigma=action.noise, home=device.home)
    return Profiled(
        extractor=action.extractor.digest,
        profile=tuple(found.shares.tolist()),
        halves=found.halves,
        n_samples=len(x),
    )
