"""Requests whose answers have noise, as orders and as the owner's rules see them."""

from __future__ import annotations

import msgspec

from fedge.steps.contract import HARMLESS
from fedge.steps.descriptions.profile import Profile
from fedge.steps.noise import Privacy
from tests.support.contracts import REF

PROFILE = Profile(extractor=REF)


def test_an_order_with_noise_has_a_version_that_older_devices_refuse() -> None:
    noisy = msgspec.structs.replace(PROFILE, privacy=Privacy(clip_norm=1.0, delta=1e-5, participations=1, epsilon=1.0))
    assert noisy.order_version == Profile.VERSION + 2000
    assert noisy.find_unaccounted() == {} != PROFILE.find_unaccounted()
    assert PROFILE.timed
    assert not noisy.timed
    assert set(noisy.reveals().values()) <= HARMLESS
