"""Partition a data set over simulated devices, and split each device's share into training, validation and test.

`fedge.tasks.partitioners` decides who gets which samples. Each device's test samples follow its own distribution.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fedge.data import preprocessing
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.errors import ConfigError
from fedge.models.weights import Adapt, ModelName, Weights, with_network
from fedge.settings import CODE, AtLeastOne
from fedge.system.help import Heading
from fedge.tasks import partitioners
from fedge.tasks.data import DeviceData
from fedge.tasks.partitioners import FEWEST, FEWEST_BLOCKS, MIN_SAMPLES, Ints, Milder, Sizes, Units, units_of
from fedge.tasks.pool import Pool, pool
from fedge.tasks.sampling import n_validation, spread

TEST_SHARE: Final = 0.25  # scmoe_pfl.md section 3
_APART, _CODES = 1, 2  # separate random streams

How = Literal["dirichlet", "groups", "shards", "natural", "iid", "generated"]
Groups = Literal["rotation", "labels", "codes"]
"""How planted groups differ."""
Marks = Literal["samples", "classes"]
"""The whole of which `sensitive` is a share."""


Rule = Annotated[
    How,
    Heading.PARTITION,
    "A partition by dirichlet has label skew, by groups planted groups, by shards few classes each, by natural a "
    "person each, by iid no skew. With generated there are as many devices as you like, each with samples turned, "
    "shifted and noised by its number.",
]
NGroups = Annotated[int, Meta(ge=1), Heading.PARTITION, "There are this many planted groups."]
Sensitive = Annotated[
    float, Meta(ge=0, le=1), Heading.PARTITION, "No upload may learn from this share of the training samples."
]


class Partitioning(Struct, frozen=True, kw_only=True):
    """Samples, and their partition over devices."""

    task: Annotated[
        str,
        CODE,
        Heading.TASK,
        "The task is digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, a table's schema "
        "(.toml) or package.module:Class.",
    ] = "digits"
    data: Annotated[Path | None, Heading.TASK, "This folder or file holds the samples; digits need none."] = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    devices: Annotated[
        AtLeastOne | None,
        Heading.DEVICES,
        "There are this many devices; by default 20, or with natural as many as there are people.",
    ] = None
    partition: Rule = "dirichlet"
    alpha: Annotated[
        float, Meta(gt=0), Heading.PARTITION, "This is Dirichlet's parameter of the label skew; smaller is stronger."
    ] = 1.0
    groups: Annotated[
        Groups,
        Heading.PARTITION,
        "Groups have cameras turned by 90 degrees each (rotation), classes of their own (labels), or codes. With "
        "codes, each device of the first group names the classes in an order of its own.",
    ] = "rotation"
    n_groups: NGroups = 4
    shards: Annotated[int, Meta(ge=1), Heading.PARTITION, "Each device gets this many shards of sorted labels."] = 2
    iid_share: Annotated[
        float,
        Meta(ge=0, le=1),
        Heading.PARTITION,
        "This share of the samples is spread evenly before, for shards and dirichlet.",
    ] = 0.0
    sizes: Annotated[
        Sizes, Heading.PARTITION, "The quantities of samples have this skew, for dirichlet, groups and iid."
    ] = "equal"
    size_spread: Annotated[
        float, Meta(ge=0, le=5), Heading.PARTITION, "This is the sigma of log-normal, or the exponent of power-law."
    ] = 1.0
    min_samples: Annotated[
        int,
        Meta(ge=FEWEST),
        Heading.PARTITION,
        "Each device has at least this many samples; to reach it, the partition is redrawn, then samples are moved.",
    ] = MIN_SAMPLES
    samples: Annotated[AtLeastOne | None, Heading.PARTITION, "This many samples are used; by default all are."] = None
    sensitive: Sensitive = 0.0
    marks: Annotated[
        Marks,
        Heading.PARTITION,
        "As many samples of each class are sensitive, or with classes all samples of so many of a device's classes.",
    ] = "samples"


_ONLY_FOR: Final = {
    "alpha": ("dirichlet", "groups", "generated"),
    "groups": ("groups",),
    "n_groups": ("groups", "generated"),
    "shards": ("shards",),
    "iid_share": ("shards", "dirichlet"),
}
"""Settings that have an effect only with some partitions."""


def check_partitioning(given: Partitioning) -> None:
    """Refuse settings without effect, which would mislead.

    Raises:
        ConfigError: a setting has no effect with this partition or task; the text says which.
    """
    defaults = type(given)()
    for name, partitions in _ONLY_FOR.items():
        if given.partition not in partitions and getattr(given, name) != getattr(defaults, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} changes nothing with --partition {given.partition}: it is for "
                f"{' and '.join(partitions)}"
            )
    asked = (given.partition, given.n_groups) != (defaults.partition, defaults.n_groups)
    if asked and given.partition == "groups" and given.n_groups > (given.devices or given.n_groups):
        raise ConfigError(f"{given.devices} devices cannot be in {given.n_groups} groups: use --n-groups")
    if given.sizes == "equal" and given.size_spread != defaults.size_spread:
        raise ConfigError("--size-spread changes nothing with equal sizes: it is for --sizes log-normal and power-law")
    if given.marks != defaults.marks and not given.sensitive:
        raise ConfigError("--marks changes nothing without --sensitive, the share that is marked")
    if given.task == "digits" and given.data is not None:
        raise ConfigError("the digits come with fedge: leave out --data, or name another --task")


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


def samples_of(how: Partitioning, seed: int, apart: float, limit: int | None = None) -> tuple[Pool, Pool]:
    """The samples of a task with the requested network: those to partition, and a share set apart.

    The share set apart is turned like the groups' cameras. `limit`: the default number of samples.

    Raises:
        ConfigError: there are no such data.
    """
    found = pool(how.task, how.data, seed=seed, limit=how.samples or limit)
    found = dataclasses.replace(found, spec=with_network(found.spec, how.model, how.weights, how.adapt))
    turned = how.partition == "groups" and how.groups == "rotation"
    return set_apart(found, apart, seed=seed, turns=how.n_groups if turned else 1)


def partition(pool: Pool, n_devices: int, how: Partitioning, *, seed: int, milder: Milder | None = None) -> list[Share]:
    """Partition samples over devices; equal arguments give equal shares.

    "dirichlet": `iid_share` of each class are dealt evenly, and the devices' shares of the rest are drawn from
    Dirichlet(alpha). "groups": device i is in group i mod n_groups, and shares within a group follow Dirichlet(alpha).
    Every group gets part of each class, with its
    images turned by 90 degrees x group ("rotation"), or only its own classes ("labels"); with "codes", each device of
    the first group permutes the class labels, so that devices contradict each other. "shards": samples sorted by label,
    `shards` pieces per device, except for `iid_share` of the samples. "natural": one device per person. "iid": no skew.
    Each device has at least `min_samples`: draws are repeated, then samples are moved, and the log says so.

    Args:
        pool: the samples; rotation needs square images, "natural" needs people.
        n_devices: N >= 1.
        how: see above. Marks are equal for all classes of a device (scmoe_pfl.md section 3, way 4), or all of so many
            classes (way 2). Groups are 1 to 4 turns, 1 to C groups of classes, or 1 to N codes: 1 for all devices, 5
            for every fifth. With fewer than 20 samples, most devices have one to three test samples.
        seed: of all draws.
        milder: records the number of draws and of moved samples.

    Raises:
        ConfigError: too few samples for so many devices, images that cannot be turned, no people, or settings that do
            not go together.
    """
    if how.partition == "generated":
        from fedge.tasks.generated import Generated

        return list(Generated(pool, n_devices, how, seed=seed).values())
    most = {"rotation": 4, "labels": pool.spec.n_classes, "codes": n_devices}[how.groups]
    n_groups = how.n_groups if how.partition == "groups" else 1
    if not 1 <= n_groups <= most:
        raise ConfigError(f"{n_devices} devices can be in 1 to {most} groups by {how.groups}, not in {n_groups}")
    if how.sizes != "equal" and how.partition in {"shards", "natural"}:
        raise ConfigError(
            f"the sizes of {how.partition} devices are given: quantity skew is for dirichlet, groups and iid"
        )
    if len(pool.y) < how.min_samples * n_devices:
        raise ConfigError(f"{len(pool.y)} samples are too few for {n_devices} devices: each needs {how.min_samples}")
    rng = np.random.default_rng(seed)
    units = units_of(pool.y, pool.block)
    group_of = np.arange(n_devices) % n_groups
    if how.partition == "natural":
        if pool.user is None:
            raise ConfigError(f"the samples of {pool.spec.name} do not say which person they come from")
        owners = partitioners.by_user(pool.user, n_devices, rng, least=how.min_samples)
        _require_blocks(units, owners, n_devices)
    else:
        weights = partitioners.relative_sizes(n_devices, how.sizes, how.size_spread, rng)
        own_classes = False
        if how.partition == "shards":
            owner_of_unit = partitioners.shards(units, n_devices, how.shards, how.iid_share, rng)
        elif how.partition == "iid":
            owner_of_unit = partitioners.evenly(units, weights, rng)
        else:
            portions = _portions(group_of, weights, pool.spec.n_classes, how.groups)
            own_classes = bool((portions == 0).any())
            least = how.min_samples
            owner_of_unit = partitioners.by_label(
                units, portions, group_of, weights, how.alpha, rng, milder, least=least, iid_share=how.iid_share
            )
        owner_of_unit = partitioners.filled_up(
            units, owner_of_unit, group_of, rng, milder, own_classes=own_classes, least=how.min_samples
        )
        owners = owner_of_unit[units.of_sample]
    turns = group_of if how.groups == "rotation" else np.zeros_like(group_of)
    shares = [
        made_of(pool.take(np.flatnonzero(owners == device)), int(group_of[device]), int(turns[device]), how, rng)
        for device in range(n_devices)
    ]
    if how.partition == "groups" and how.groups == "codes":
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
        x_train=preprocessing.apply(task, share.x_train),
        y_train=share.y_train,
        sensitive=share.sensitive,
        x_val=preprocessing.apply(task, share.x_val),
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


def made_of(own: Pool, group: int, turns: int, how: Partitioning, rng: np.random.Generator) -> Share:
    """The samples of one device, in three parts; blocks stay whole. `turns`: of its camera, by 90 degrees."""
    units = units_of(own.y, own.block)
    is_test = _marked(units, round(TEST_SHARE * len(units.y)), rng)
    test, rest = own.take(np.flatnonzero(is_test)), own.take(np.flatnonzero(~is_test))
    units = units_of(rest.y, rest.block)
    is_val = _marked(units, n_validation(len(units.y)), rng)
    validation, train = rest.take(np.flatnonzero(is_val)), rest.take(np.flatnonzero(~is_val))
    marked = _sensitive(train.y, how, rng)
    x_train, x_val, x_test = (_turn(own, part.x, turns) for part in (train, validation, test))
    return Share(
        x_train=x_train,
        y_train=train.y,
        sensitive=marked,
        x_val=x_val,
        y_val=validation.y,
        sensitive_val=(
            _sensitive(validation.y, how, rng.spawn(1)[0])  # a stream of its own: all else stays as it was
            if how.marks == "samples"
            else np.isin(validation.y, train.y[marked])
        ),
        x_test=x_test,
        y_test=test.y,
        group=group,
    )


def _sensitive(y: Ints, how: Partitioning, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Training samples (n,) of so many, evenly over the classes, or all of so many classes, drawn by lot."""
    if how.marks == "samples":
        return _marked(units_of(y, None), round(how.sensitive * len(y)), rng)
    classes = rng.permutation(np.unique(y))
    return np.isin(y, classes[: round(how.sensitive * len(classes))])


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
