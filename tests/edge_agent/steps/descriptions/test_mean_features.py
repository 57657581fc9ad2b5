from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedge.steps.contract import Declined
from fedge.steps.descriptions.mean_features import FeaturesMeasured, MeanFeatures
from fedge.tensors.layout import from_bytes
from fedge.wire.messages import Why
from tests.support.orders import Blobs, device_data, order, worker


def test_mean_features_are_those_of_the_samples_that_are_not_sensitive(tmp_path: Path) -> None:
    blobs, device = Blobs(), worker(tmp_path)
    result = device.execute(order(MeanFeatures(model=blobs.model(1))), blobs).result
    assert isinstance(result, FeaturesMeasured)
    x, _ = device.data.shared
    tensors = from_bytes(blobs(blobs.model(1)))
    hidden = np.maximum(x @ tensors["1.weight"].T + tensors["1.bias"], 0)
    assert result.mean == pytest.approx(hidden.mean(axis=0).tolist(), abs=1e-6)
    assert result.n_samples == len(x) == 30


def test_without_shareable_samples_it_is_declined(tmp_path: Path) -> None:
    blobs = Blobs()
    device = worker(tmp_path, device_data(sensitive=1.0))
    result = device.execute(order(MeanFeatures(model=blobs.model(1))), blobs).result
    assert result == Declined(why=Why.NO_DATA)
