"""The samples of a task, and how they are dealt out to devices by a demo, a simulation and `fedge sample`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from coordinator.simulation.settings import Dealing, Groups, Partition
from fedge.tasks import Pool, Share, partition, pool, set_apart
from fedge.tasks.generated import Generated
from fedge.tasks.partitioners import Milder
from fedge.weights import with_network

if TYPE_CHECKING:
    from fedge.tasks.partition import How


def samples_of(dealing: Dealing, seed: int, apart: float, limit: int | None = None) -> tuple[Pool, Pool]:
    """The samples of a task with the network that is asked for: those to be dealt out, and a share that is set apart.

    What is set apart is turned as the cameras of the groups see it. `limit`: unless the settings have one.

    Raises:
        ConfigError: there are no such data.
    """
    found = pool(dealing.task, dealing.data, seed=seed, limit=dealing.samples or limit)
    spec = with_network(found.spec, dealing.model, dealing.weights, dealing.adapt)
    found = dataclasses.replace(found, spec=spec)
    turned = dealing.partition is Partition.GROUPS and dealing.groups is Groups.ROTATION
    return set_apart(found, apart, seed=seed, turns=dealing.n_groups if turned else 1)


def generated(dealing: Dealing, samples: Pool, n_devices: int, seed: int) -> Generated:
    """Devices with samples of their own making.

    Raises:
        ConfigError: the samples are no images.
    """
    return Generated(
        samples,
        n_devices,
        n_samples=dealing.min_samples,
        alpha=dealing.alpha,
        n_groups=dealing.n_groups,
        sensitive=dealing.sensitive,
        marks=dealing.marks.value,
        seed=seed,
    )


def shares_of(dealing: Dealing, samples: Pool, n_devices: int, seed: int, milder: Milder | None = None) -> list[Share]:
    """The samples dealt out to devices.

    Raises:
        ConfigError: they cannot be dealt out as asked for.
    """
    if dealing.partition is Partition.GENERATED:
        return list(generated(dealing, samples, n_devices, seed).values())
    return partition(
        samples,
        n_devices,
        how=cast("How", dealing.partition.value),
        alpha=dealing.alpha,
        sensitive=dealing.sensitive,
        seed=seed,
        n_groups=dealing.n_groups,
        groups=dealing.groups.value,
        shards=dealing.shards,
        iid_share=dealing.iid_share,
        sizes=dealing.sizes.value,
        size_spread=dealing.size_spread,
        marks=dealing.marks.value,
        min_samples=dealing.min_samples,
        milder=milder,
    )
