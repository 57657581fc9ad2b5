"""Updates that are summed where they lie: behind a relay, or with the processes of a simulation that made them.

One mean travels for each site and cluster, with weights that the averaging rule has derived from the norms of all
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator.aggregation.mean import Average, Share, average_clusters
from coordinator.clustering import geometry
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef, Id, NonNegative

Directions = dict[str, NDArray[np.floating[Any]]]
"""Directions of updates by device (`geometry.compute_direction`)."""
Note = Callable[[str, NDArray[Any]], None]
"""A function that is called with the device and the direction of an update, if the update has one."""


class SiteSums(Struct, frozen=True, kw_only=True):
    """A request for averages of updates that lie on sites, on all sites or on one.

    `updates`, `weights`: by device. `sums`: for each cluster its members, with the factors for the parameters and
    buffers of each member. `directions`: devices whose directions are requested.
    """

    layout: Layout
    updates: dict[Id, BlobRef]
    weights: dict[Id, NonNegative]
    sums: tuple[dict[Id, tuple[NonNegative, NonNegative]], ...]
    directions: tuple[Id, ...] = ()

    def narrow_to(self, updates: Mapping[str, BlobRef], prefix: str = "") -> SiteSums:
        """Return the request to one site. `updates`: the site's. `prefix`: of ids, which the site leaves out."""
        names, whose = {i: i.removeprefix(prefix) for i in updates}, set(self.directions)
        return SiteSums(
            layout=self.layout,
            updates={names[i]: ref for i, ref in updates.items()},
            weights={names[i]: self.weights[i] for i in updates},
            sums=tuple({names[i]: own[i] for i in updates if i in own} for own in self.sums),
            directions=tuple(names[i] for i in updates if i in whose),
        )


class SiteMean(NamedTuple):
    """A site's mean of a cluster, with its devices, whose weights in the request sum to more than 0."""

    cluster: int
    model: Model | Average
    devices: tuple[str, ...]


class Sites(Protocol):
    """The sites of a fleet, on which updates lie and are summed."""

    def find_remote(self, updates: Mapping[str, BlobRef]) -> Collection[str]:
        """Return the devices whose updates lie on sites."""

    async def compute_means(self, wanted: SiteSums, note: Note) -> list[SiteMean]:
        """Return the means of updates by site and cluster; sites that do not answer are missing and logged."""


def average_updates(
    wanted: SiteSums, here: Collection[str], read: Callable[[BlobRef], Model]
) -> tuple[tuple[Average | None, ...], Directions]:
    """Return the mean of each cluster over the updates still present, by ascending device id, and their directions.

    Args:
        wanted: the request.
        here: devices whose updates are still present.
        read: (reference) -> the update.
    """
    ids = sorted(here)
    directions: Directions = {}

    def iterate_changes() -> Iterator[Model]:
        for i in ids:
            change = read(wanted.updates[i])
            if i in wanted.directions and (direction := geometry.compute_direction(change.params)) is not None:
                directions[i] = direction
            yield change

    means = average_clusters(
        iterate_changes(),
        [wanted.weights[i] for i in ids],
        [[p for p, i in enumerate(ids) if i in own] for own in wanted.sums],
        wanted.layout,
        {
            (k, p): Share(wanted.weights[i], *own[i])
            for k, own in enumerate(wanted.sums)
            for p, i in enumerate(ids)
            if i in own
        },
    )
    return means, directions
