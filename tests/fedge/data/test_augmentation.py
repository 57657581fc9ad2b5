"""What becomes of training samples that are changed at random, and which changes suit which samples."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fedge.data.augmentation import ERASED, NAMES, change_samples, with_augment
from fedge.data.problems.segmentation import IGNORED, Segmentation
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.system.loading import register_object

IMAGES = TaskSpec(name="i", classes=("a", "b"), input_shape=(2, 16, 24), model="cnn")
ROWS = TaskSpec(name="r", classes=("a", "b"), input_shape=(5,), model="mlp")
X = np.random.default_rng(0).normal(size=(40, 2, 16, 24)).astype(np.float32)
Y = np.arange(40) % 2


def change(augment: str, x: np.ndarray = X, y: Any = Y, task: TaskSpec = IMAGES, seed: int = 1) -> Any:
    return change_samples(with_augment(task, augment), x, y, np.random.default_rng(seed))


@pytest.mark.parametrize("name", NAMES)
def test_equal_numbers_give_equal_bytes_and_others_others(name: str) -> None:
    before = X.copy()
    (x, y), (again, _), (other, _) = change(name), change(name), change(name, seed=2)
    assert np.array_equal(X, before), "the samples themselves stay"
    assert (x.shape, x.dtype) == (X.shape, np.float32)
    assert x.tobytes() == again.tobytes() != other.tobytes()
    assert y.tolist() == Y.tolist()
    assert change("")[0] is X


def test_half_of_the_images_are_mirrored() -> None:
    x, _ = change("flip")
    mirrored = [np.array_equal(one, own[:, :, ::-1]) for one, own in zip(x, X, strict=True)]
    assert all(m or np.array_equal(one, own) for m, one, own in zip(mirrored, x, X, strict=True))
    assert 10 <= sum(mirrored) <= 30


def test_what_a_crop_moves_in_repeats_the_edge() -> None:
    ramp = np.broadcast_to(np.arange(24, dtype=np.float32), (40, 2, 16, 24))
    x, _ = change("crop", ramp)
    by = x[:, 0, 0, 12] - 12
    assert set(by.tolist()) == set(range(-3, 4)), "an eighth of the side"
    assert all(np.array_equal(x[k, 0, 0], np.clip(np.arange(24) + by[k], 0, 23)) for k in range(40))


def test_a_turn_is_small_and_keeps_the_middle() -> None:
    far = np.zeros((40, 2, 16, 24), np.float32)
    far[:, :, 7:9] = 1  # a bar across
    x, _ = change("rotate", far)
    assert np.array_equal(x[:, :, 7:9, 11:13], far[:, :, 7:9, 11:13])
    bent = np.abs(np.argmax(x[:, 0, :, 0], axis=1) - 7)
    assert 1 <= bent.max() <= 4, "12 pixels from the middle at 15 degrees it is 3 pixels away"


def test_a_rectangle_of_half_of_the_images_is_erased() -> None:
    ones = np.ones((200, 1, 32, 32), np.float32)
    task = msgspec.structs.replace(IMAGES, input_shape=(1, 32, 32))
    x, _ = change("erase", ones, np.arange(200) % 2, task)
    shares = (x[:, 0] == 0).mean(axis=(1, 2))
    assert 60 <= (shares > 0).sum() <= 140
    assert shares[shares > 0].min() > ERASED[0] / 2
    assert shares.max() < ERASED[1] * 1.2


@pytest.mark.parametrize("names", ["flip", "crop", "rotate", "flip,crop,rotate,noise"])
def test_masks_move_with_their_images(names: str) -> None:
    task = TaskSpec(name="s", asked=Segmentation(classes=("no", "yes")), input_shape=(1, 16, 24), model="unet")
    y = (np.random.default_rng(3).random((40, 16, 24)) < 0.5).astype(np.int64)
    x, moved = change(names, 10 * y[:, np.newaxis].astype(np.float32), y, task)
    counted = moved != IGNORED
    assert np.array_equal((x[:, 0] > 5)[counted], moved[counted] == 1)
    assert counted.mean() > 0.7
    assert (names == "flip") == bool(counted.all()), "what comes in from outside counts nowhere"


def test_noise_suits_any_samples_and_a_function_of_ones_own_too() -> None:
    rows, y = np.zeros((300, 5), np.float32), np.zeros(300, np.int64)
    assert change("noise", rows, y, ROWS)[0].std() == pytest.approx(0.1, rel=0.1)

    def add_steps(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return x + rng.integers(1, 3, (len(x), 1))

    x, _ = change(f"noise, {register_object(add_steps)}", rows, y, ROWS)
    assert set(np.rint(x[:, 0]).tolist()) == {1, 2}
    assert x.dtype == np.float32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "flop",
            r"unknown augmentation flop \(did you mean flip.*: use flip, crop, rotate, noise, erase, or",
        ),
        ("noise,crop", r"the augmentation crop is for images .*, and the samples are \(5,\)"),
        ("nowhere:change", "cannot load nowhere:change"),
        ("math:pi", r"math:pi is no function: it is called with \(x, rng\)"),
    ],
)
def test_what_does_not_suit_is_refused_with_what_to_do(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_augment(ROWS, given)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (lambda _x, _rng: 1 / 0, "<lambda> fails with ZeroDivisionError"),
        (lambda x, _rng: x[:1], r"<lambda> must return numbers \(40, 2, 16, 24\), not float32\(1, 2, 16, 24\)"),
    ],
)
def test_a_function_that_fails_is_named(own: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        change(register_object(own))


def test_a_task_without_any_keeps_its_fingerprint_and_code_is_told() -> None:
    assert b"augment" not in msgspec.json.encode(IMAGES)
    assert with_augment(IMAGES, None) == with_augment(IMAGES, "") == IMAGES
    path = "tests.fedge.data.test_augmentation:change"
    assert path in with_augment(IMAGES, f"flip,{path}").code, "a file may name it only if its owner allows it"
