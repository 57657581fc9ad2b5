"""Devices' shares of a data set: the partition's settings, and each share's training, validation and test part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fedge.data import preprocessing
from fedge.data.augmentation import Augment
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.errors import ConfigError
from fedge.models.weights import Adapt, ModelName, Weights
from fedge.settings import CODE, AtLeastOne
from fedge.system.text import Heading
from fedge.tasks.data import DeviceData
from fedge.tasks.partitioners import FEWEST, MIN_SAMPLES, Ints, Sizes, Units, make_units
from fedge.tasks.pool import Pool
from fedge.tasks.problems import ProblemName
from fedge.tasks.sampling import count_validation, draw_stratified

TEST_SHARE: Final = 0.25  # scmoe_pfl.md section 3


How = Literal["dirichlet", "groups", "shards", "natural", "iid", "generated"]


Groups = Literal["rotation", "labels", "codes"]
"""The ways in which planted groups differ."""


Marks = Literal["samples", "classes"]
"""Whether `sensitive` is a share of the samples or of the classes."""


class Partitioning(Struct, frozen=True, kw_only=True):
    """Settings that choose the samples and their partition over devices."""

    task: Annotated[
        str,
        CODE,
        Heading.TASK,
        "The task is digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, a table's schema "
        "(.toml) or package.module:Class.",
    ] = "digits"
    data: Annotated[Path | None, Heading.TASK, "This folder or file holds the samples; digits need none."] = None
    problem: ProblemName = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    augment: Augment = None
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
"""Settings that have an effect only with some partitions, which are listed."""


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
    """One simulated device's raw samples (n, ...), targets (n, ...), marks and group."""

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    sensitive: NDArray[np.bool_]
    x_val: NDArray[Any]
    y_val: NDArray[Any]
    sensitive_val: NDArray[np.bool_]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    group: int


def make_device_data(task: TaskSpec, share: Share) -> DeviceData:
    """Return a share as the device's worker would read it from a file, but without writing one."""
    return DeviceData(
        x_train=preprocessing.preprocess(task, share.x_train),
        y_train=convert_targets(task, share.y_train),
        sensitive=share.sensitive,
        x_val=preprocessing.preprocess(task, share.x_val),
        y_val=convert_targets(task, share.y_val),
        sensitive_val=share.sensitive_val,
        converted=True,
    )


def convert_targets(task: TaskSpec, y: NDArray[Any]) -> NDArray[Any]:
    """Return targets of simulated samples in the type that training takes."""
    return task.problem.convert_targets(y, len(y), task.input_shape, "y")


def write_share(share: Share, path: Path) -> None:
    """Write a share as an .npz file in the format of a real device's data."""
    x = np.concatenate([share.x_train, share.x_val, share.x_test])
    y = np.concatenate([share.y_train, share.y_val, share.y_test])
    parts = (TRAIN, VALIDATION, TEST)
    split = np.repeat(np.array(parts), [len(share.y_train), len(share.y_val), len(share.y_test)])
    marks = np.concatenate([share.sensitive, share.sensitive_val, np.zeros(len(share.y_test), np.bool_)])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y, split=split, sensitive=marks)


def make_share(own: Pool, group: int, turns: int, how: Partitioning, rng: np.random.Generator) -> Share:
    """Split one device's samples into three parts; blocks stay whole. `turns` counts camera turns by 90 degrees.

    Raises:
        ConfigError: the user's own test samples leave the device without any, or with nothing else.
    """
    is_test = _find_tests(own, rng)
    test, rest = own.select(np.flatnonzero(is_test)), own.select(np.flatnonzero(~is_test))
    units = make_units(rest.groups, rest.block)
    is_val = draw_marks(units, count_validation(len(units.y)), rng)
    validation, train = rest.select(np.flatnonzero(is_val)), rest.select(np.flatnonzero(~is_val))
    marked = _draw_sensitive(train.groups, how, rng)
    x_train, x_val, x_test = (rotate_images(own, part.x, turns) for part in (train, validation, test))
    y_train, y_val, y_test = (own.spec.problem.rotate_targets(part.y, turns) for part in (train, validation, test))
    return Share(
        x_train=x_train,
        y_train=y_train,
        sensitive=marked,
        x_val=x_val,
        y_val=y_val,
        sensitive_val=(
            _draw_sensitive(validation.groups, how, rng.spawn(1)[0])  # of its own, so that no other draw changes
            if how.marks == "samples"
            else np.isin(validation.groups, train.groups[marked])
        ),
        x_test=x_test,
        y_test=y_test,
        group=group,
    )


def _find_tests(own: Pool, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mark the test samples of a device, (n,): those of the user, or a quarter of all blocks."""
    if own.is_test is None:
        units = make_units(own.groups, own.block)
        return draw_marks(units, round(TEST_SHARE * len(units.y)), rng)
    n_test = int(own.is_test.sum())
    if not n_test or n_test > len(own.y) - 2:
        raise ConfigError(
            f"a device would get {n_test} of the test samples (x_test), and {len(own.y) - n_test} others: use fewer "
            "devices, more test samples, or a larger --min-samples"
        )
    return own.is_test


def _draw_sensitive(y: Ints, how: Partitioning, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mark training samples (n,), drawn evenly over the classes, or all samples of some classes."""
    if how.marks == "samples":
        return draw_marks(make_units(y, None), round(how.sensitive * len(y)), rng)
    classes = rng.permutation(np.unique(y))
    return np.isin(y, classes[: round(how.sensitive * len(classes))])


def rename_classes(share: Share, code: Ints) -> Share:
    """Return the share with class c renamed to code[c] in all of its parts; `code` is (C,)."""
    return dataclasses.replace(share, y_train=code[share.y_train], y_val=code[share.y_val], y_test=code[share.y_test])


def draw_marks(units: Units, n_marked: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mark the samples (n,) of `n_marked` units, drawn evenly over the classes."""
    marks = np.zeros(len(units.y), dtype=np.bool_)
    marks[draw_stratified(units.y, n_marked, rng)] = True
    return marks[units.of_sample]


def rotate_images(pool: Pool, x: NDArray[Any], quarters: int) -> NDArray[Any]:
    """Turn images counter-clockwise by `quarters` times 90 degrees."""
    if quarters == 0:
        return x
    channels_first = x.ndim == 4 and x.shape[1:] == pool.spec.input_shape
    height, width = (2, 3) if channels_first else (1, 2)
    if x.ndim not in (3, 4) or len(pool.spec.input_shape) != 3 or x.shape[height] != x.shape[width]:
        raise ConfigError(
            f"samples of shape {x.shape[1:]} are not square images: groups cannot turn them; use dirichlet"
        )
    return np.ascontiguousarray(np.rot90(x, quarters, axes=(height, width)))


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
