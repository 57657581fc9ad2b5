from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedge.steps.contract import Declined
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.tasks import DeviceData
from fedge.wire.messages import Why
from tests.support.orders import Blobs, device_data, order, worker


def profiled(home: Path, data: DeviceData | None = None, *, seed: int = 5, **fields: float) -> Profiled:
    blobs = Blobs()
    action = Profile(extractor=blobs.model(1), **fields)
    result = worker(home, data).execute(order(action, seed=seed), blobs).result
    assert isinstance(result, Profiled), result
    assert result.extractor == action.extractor.digest
    return result


def test_the_profile_is_about_the_hidden_units(tmp_path: Path) -> None:
    found = profiled(tmp_path)
    assert len(found.profile) == 8
    assert found.n_samples == 30
    assert found.halves is not None
    assert 0 <= found.halves < 0.2


def test_sensitive_samples_change_nothing_of_it(tmp_path: Path) -> None:
    data = device_data()
    other = replace(data, x_train=np.where(data.sensitive[:, None], np.float32(9), data.x_train))
    assert profiled(tmp_path, data) == profiled(tmp_path, other)


def test_noise_is_drawn_once_and_tells_no_halves(tmp_path: Path) -> None:
    plain, noisy = profiled(tmp_path), profiled(tmp_path, noise=0.5)
    assert noisy.halves is None
    assert noisy.profile != plain.profile
    assert profiled(tmp_path, noise=0.5, seed=6) == noisy


def test_without_shareable_samples_it_is_declined(tmp_path: Path) -> None:
    blobs = Blobs()
    own = worker(tmp_path, device_data(sensitive=1.0))
    result = own.execute(order(Profile(extractor=blobs.model(1))), blobs).result
    assert result == Declined(why=Why.NO_DATA)
