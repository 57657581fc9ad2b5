"""The label shares of D_L: exact, with noise, and never of sensitive samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET, UnsetType

from edge_agent.device.worker import Worker
from edge_agent.steps.descriptions.label_shares import compute_shares
from fedge.data.task import TaskSpec
from fedge.steps.contract import Declined
from fedge.steps.descriptions.label_shares import LabelShares, LabelSharesMeasured
from fedge.steps.noise import Privacy
from fedge.tasks import DeviceData
from fedge.wire.messages import Why
from tests.support.orders import order

TASK = TaskSpec(name="toy", classes=tuple("abcd"), input_shape=(2,), model="mlp")


def data(labels: list[int], sensitive: list[int] = ()) -> DeviceData:  # type: ignore[assignment]
    y = np.array([*labels, *sensitive], np.int64)
    marks = np.array([False] * len(labels) + [True] * len(sensitive), bool)
    return DeviceData(np.zeros((len(y), 2), np.float32), y, marks, np.zeros((0, 2), np.float32), y[:0])


def told(home: Path, own: DeviceData, privacy: Privacy | UnsetType = UNSET, seed: int = 0) -> object:
    worker = Worker("d", TASK, own, home, source=lambda _: np.random.default_rng(seed).bytes)
    return worker.execute(order(LabelShares(privacy=privacy), task=TASK), lambda _: b"").result


def test_they_are_shares_of_the_samples_that_are_not_sensitive(tmp_path: Path) -> None:
    found = told(tmp_path, data([3, 3, 1, 3], sensitive=[0] * 20))
    assert found == LabelSharesMeasured(shares=(0.0, 0.25, 0.0, 0.75), n_samples=4)


def test_without_such_samples_the_device_declines(tmp_path: Path) -> None:
    found = told(tmp_path, data([], sensitive=[1]))
    assert isinstance(found, Declined)
    assert found.why is Why.NO_DATA


def test_with_noise_they_are_shares_of_counts_that_are_off_by_the_noise(tmp_path: Path) -> None:
    """The sensitivity is sqrt(1 - 1/C); the sum of the counts is not known, so shares are compared in large data."""
    noise = Privacy(clip_norm=1.0, delta=1e-6, participations=1, noise_multiplier=20.0)
    own = data([0] * 4000 + [1] * 4000 + [2] * 4000 + [3] * 4000)
    off = []
    for seed in range(60):
        found = told(tmp_path / str(seed), own, noise, seed)
        assert isinstance(found, LabelSharesMeasured)
        assert sum(found.shares) == pytest.approx(1)
        off += [16_000 * (share - 1 / 4) for share in found.shares]
    assert np.std(off) == pytest.approx(20 * np.sqrt(3 / 4) * np.sqrt(3 / 4), rel=0.15)  # less the common part


@pytest.mark.parametrize(
    ("counts", "shares"), [([4, 1, -3], [0.8, 0.2, 0]), ([-1, -2], [0.5, 0.5]), ([0], [1]), ([7], [1])]
)
def test_counts_below_nothing_are_nothing(counts: list[float], shares: list[float]) -> None:
    assert compute_shares(counts).tolist() == shares
