"""Partition a data set over simulated devices, and split each device's share into training, validation and test.

`fedge.tasks.partitioners` decides who gets which samples. Each device's test samples follow its own distribution.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedge import preprocess
from fedge.errors import ConfigError
from fedge.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.tasks import partitioners
from fedge.tasks.data import DeviceData
from fedge.tasks.partitioners import FEWEST, FEWEST_BLOCKS, MIN_SAMPLES, Ints, Milder, Sizes, Units, units_of
from fedge.tasks.pool import Pool
from fedge.tasks.sampling import n_validation, spread

TEST_SHARE: Final = 0.25  # scmoe_pfl.md section 3
MOST_SPREAD: Final = 5.0  # beyond it one device has everything, and float64 soon overflows
_APART, _CODES = 1, 2  # separate random streams

How = Literal["groups", "dirichlet", "shards", "natural", "iid"]
Groups = Literal["rotation", "labels", "codes"]
Marks = Literal["samples", "classes"]


@dataclass(frozen=True, slots=True)
class Share:
    """One simulated device's raw samples (n, ...), labels (n,), marks and group."""

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    sensitive: NDArray[np.bool_]
    x_val: NDArray[Any]
    y_val: NDArray[np.int64]
    sensitive_val: NDArray[np.bool_]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    group: int


def partition(
    pool: Pool,
    n_devices: int,
    *,
    how: How,
    alpha: float,
    sensitive: float,
    seed: int,
    n_groups: int = 3,
    groups: Groups = "rotation",
    shards: int = 2,
    iid_share: float = 0.0,
    sizes: Sizes = "equal",
    size_spread: float = 1.0,
    marks: Marks = "samples",
    min_samples: int = MIN_SAMPLES,
    milder: Milder | None = None,
) -> list[Share]:
    """Partition samples over devices; equal arguments give equal shares.

    "dirichlet": for each class, the devices' shares are drawn from Dirichlet(alpha). "groups": device i is in group i
    mod n_groups, and shares within a group follow Dirichlet(alpha). Every group gets part of each class, with its
    images turned by 90 degrees x group ("rotation"), or only its own classes ("labels"); with "codes", each device of
    the first group permutes the class labels, so that devices contradict each other. "shards": samples sorted by label,
    `shards` pieces per device, except for `iid_share` of the samples. "natural": one device per person. "iid": no skew.
    Each device has at least `min_samples`: draws are repeated, then samples are moved, and the log says so.

    Args:
        pool: the samples; rotation needs square images, "natural" needs people.
        n_devices: N >= 1.
        how: see above.
        alpha: > 0; the smaller, the more the devices' classes differ.
        sensitive: share of each device's training samples that is marked, in [0, 1], equal for all its classes; with
            `marks` "classes", the share of its classes whose training samples are all marked.
        seed: of all draws.
        n_groups: 1 to 4 turns, 1 to C groups of classes, or 1 to N codes: 1 for all devices, 5 for every fifth.
        groups: see above.
        shards: >= 1.
        iid_share: in [0, 1].
        sizes: quantity skew (`partitioners.relative_sizes`), for dirichlet, groups and iid.
        size_spread: its strength, in [0, 5].
        marks: what `sensitive` is a share of (scmoe_pfl.md section 3, ways 4 and 2).
        min_samples: per device, >= 4; below 20, most devices have one to three test samples.
        milder: records the number of draws and of moved samples.

    Raises:
        ConfigError: too few samples for so many devices, images that cannot be turned, no people, or an argument out of
            range.
    """
    if n_devices < 1 or not alpha > 0 or not 0 <= sensitive <= 1 or min_samples < FEWEST:
        raise ConfigError(
            f"a partition needs devices >= 1, alpha > 0, sensitive in [0, 1] and {FEWEST} samples a device or more"
        )
    most = {"rotation": 4, "labels": pool.spec.n_classes, "codes": n_devices}[groups]
    if how == "groups" and not 1 <= n_groups <= most:
        raise ConfigError(f"{n_devices} devices can be in 1 to {most} groups by {groups}, not in {n_groups}")
    if shards < 1 or not 0 <= iid_share <= 1 or not 0 <= size_spread <= MOST_SPREAD:
        raise ConfigError("a partition needs shards >= 1, an equal share in [0, 1], a spread of sizes in [0, 5]")
    if sizes != "equal" and how in {"shards", "natural"}:
        raise ConfigError(f"the sizes of {how} devices are given: quantity skew is for dirichlet, groups and iid")
    if len(pool.y) < min_samples * n_devices:
        raise ConfigError(f"{len(pool.y)} samples are too few for {n_devices} devices: each needs {min_samples}")
    rng = np.random.default_rng(seed)
    units = units_of(pool.y, pool.block)
    group_of = np.arange(n_devices) % n_groups if how == "groups" else np.zeros(n_devices, np.int64)
    if how == "natural":
        if pool.user is None:
            raise ConfigError(f"the samples of {pool.spec.name} do not say which person they come from")
        owners = partitioners.by_user(pool.user, n_devices, rng, least=min_samples)
        _require_blocks(units, owners, n_devices)
    else:
        weights = partitioners.relative_sizes(n_devices, sizes, size_spread, rng)
        own_classes = False
        if how == "shards":
            dealt = partitioners.shards(units, n_devices, shards, iid_share, rng)
        elif how == "iid":
            dealt = partitioners.evenly(units, weights, rng)
        else:
            portions = _portions(group_of, weights, pool.spec.n_classes, groups)
            own_classes = bool((portions == 0).any())
            dealt = partitioners.by_label(units, portions, group_of, weights, alpha, rng, milder, least=min_samples)
        dealt = partitioners.filled_up(units, dealt, group_of, rng, milder, own_classes=own_classes, least=min_samples)
        owners = dealt[units.of_sample]
    turns = group_of if groups == "rotation" else np.zeros_like(group_of)
    dealt_out = [pool.take(np.flatnonzero(owners == device)) for device in range(n_devices)]
    shares = [
        made_of(own, int(group), int(turn), sensitive, marks, rng)
        for own, group, turn in zip(dealt_out, group_of, turns, strict=True)
    ]
    if how == "groups" and groups == "codes":
        codes = np.random.default_rng((seed, _CODES))
        return [_renamed(s, codes.permutation(pool.spec.n_classes)) if s.group == 0 else s for s in shares]
    return shares


def set_apart(pool: Pool, share: float, *, seed: int, turns: int = 1) -> tuple[Pool, Pool]:
    """Set a share of all samples apart, stratified by class, before partitioning: (the rest, the share).

    It follows the distribution of all devices together, like the global test set and FedCoE's server data.

    Args:
        pool: the samples; blocks stay whole.
        share: in [0, 1).
        seed: of the draw.
        turns: sample j of the share is turned by 90 degrees x (j mod turns), to cover the rotations of that many
            groups.

    Raises:
        ConfigError: `share` is out of range, or the images cannot be turned.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"the share of the samples that is set apart must be in [0, 1), not {share}")
    units = units_of(pool.y, pool.block)
    apart = _marked(units, round(share * len(units.y)), np.random.default_rng((seed, _APART)))
    kept, taken = pool.take(np.flatnonzero(~apart)), pool.take(np.flatnonzero(apart))
    if turns == 1 or not len(taken.y):
        return kept, taken
    x = taken.x.copy()
    for turn in range(turns):
        x[turn::turns] = _turn(pool, taken.x[turn::turns], turn)
    return kept, dataclasses.replace(taken, x=x)


def share_data(task: TaskSpec, share: Share) -> DeviceData:
    """A share as its device's worker sees it, without writing a file."""
    return DeviceData(
        x_train=preprocess.apply(task, share.x_train),
        y_train=share.y_train,
        sensitive=share.sensitive,
        x_val=preprocess.apply(task, share.x_val),
        y_val=share.y_val,
        sensitive_val=share.sensitive_val,
    )


def write_share(share: Share, path: Path) -> None:
    """Write a share as a real device's data, an .npz file."""
    x = np.concatenate([share.x_train, share.x_val, share.x_test])
    y = np.concatenate([share.y_train, share.y_val, share.y_test])
    parts = (TRAIN, VALIDATION, TEST)
    split = np.repeat(np.array(parts), [len(share.y_train), len(share.y_val), len(share.y_test)])
    marks = np.concatenate([share.sensitive, share.sensitive_val, np.zeros(len(share.y_test), np.bool_)])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y, split=split, sensitive=marks)


def _require_blocks(units: Units, owners: Ints, n_devices: int) -> None:
    """`owners`: device of each sample (n,)."""
    fewest = min(len(np.unique(units.of_sample[owners == device])) for device in range(n_devices))
    if fewest < FEWEST_BLOCKS:
        raise ConfigError(
            f"a person's samples are in {fewest} blocks, a device needs {FEWEST_BLOCKS}: use more samples"
        )


def _portions(group_of: Ints, weights: NDArray[np.float64], n_classes: int, groups: Groups) -> NDArray[np.float64]:
    """Part of each class that each group gets, (G, C): in proportion to its devices; or its own classes, all of them.

    Ten classes in four groups: {0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9} (fedge.md 15.1).
    """
    n_groups = int(group_of.max()) + 1
    if groups != "labels" or n_groups == 1:
        shares: NDArray[np.float64] = np.bincount(group_of, weights=weights) / weights.sum()
        return np.repeat(shares[:, np.newaxis], n_classes, axis=1)
    portions = np.zeros((n_groups, n_classes))
    for group, classes in enumerate(np.array_split(np.arange(n_classes), n_groups)):
        portions[group, classes] = 1
    return portions


def made_of(own: Pool, group: int, turns: int, sensitive: float, marks: Marks, rng: np.random.Generator) -> Share:
    """The samples of one device, in three parts; blocks stay whole. `turns`: of its camera, by 90 degrees."""
    units = units_of(own.y, own.block)
    is_test = _marked(units, round(TEST_SHARE * len(units.y)), rng)
    test, rest = own.take(np.flatnonzero(is_test)), own.take(np.flatnonzero(~is_test))
    units = units_of(rest.y, rest.block)
    is_val = _marked(units, n_validation(len(units.y)), rng)
    validation, train = rest.take(np.flatnonzero(is_val)), rest.take(np.flatnonzero(~is_val))
    marked = _sensitive(train.y, sensitive, marks, rng)
    x_train, x_val, x_test = (_turn(own, part.x, turns) for part in (train, validation, test))
    return Share(
        x_train=x_train,
        y_train=train.y,
        sensitive=marked,
        x_val=x_val,
        y_val=validation.y,
        sensitive_val=(
            _sensitive(validation.y, sensitive, marks, rng.spawn(1)[0])  # a stream of its own: all else stays as it was
            if marks == "samples"
            else np.isin(validation.y, train.y[marked])
        ),
        x_test=x_test,
        y_test=test.y,
        group=group,
    )


def _sensitive(y: Ints, share: float, marks: Marks, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Training samples (n,) of so many, evenly over the classes, or all of so many classes, drawn by lot."""
    if marks == "samples":
        return _marked(units_of(y, None), round(share * len(y)), rng)
    classes = rng.permutation(np.unique(y))
    return np.isin(y, classes[: round(share * len(classes))])


def _renamed(share: Share, code: Ints) -> Share:
    """The device calls class c code[c], (C,), in all of its parts."""
    return dataclasses.replace(share, y_train=code[share.y_train], y_val=code[share.y_val], y_test=code[share.y_test])


def _marked(units: Units, n_marked: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Samples (n,) of so many units, drawn evenly over the classes."""
    marks = np.zeros(len(units.y), dtype=np.bool_)
    marks[spread(units.y, n_marked, rng)] = True
    return marks[units.of_sample]


def _turn(pool: Pool, x: NDArray[Any], quarters: int) -> NDArray[Any]:
    """Turn images by 90 degrees, counter-clockwise, so many times."""
    if quarters == 0:
        return x
    channels_first = x.ndim == 4 and x.shape[1:] == pool.spec.input_shape
    height, width = (2, 3) if channels_first else (1, 2)
    if x.ndim not in (3, 4) or len(pool.spec.input_shape) != 3 or x.shape[height] != x.shape[width]:
        raise ConfigError(
            f"samples of shape {x.shape[1:]} are not square images: groups cannot turn them; use dirichlet"
        )
    return np.ascontiguousarray(np.rot90(x, quarters, axes=(height, width)))
