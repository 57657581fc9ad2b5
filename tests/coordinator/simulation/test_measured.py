"""What users compute themselves from a result: the devices' predictions and test samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedge
from coordinator.simulation.measured import add_tests, drop_training
from fedge.errors import ConfigError
from fedge.tasks import Partitioning, load_pool, partition_pool
from fedge.tasks.generated import Generated
from tests.support.comparison import a_run

RNG = np.random.default_rng(0)
X, Y = RNG.random((200, 5)).astype(np.float32), RNG.integers(0, 3, 200)


def count_wrong(said: Any, y: np.ndarray) -> float:
    return float((said.class_index != y).sum())


def test_anything_can_be_computed_from_a_devices_predictions(tmp_path: Path) -> None:
    task = fedge.Task.from_arrays(X, Y, x_test=X[:40] + 0.5, y_test=Y[:40])
    found = fedge.simulate(
        task=task, devices=2, rounds=1, method="fedavg", alpha=50.0, metric=count_wrong, progress=None, global_test=0.1
    )
    n_tests = 0
    for device in found.devices:
        said, y = device.predictions, device.y_test
        assert len(said) == len(y) == len(device.x_test) == device.score.n
        assert device.x_test.min() >= 0.5, "only the user's own test samples"
        assert device.score.accuracy == pytest.approx((said.class_index == y).mean())
        assert device.score.metrics["count_wrong"] == (said.class_index != y).sum()
        assert 0 <= device.score.metrics["auroc"] <= 1
        n_tests += len(y)
    assert n_tests == 36, "a tenth is the global test set"
    wrong = [device.score.metrics["count_wrong"] for device in found.devices]
    assert found.metrics["count_wrong"] == pytest.approx(np.mean(wrong))
    assert found.counts is not None
    assert np.sum(found.counts.counts) == n_tests
    assert np.trace(found.counts.counts) == sum(d.score.n * d.score.accuracy for d in found.devices)
    rows = found.to_rows()
    assert list(rows[0])[-2:] == ["auroc", "count_wrong"]
    assert "count_wrong" in str(found)
    assert "auroc" not in str(found), "what is printed of classification stays as it was"


def test_a_metric_that_fails_costs_no_run() -> None:
    told: list[str] = []
    small: dict[str, Any] = {"task": fedge.Task.from_arrays(X, Y), "devices": 2, "rounds": 1, "method": "fedavg"}
    found = fedge.simulate(**small, metric=lambda _: 0, progress=told.append)
    assert any(line.startswith("note: the metric <lambda> fails with TypeError") for line in told)
    assert list(found.metrics) == ["auroc"]


def test_predictions_that_are_not_there_are_explained(tmp_path: Path) -> None:
    (device, other) = a_run().devices
    with pytest.raises(ConfigError, match="device-0 has no bundle: it was not measured"):
        _ = add_tests(device, {}, tmp_path).predictions
    gone = add_tests(msgspec.structs.replace(other, release="1"), {}, tmp_path)
    with pytest.raises(ConfigError, match="is gone with its result: keep the result"):
        _ = gone.predictions


def test_a_result_holds_no_training_samples() -> None:
    pool = load_pool("digits", limit=200)
    shares = {str(k): share for k, share in enumerate(partition_pool(pool, 2, Partitioning(), seed=0))}
    kept = drop_training(shares)
    assert [(len(share.x_train), len(share.x_val)) for share in kept.values()] == [(0, 0)] * 2
    assert all(kept[i].x_test is shares[i].x_test for i in shares)
    generated = Generated(pool, 2, Partitioning(), seed=0)
    assert drop_training(generated) is generated
