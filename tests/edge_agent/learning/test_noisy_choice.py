"""Comparisons of models with noise: which samples shape them, and whether the better model is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_agent.device.worker import Worker
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_dp import TrainDp
from fedge.tasks import DeviceData
from tests.support.orders import TASK, Blobs, device_data, order


def worker(home: Path, data: DeviceData) -> Worker:
    return Worker("d", TASK, data, home, source=lambda _: np.random.default_rng(0).bytes)


def test_a_comparison_depends_on_validation_samples_alone_and_takes_the_better_start(tmp_path: Path) -> None:
    blobs, data = Blobs(), device_data(sensitive=0, m=60)
    other = replace(data, y_train=(data.y_train + 1) % 3)
    few = Privacy(clip_norm=1.0, delta=1e-5, participations=1, noise_multiplier=0.01)
    trial = order(Trial(global_model=blobs.model(1, scale=9), expert=blobs.model(2, scale=9), privacy=few))
    first, second = (worker(tmp_path / n, own).execute(trial, blobs).result for n, own in (("a", data), ("b", other)))
    assert first == second
    assert isinstance(first, Tried)
    assert first.delta
    starts = (Start(model=blobs.model(1, scale=9), cluster=4), Start(model=blobs.model(2, scale=9), cluster=5))
    train = TrainDp(starts=starts, sgd=Sgd(steps=1), privacy=few)
    result = worker(tmp_path / "c", data).execute(order(train), blobs).result
    assert result.cluster == (5 if first.delta > 0 else 4)
    without = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])
    assert worker(tmp_path / "d", without).execute(order(train), blobs).result.cluster == 4
