"""Partition a data set over simulated devices, and split each device's share into training, validation and test.

`fedge.tasks.partitioners` decides which device gets which samples. Each device's test samples follow its own
distribution.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.models.choice import with_network
from fedge.tasks import partitioners
from fedge.tasks.partitioners import FEWEST_BLOCKS, Ints, Milder, Units, make_units
from fedge.tasks.pool import Pool, load_pool
from fedge.tasks.problems import require_classes
from fedge.tasks.shares import Groups, Partitioning, Share, draw_marks, make_share, rename_classes, rotate_images

_APART, _CODES = 1, 2  # separate random streams


def load_samples(
    how: Partitioning, seed: int, apart: float, limit: int | None = None, *, tests: bool = False
) -> tuple[Pool, Pool]:
    """Load the samples of a task with this network; return those to partition, and a share set apart.

    The share set apart is turned like the groups' cameras. `limit` is the default number of samples. `tests`: if the
    user has given test samples, whether the share is one of these, and not of all others.

    Raises:
        ConfigError: there are no such data.
    """
    found = load_pool(how.task, how.data, problem=how.problem, seed=seed, limit=how.samples or limit)
    spec = with_network(found.spec, how.model, how.weights, how.adapt, how.augment)
    found = dataclasses.replace(found, spec=spec)
    of = None if found.is_test is None else found.is_test == tests
    return set_apart(found, apart, seed=seed, turns=count_turns(how), of=of)


def count_turns(how: Partitioning) -> int:
    """Return in how many directions the groups' cameras are turned."""
    return how.n_groups if how.partition == "groups" and how.groups == "rotation" else 1


def partition_pool(
    pool: Pool, n_devices: int, how: Partitioning, *, seed: int, milder: Milder | None = None
) -> list[Share]:
    """Partition samples over devices; equal arguments give equal shares.

    - "dirichlet" deals `iid_share` of each class evenly, and draws the devices' shares of the rest from
      Dirichlet(alpha).
    - "groups" puts device i into group i mod n_groups; shares within a group follow Dirichlet(alpha). With "rotation",
      every group gets a part of each class, with images turned by 90 degrees x group. With "labels", a group gets only
      its own classes. With "codes", each device of the first group permutes the class labels, so that devices
      contradict each other.
    - "shards" sorts the samples by label and gives each device `shards` pieces, except for `iid_share` of the samples.
    - "natural" gives each device the samples of one person.
    - "iid" has no skew.

    Each device has at least `min_samples`; if need be, draws are repeated, then samples are moved, and the log says so.

    Args:
        pool: the samples; rotation needs square images, "natural" needs people.
        n_devices: N >= 1.
        how: see above. Marks cover the same share of each class of a device (scmoe_pfl.md section 3, way 4), or all
            samples of so many classes (way 2). There can be 1 to 4 turns, 1 to C groups of classes, or 1 to N codes (1
            for all devices, 5 for every fifth). With fewer than 20 samples, most devices have one to three test
            samples.
        seed: seed of all draws.
        milder: records the number of draws and of moved samples.

    Raises:
        ConfigError: there are too few samples for so many devices, the images cannot be turned, the people are unknown,
            or settings contradict one another.
    """
    if how.partition == "generated":
        from fedge.tasks.generated import Generated

        return list(Generated(pool, n_devices, how, seed=seed).values())
    if how.partition == "groups" and how.groups == "codes":
        require_classes(pool.spec, "--groups codes")
    most = {"rotation": 4, "labels": pool.n_groups, "codes": n_devices}[how.groups]
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
    units = make_units(pool.groups, pool.block)
    group_of = np.arange(n_devices) % n_groups
    if how.partition == "natural":
        if pool.user is None:
            raise ConfigError(f"the samples of {pool.spec.name} do not say which person they come from")
        owners = partitioners.partition_by_user(pool.user, n_devices, rng, least=how.min_samples)
        _require_blocks(units, owners, n_devices)
    else:
        weights = partitioners.draw_relative_sizes(n_devices, how.sizes, how.size_spread, rng)
        own_classes = False
        if how.partition == "shards":
            owner_of_unit = partitioners.partition_by_shards(units, n_devices, how.shards, how.iid_share, rng)
        elif how.partition == "iid":
            owner_of_unit = partitioners.partition_evenly(units, weights, rng)
        else:
            portions = _compute_portions(group_of, weights, pool.n_groups, how.groups)
            own_classes = bool((portions == 0).any())
            least = how.min_samples
            owner_of_unit = partitioners.partition_by_label(
                units, portions, group_of, weights, how.alpha, rng, milder, least=least, iid_share=how.iid_share
            )
        owner_of_unit = partitioners.fill_up(
            units, owner_of_unit, group_of, rng, milder, own_classes=own_classes, least=how.min_samples
        )
        owners = owner_of_unit[units.of_sample]
    turns = group_of if how.groups == "rotation" else np.zeros_like(group_of)
    shares = [
        make_share(pool.select(np.flatnonzero(owners == device)), int(group_of[device]), int(turns[device]), how, rng)
        for device in range(n_devices)
    ]
    if how.partition == "groups" and how.groups == "codes":
        codes = np.random.default_rng((seed, _CODES))
        return [rename_classes(s, codes.permutation(pool.spec.n_classes)) if s.group == 0 else s for s in shares]
    return shares


def set_apart(
    pool: Pool, share: float, *, seed: int, turns: int = 1, of: NDArray[np.bool_] | None = None
) -> tuple[Pool, Pool]:
    """Set a share of all samples apart, stratified by class, before partitioning; return the rest and the share.

    The share follows the distribution of all devices together, like the global test set and FedCoE's server data.

    Args:
        pool: the samples; blocks stay whole.
        share: the share to set apart, in [0, 1).
        seed: seed of the draw.
        turns: sample j of the share is turned by 90 degrees x (j mod turns), to cover the rotations of that many
            groups.
        of: marks of the samples (n,) of which this is a share; None for all.

    Raises:
        ConfigError: `share` is out of range, or the images cannot be turned.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"the share of the samples that is set apart must be in [0, 1), not {share}")
    among = np.arange(len(pool.y)) if of is None else np.flatnonzero(of)
    units = make_units(pool.groups[among], None if pool.block is None else pool.block[among])
    apart = np.zeros(len(pool.y), np.bool_)
    apart[among] = draw_marks(units, round(share * len(units.y)), np.random.default_rng((seed, _APART)))
    kept, taken = pool.select(np.flatnonzero(~apart)), pool.select(np.flatnonzero(apart))
    if turns == 1 or not len(taken.y):
        return kept, taken
    x = taken.x.copy()
    y = taken.y.copy()
    for quarters in range(turns):
        x[quarters::turns] = rotate_images(pool, taken.x[quarters::turns], quarters)
        y[quarters::turns] = pool.spec.problem.rotate_targets(taken.y[quarters::turns], quarters)
    return kept, dataclasses.replace(taken, x=x, y=y)


def _require_blocks(units: Units, owners: Ints, n_devices: int) -> None:
    """Require enough blocks on each device; `owners` (n,) holds the device of each sample."""
    fewest = min(len(np.unique(units.of_sample[owners == device])) for device in range(n_devices))
    if fewest < FEWEST_BLOCKS:
        raise ConfigError(
            f"a person's samples are in {fewest} blocks, a device needs {FEWEST_BLOCKS}: use more samples"
        )


def _compute_portions(
    group_of: Ints, weights: NDArray[np.float64], n_classes: int, groups: Groups
) -> NDArray[np.float64]:
    """Return the part of each class that each group gets, (G, C): by its devices' weights, or all of its own classes.

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
