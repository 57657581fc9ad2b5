"""Deals the samples of a set out to simulated devices: label skew, turned cameras, sensitive samples, hold-outs."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedge import preprocess
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.tasks import arrays, images
from fedge.tasks.data import DeviceData
from fedge.tasks.pool import Pool
from fedge.tasks.sampling import n_validation, spread

MIN_SAMPLES: Final = 20  # per device: enough for a training, a validation and a test part
TEST_SHARE: Final = 0.25  # scmoe_pfl.md section 3
_REDRAWS: Final = 100

log = logging.getLogger("fedge.tasks")


@dataclass(frozen=True, slots=True)
class Share:
    """What one simulated device has: raw samples (n, ...), labels (n,), marks of the training part, and its group."""

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    sensitive: NDArray[np.bool_]
    x_val: NDArray[Any]
    y_val: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    group: int


def partition(
    pool: Pool,
    n_devices: int,
    *,
    how: Literal["groups", "dirichlet"],
    alpha: float,
    sensitive: float,
    seed: int,
    n_groups: int = 3,
) -> list[Share]:
    """Deal all samples out to devices; equal arguments give equal shares.

    "dirichlet": for each class, the devices' shares are drawn from Dirichlet(alpha). "groups": device i is in group
    i mod n_groups, whose images are turned by 90 degrees x group; every group gets its part of each class, dealt out by
    Dirichlet(alpha) within. A draw that leaves a device with fewer than 20 samples is repeated; if 100 draws did not
    help, samples are moved from the largest device, with a line in the log.

    Args:
        pool: the samples; groups need square images.
        n_devices: N >= 1.
        how: see above.
        alpha: > 0; the smaller, the more differ the devices' classes.
        sensitive: share of each device's training samples that is marked, in [0, 1], the same for all its classes.
        seed: of all draws.
        n_groups: 1 to 4.

    Raises:
        ConfigError: too few samples for so many devices, images that cannot be turned, or an argument out of range.
    """
    if n_devices < 1 or not alpha > 0 or not 0 <= sensitive <= 1 or not 1 <= n_groups <= 4:
        raise ConfigError("a partition needs devices >= 1, alpha > 0, sensitive in [0, 1] and 1 to 4 groups")
    if len(pool.y) < MIN_SAMPLES * n_devices:
        raise ConfigError(f"{len(pool.y)} samples are too few for {n_devices} devices: each needs {MIN_SAMPLES}")
    rng = np.random.default_rng(seed)
    n_groups = n_groups if how == "groups" else 1
    group_of = np.arange(n_devices) % n_groups
    owners = _deal(pool.y, group_of, alpha, rng)
    return [
        _share(pool, np.flatnonzero(owners == device), int(group_of[device]), sensitive, rng)
        for device in range(n_devices)
    ]


def share_data(task: TaskSpec, share: Share) -> DeviceData:
    """A share as its device's worker sees it, without the way through a file."""
    return DeviceData(
        x_train=preprocess.apply(task, share.x_train),
        y_train=share.y_train,
        sensitive=share.sensitive,
        x_val=preprocess.apply(task, share.x_val),
        y_val=share.y_val,
    )


def write_share(share: Share, path: Path, classes: tuple[str, ...] | None = None) -> None:
    """Write a share as the data of a real device: an .npz file, or with `classes` a folder of PNG images per class.

    Raises:
        OSError: the file or folder cannot be written.
    """
    x = np.concatenate([share.x_train, share.x_val, share.x_test])
    y = np.concatenate([share.y_train, share.y_val, share.y_test])
    parts = (arrays.TRAIN, arrays.VALIDATION, arrays.TEST)
    split = np.repeat(np.array(parts), [len(share.y_train), len(share.y_val), len(share.y_test)])
    marks = np.zeros(len(y), dtype=np.bool_)
    marks[: len(share.sensitive)] = share.sensitive
    if classes is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=x, y=y, split=split, sensitive=marks)
    else:
        _write_folder(path, x, [classes[label] for label in y], split, marks)


def _deal(
    y: NDArray[np.int64], group_of: NDArray[np.int64], alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The device of each sample, (n,)."""
    for _ in range(_REDRAWS):
        owners = _draw(y, group_of, alpha, rng)
        if np.bincount(owners, minlength=len(group_of)).min() >= MIN_SAMPLES:
            return owners
    moved = _fill_up(owners, len(group_of), rng)
    log.warning("event=partition_adjusted draws=%d moved=%d min_samples=%d", _REDRAWS, moved, MIN_SAMPLES)
    return owners


def _draw(
    y: NDArray[np.int64], group_of: NDArray[np.int64], alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    owners = np.empty(len(y), dtype=np.int64)
    n_groups = int(group_of.max()) + 1
    group_shares = np.bincount(group_of) / len(group_of)
    for label in np.unique(y):
        samples = rng.permutation(np.flatnonzero(y == label))
        for group, part in zip(range(n_groups), _cut(samples, group_shares), strict=True):
            devices = np.flatnonzero(group_of == group)
            shares = rng.dirichlet(np.full(len(devices), alpha))
            for device, own in zip(devices, _cut(part, shares), strict=True):
                owners[own] = device
    return owners


def _cut(samples: NDArray[np.int64], shares: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Consecutive parts in these proportions; their sizes add up."""
    return np.split(samples, np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64))


def _fill_up(owners: NDArray[np.int64], n_devices: int, rng: np.random.Generator) -> int:
    """Move random samples, one at a time, from the largest to the smallest device, in place; how many were moved."""
    moved = 0
    counts = np.bincount(owners, minlength=n_devices)
    while counts.min() < MIN_SAMPLES:
        largest, smallest = int(counts.argmax()), int(counts.argmin())
        owners[rng.choice(np.flatnonzero(owners == largest))] = smallest
        counts[[largest, smallest]] += (-1, 1)
        moved += 1
    return moved


def _share(pool: Pool, samples: NDArray[np.int64], group: int, sensitive: float, rng: np.random.Generator) -> Share:
    x, y = _turn(pool, pool.x[samples], group), pool.y[samples]
    is_test = _marked(y, round(TEST_SHARE * len(y)), rng)
    x_rest, y_rest = x[~is_test], y[~is_test]
    is_val = _marked(y_rest, n_validation(len(y_rest)), rng)
    y_train = y_rest[~is_val]
    return Share(
        x_train=x_rest[~is_val],
        y_train=y_train,
        sensitive=_marked(y_train, round(sensitive * len(y_train)), rng),
        x_val=x_rest[is_val],
        y_val=y_rest[is_val],
        x_test=x[is_test],
        y_test=y[is_test],
        group=group,
    )


def _marked(y: NDArray[np.int64], n_marked: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    marks = np.zeros(len(y), dtype=np.bool_)
    marks[spread(y, n_marked, rng)] = True
    return marks


def _turn(pool: Pool, x: NDArray[Any], quarters: int) -> NDArray[Any]:
    """Turn images by 90 degrees, counter-clockwise, so many times."""
    if quarters == 0:
        return x
    channels_first = x.ndim == 4 and x.shape[1:] == pool.spec.input_shape
    height, width = (2, 3) if channels_first else (1, 2)
    if x.ndim not in (3, 4) or len(pool.spec.input_shape) != 3 or x.shape[height] != x.shape[width]:
        raise ConfigError(
            f"samples of shape {x.shape[1:]} are no square images: groups cannot turn them; use dirichlet"
        )
    return np.ascontiguousarray(np.rot90(x, quarters, axes=(height, width)))


def _write_folder(
    folder: Path, x: NDArray[Any], names: list[str], split: NDArray[np.int64], marks: NDArray[np.bool_]
) -> None:
    from PIL import Image

    paths = [f"{name}/{number:05}.png" for number, name in enumerate(names)]
    for path, image in zip(paths, x, strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / path)
    parts = {"val": arrays.VALIDATION, "test": arrays.TEST}
    lists = {part: [paths[i] for i in np.flatnonzero(split == number)] for part, number in parts.items()}
    (folder / images.SPLIT_FILE).write_text(json.dumps(lists), encoding="utf-8")
    marked = [paths[i] for i in np.flatnonzero(marks)]
    (folder / images.SENSITIVE_FILE).write_text("".join(f"{path}\n" for path in marked), encoding="utf-8")
