"""Partitioners, which assign samples to devices: label skew, shards, quantity skew, planted groups, people.

They assign *units*, which are single samples or blocks of overlapping samples (`Pool.block`). The functions take the
units' labels and sizes and return a device for each unit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError

MIN_SAMPLES: Final = 20
"""Default minimum of samples per device, enough for a training, a validation and a test part."""
FEWEST: Final = 4  # least samples per device: two to train on, one held out, one to test
FEWEST_BLOCKS: Final = 3  # least units per device, one for each of the three parts
_REDRAWS: Final = 100
_MILDER: Final = "so the devices differ less than requested; use fewer devices or more samples"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sizes = Literal["equal", "log-normal", "power-law"]

log = logging.getLogger("fedge.tasks")


@dataclass(frozen=True, slots=True)
class Units:
    """U units: their labels (U,), their sizes in samples (U,), and the unit of each of the n samples (n,)."""

    y: Ints
    size: Ints
    of_sample: Ints


def make_units(y: Ints, block: Ints | None) -> Units:
    """Make units from samples with labels (n,): each sample, or each block (n,), labelled by its majority."""
    if block is None:
        return Units(y, np.ones(len(y), np.int64), np.arange(len(y)))
    _, of_sample = np.unique(block, return_inverse=True)
    counts = np.zeros((int(of_sample.max(initial=-1)) + 1, int(y.max(initial=0)) + 1), np.int64)
    np.add.at(counts, (of_sample, y), 1)
    return Units(counts.argmax(axis=1), counts.sum(axis=1), of_sample)


def draw_relative_sizes(n_devices: int, how: Sizes, spread: float, rng: np.random.Generator) -> Floats:
    """Draw each device's relative share of the samples (quantity skew), (N,), mean 1.

    "log-normal" draws exp(spread z) with z standard normal; "power-law" gives rank^(-spread), Zipf's law.
    """
    if how == "equal":
        return np.ones(n_devices)
    if how == "log-normal":
        weights = np.exp(spread * rng.standard_normal(n_devices))
    else:
        weights = rng.permutation(np.arange(1, n_devices + 1) ** -spread)
    relative: Floats = weights / weights.mean()
    return relative


@dataclass(slots=True)
class Milder:
    """The changes that gave every device enough samples: draws of the partition, then samples moved."""

    draws: int = 1
    moved: int = 0


def partition_by_label(
    units: Units,
    portions: Floats,
    group_of: Ints,
    weights: Floats,
    alpha: float,
    rng: np.random.Generator,
    milder: Milder | None = None,
    *,
    least: int = MIN_SAMPLES,
    iid_share: float = 0.0,
) -> Ints:
    """Draw each device's share of a class from Dirichlet(alpha w) in its group (label skew).

    The share `iid_share` of each class is first dealt over the group in proportion to w. PM-MoE's S = 20 is 0.2, and
    its S = 0 is 0 (pm_moe.md section 13).

    Args:
        units: the units to assign.
        portions: (G, C), the part of each class that a group gets; columns sum to 1.
        group_of: (N,) the group of each device, 0..G-1.
        weights: (N,) relative sizes w; all 1 gives Dirichlet(alpha).
        alpha: > 0; the smaller, the more the devices' classes differ.
        rng: random numbers of the draw.
        milder: records how many draws the minimum sizes took.
        least: minimum number of samples per device.
        iid_share: in [0, 1].

    Returns:
        (U,) the device of each unit. A draw that leaves a device below `least` is repeated, up to 100 times, which
        changes the skew and is logged. The last draw may still be below; `fill_up` mends that.
    """

    def draw() -> Ints:
        owners = np.empty(len(units.y), dtype=np.int64)
        for label in np.unique(units.y):
            chosen = rng.permutation(np.flatnonzero(units.y == label))
            for group, part in enumerate(_cut(chosen, portions[:, label])):
                devices = np.flatnonzero(group_of == group)
                relative = weights[devices] / weights[devices].mean()
                n_even = round(iid_share * len(part))
                shares = rng.dirichlet(alpha * relative)
                for some, cut in ((part[:n_even], relative / len(devices)), (part[n_even:], shares)):
                    for device, own in zip(devices, _cut(some, cut), strict=True):
                        owners[own] = device
        return owners

    milder = milder or Milder()
    for number in range(1, _REDRAWS + 1):
        owners, milder.draws = draw(), number
        if (
            _count_samples(units, owners, len(group_of)).min() >= least
            and _count_units(owners, len(group_of)).min() >= FEWEST_BLOCKS
        ):
            if number > 1:
                log.warning("event=partition_redrawn draws=%d min_samples=%d %s", number, least, _MILDER)
            break
    return owners


def partition_evenly(units: Units, weights: Floats, rng: np.random.Generator) -> Ints:
    """Assign units at random, in proportion to the weights (N,), so that there is no label skew."""
    owners = np.empty(len(units.y), dtype=np.int64)
    for device, own in enumerate(_cut(rng.permutation(len(units.y)), weights / weights.sum())):
        owners[own] = device
    return owners


def partition_by_shards(
    units: Units, n_devices: int, per_device: int, iid_share: float, rng: np.random.Generator
) -> Ints:
    """Cut units, sorted by label, into equal shards, and give each device `per_device` of them (pathological skew).

    The share `iid_share` of the units, drawn at random, is first dealt evenly.

    Source: McMahan et al., AISTATS 2017, §3; with a share of equal data: Karimireddy et al., "SCAFFOLD", ICML
    2020, §7.

    Raises:
        ConfigError: there are more shards than units.
    """
    owners = np.empty(len(units.y), dtype=np.int64)
    order = rng.permutation(len(units.y))
    n_even = round(iid_share * len(order))
    for device, own in enumerate(np.array_split(order[:n_even], n_devices)):
        owners[own] = device
    rest = order[n_even:]
    if len(rest) and n_devices * per_device > len(rest):
        raise ConfigError(f"{len(rest)} samples or blocks cannot be cut into {n_devices} x {per_device} shards")
    in_order = rest[np.argsort(units.y[rest], kind="stable")]
    of_shard = rng.permutation(np.repeat(np.arange(n_devices), per_device))
    for device, own in zip(of_shard, np.array_split(in_order, len(of_shard)), strict=True):
        owners[own] = device
    return owners


def partition_by_user(user: Ints, n_devices: int, rng: np.random.Generator, *, least: int = MIN_SAMPLES) -> Ints:
    """Give each device all samples of one person (natural partition); return the device of each sample, -1 for none.

    Raises:
        ConfigError: there are too few people, or a person has fewer than `least` samples.
    """
    n_users = int(user.max()) + 1
    if n_devices > n_users:
        raise ConfigError(f"the samples come from {n_users} people, too few for {n_devices} devices of one person each")
    chosen = np.sort(rng.permutation(n_users)[:n_devices])
    counts = np.bincount(user, minlength=n_users)[chosen]
    if counts.min() < least:
        raise ConfigError(f"person {chosen[counts.argmin()]} has {counts.min()} samples, a device needs {least}")
    owners = np.full(n_users, -1, dtype=np.int64)
    owners[chosen] = np.arange(n_devices)
    return owners[user]


def fill_up(
    units: Units,
    owners: Ints,
    group_of: Ints,
    rng: np.random.Generator,
    milder: Milder | None = None,
    *,
    own_classes: bool = False,
    least: int = MIN_SAMPLES,
) -> Ints:
    """Move random units, one at a time, from the largest to the smallest device until each has `least` samples.

    Then move units from the device with most units to the one with fewest until each has three (blocks may be large).

    `group_of` (N,) holds the group of each device. Units stay in their group, unless the whole group is short and
    groups share classes. `milder` records how many samples moved.

    Raises:
        ConfigError: units are too large for moving to help, or a group has no samples.
    """
    owners, moved = owners.copy(), 0
    sizes = _count_samples(units, owners, len(group_of))
    too_few = ConfigError(f"{sizes.sum()} samples in {len(owners)} blocks are too few for {len(sizes)} devices")

    def find_giver(taker: int, amounts: Ints, need: int) -> int:
        """Return the device with the largest amount in the taker's group, or of all devices if the group is short."""
        group = group_of == group_of[taker]
        short = not own_classes and amounts[group].sum() < need * group.sum()
        return int(np.where(group | short, amounts, -1).argmax())

    while sizes.min() < least:
        smallest = int(sizes.argmin())
        largest = find_giver(smallest, sizes, least)
        if not sizes[largest]:
            raise ConfigError("a group gets no sample: use a smaller spread of sizes, or fewer groups")
        unit = rng.choice(np.flatnonzero(owners == largest))
        if sizes[largest] - units.size[unit] <= sizes[smallest]:
            raise too_few
        owners[unit] = smallest
        sizes[[largest, smallest]] += (-units.size[unit], units.size[unit])
        moved += int(units.size[unit])
    while (blocks := _count_units(owners, len(group_of))).min() < FEWEST_BLOCKS:
        taker = int(blocks.argmin())
        most = find_giver(taker, blocks, FEWEST_BLOCKS)
        spare = np.flatnonzero((owners == most) & (sizes[most] - units.size >= least))
        if blocks[most] <= FEWEST_BLOCKS or not len(spare):
            raise too_few
        unit = rng.choice(spare)
        owners[unit] = taker
        sizes[most] -= units.size[unit]
        moved += int(units.size[unit])
    if milder is not None:
        milder.moved = moved
    if moved:
        log.warning("event=partition_adjusted moved=%d of=%d min_samples=%d %s", moved, sizes.sum(), least, _MILDER)
    return owners


def _count_samples(units: Units, owners: Ints, n_devices: int) -> Ints:
    return np.bincount(owners, weights=units.size, minlength=n_devices).astype(np.int64)


def _count_units(owners: Ints, n_devices: int) -> Ints:
    return np.bincount(owners, minlength=n_devices)


def _cut(things: Ints, shares: Floats) -> list[Ints]:
    """Cut an array into consecutive parts in these proportions."""
    return np.split(things, np.rint(np.cumsum(shares)[:-1] * len(things)).astype(np.int64))
