from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.learning.evaluation import compute_loss
from fedge.steps.descriptions.trial import Trial, Tried
from tests.support.orders import Blobs, device, device_data, order, worker


def test_delta_is_the_difference_of_the_mean_validation_losses(tmp_path: Path) -> None:
    blobs = Blobs()
    one, other = blobs.model(1), blobs.model(2)
    action = Trial(global_model=one, expert=other)
    found = worker(tmp_path).execute(order(action), blobs).result
    assert isinstance(found, Tried)
    here = device(tmp_path, action, blobs)
    losses = [compute_loss(here, here.fetch_model(ref), here.data.validation) for ref in (one, other)]
    assert found.delta == pytest.approx((losses[0] - losses[1]) / 15)
    back = worker(tmp_path).execute(order(Trial(global_model=other, expert=one)), blobs).result
    assert isinstance(back, Tried)
    assert back.delta == -found.delta != 0


def test_equal_models_have_no_difference_and_no_samples_no_answer(tmp_path: Path) -> None:
    blobs = Blobs()
    action = Trial(global_model=blobs.model(1), expert=blobs.model(1))
    assert worker(tmp_path).execute(order(action), blobs).result == Tried(delta=0.0)
    assert worker(tmp_path, device_data(m=0)).execute(order(action), blobs).result == Tried(delta=None)
