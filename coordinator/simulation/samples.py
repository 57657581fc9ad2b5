"""The samples of a task, partitioned over devices for a demo, a simulation or `fedge sample`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from coordinator.simulation.settings import Groups, Partition, Partitioning
from fedge.tasks import Pool, Share, partition, pool, set_apart
from fedge.tasks.generated import Generated
from fedge.tasks.partitioners import Milder
from fedge.weights import with_network

if TYPE_CHECKING:
    from fedge.tasks.partition import How


def samples_of(partitioning: Partitioning, seed: int, apart: float, limit: int | None = None) -> tuple[Pool, Pool]:
    """The samples of a task with the requested network: those to partition, and a share set apart.

    The share set apart is turned like the groups' cameras. `limit`: the default number of samples.

    Raises:
        ConfigError: there are no such data.
    """
    found = pool(partitioning.task, partitioning.data, seed=seed, limit=partitioning.samples or limit)
    spec = with_network(found.spec, partitioning.model, partitioning.weights, partitioning.adapt)
    found = dataclasses.replace(found, spec=spec)
    turned = partitioning.partition is Partition.GROUPS and partitioning.groups is Groups.ROTATION
    return set_apart(found, apart, seed=seed, turns=partitioning.n_groups if turned else 1)


def generated(partitioning: Partitioning, samples: Pool, n_devices: int, seed: int) -> Generated:
    """Devices that generate their samples.

    Raises:
        ConfigError: the samples are no images.
    """
    return Generated(
        samples,
        n_devices,
        n_samples=partitioning.min_samples,
        alpha=partitioning.alpha,
        n_groups=partitioning.n_groups,
        sensitive=partitioning.sensitive,
        marks=partitioning.marks.value,
        seed=seed,
    )


def shares_of(
    partitioning: Partitioning, samples: Pool, n_devices: int, seed: int, milder: Milder | None = None
) -> list[Share]:
    """The samples, partitioned over devices.

    Raises:
        ConfigError: they cannot be partitioned as requested.
    """
    if partitioning.partition is Partition.GENERATED:
        return list(generated(partitioning, samples, n_devices, seed).values())
    return partition(
        samples,
        n_devices,
        how=cast("How", partitioning.partition.value),
        alpha=partitioning.alpha,
        sensitive=partitioning.sensitive,
        seed=seed,
        n_groups=partitioning.n_groups,
        groups=partitioning.groups.value,
        shards=partitioning.shards,
        iid_share=partitioning.iid_share,
        sizes=partitioning.sizes.value,
        size_spread=partitioning.size_spread,
        marks=partitioning.marks.value,
        min_samples=partitioning.min_samples,
        milder=milder,
    )
