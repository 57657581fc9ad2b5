"""Devices that are made from their number."""

import pickle

import numpy as np
import pytest

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import Partitioning, Pool
from fedge.tasks.generated import Generated

IMAGES = TaskSpec(name="images", classes=("a", "b", "c"), input_shape=(1, 6, 6), model="mlp")
X = np.random.default_rng(0).integers(0, 256, (90, 6, 6)).astype(np.uint8)


def generated(x: np.ndarray = X, alpha: float = 100.0, seed: int = 1) -> Generated:
    pool = Pool(x, np.arange(len(x)) % 3, IMAGES)
    return Generated(pool, 1000, Partitioning(min_samples=40, alpha=alpha, sensitive=0.5), seed=seed)


def test_a_device_is_the_same_whenever_it_is_made_and_whoever_makes_it():
    here, there = generated(), pickle.loads(pickle.dumps(generated()))
    one, again = here["device-007"], there["device-007"]
    assert all(np.array_equal(getattr(one, name), getattr(again, name)) for name in ("x_train", "y_val", "sensitive"))
    assert not np.array_equal(one.y_train, here["device-008"].y_train)
    assert not np.array_equal(one.y_train, generated(seed=2)["device-007"].y_train)


def test_a_device_has_as_many_samples_as_asked_for_in_three_parts_with_marks():
    share = generated()["device-002"]
    assert len(share.y_train) + len(share.y_val) + len(share.y_test) == 40
    assert len(share.y_test) == 10
    assert share.sensitive.mean() == pytest.approx(0.5, abs=0.05)
    assert share.group == 2
    assert share.x_train.dtype == np.uint8


def test_the_smaller_alpha_the_fewer_classes():
    fewest = [len(np.unique(generated(alpha=alpha)["device-003"].y_train)) for alpha in (1e-4, 100.0)]
    assert fewest == [1, 3]


def test_images_are_turned_by_the_group():
    bright = np.zeros((90, 6, 6), np.uint8)
    bright[:, :3] = 200  # the upper half; shifts and noise do not hide it
    of = [generated(bright)[f"device-{number:03}"].x_train.mean(axis=0) for number in range(4)]
    halves = [{"up": x[:3], "left": x[:, :3], "down": x[3:], "right": x[:, 3:]} for x in of]
    assert [max(half, key=lambda side: half[side].mean()) for half in halves] == ["up", "left", "down", "right"]


def test_what_is_no_image_cannot_be_shifted():
    with pytest.raises(ConfigError, match="not images"):
        generated(X.reshape(90, 36))
