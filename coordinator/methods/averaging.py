"""The one way to average updates: by the configured rule, within clusters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from coordinator.aggregation import Average
from coordinator.aggregation.guarded import believed, guarded_averages, shortened
from coordinator.aggregation.mean import BLOCK, Factors, cluster_averages
from coordinator.clustering import mctc
from coordinator.fleet import Fleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from coordinator.methods import Method
from fedge.messages import BlobRef
from fedge.tensors import Layout, Model

FRESH: Final[Mapping[str, float]] = MappingProxyType({})


class Update(Protocol):
    """What is averaged: Delta_i and n_i."""

    @property
    def update(self) -> BlobRef:
        """Delta_i."""

    @property
    def n_samples(self) -> int:
        """n_i."""


def ignore(device_id: str, direction: mctc.Vectors) -> None:
    """Ignore directions."""


async def averages(
    method: Method[Any],
    fleet: Fleet,
    updates: Mapping[str, Update],
    members: Sequence[Collection[str]],
    layout: Layout,
    *,
    alike: bool = False,
    note: Note = ignore,
    whose: Collection[str] = (),
    discounts: Mapping[str, float] = FRESH,
) -> tuple[Average | None, ...]:
    """Average updates within clusters; those on sites are summed there.

    Args:
        method: its settings have the rule.
        fleet: where the updates are.
        updates: by ascending device id.
        members: of each cluster, ids among those of the updates; clusters may overlap or be empty.
        layout: of the updates.
        alike: every device counts as one, however many samples it has.
        note: called with directions of updates.
        whose: devices whose directions are wanted.
        discounts: factors of some updates, applied after their lengths are bounded.

    Returns:
        The average of each cluster; None if it has no members, or none of their sites has answered.
    """
    ids = list(updates)
    norms = [fleet.norms(u.update, layout) for u in updates.values()]
    positions = [[p for p, i in enumerate(ids) if i in own] for own in members]

    def changes(of: Collection[str]) -> Iterator[Model]:
        for i, change in zip(of, _read((updates[i].update for i in of), fleet, layout), strict=True):
            if i in whose and (direction := mctc.direction(change.params)) is not None:
                note(i, direction)
            s = np.float32(discounts.get(i, 1.0))
            yield change if s == 1 else Model(s * change.params, change.buffers, change.counters)

    sizes = [1 if alike else u.n_samples for u in updates.values()]
    protection = method.settings.protection
    summable = protection.average in {"mean", "clipped"}
    far = fleet.sites.held({i: u.update for i, u in updates.items()}) if fleet.sites and summable else ()
    if not fleet.sites or not far:
        return guarded_averages(changes(ids), norms, sizes, positions, layout, protection)
    weights = dict(zip(ids, believed(sizes, protection), strict=True))
    clipped = protection.average == "clipped"
    factors = dict(shortened(norms, list(weights.values()), positions)) if clipped else {}
    for k, p in [(k, p) for k, own in enumerate(positions) for p in own if ids[p] in far and ids[p] in discounts]:
        of_params, of_buffers = factors.get((k, p), (1.0, 1.0))
        factors[k, p] = discounts[ids[p]] * of_params, of_buffers
    sums = [{ids[p]: factors.get((k, p), (1.0, 1.0)) for p in own if ids[p] in far} for k, own in enumerate(positions)]
    wanted = SiteSums(
        layout=layout,
        updates={i: updates[i].update for i in ids if i in far},
        weights={i: weights[i] for i in ids if i in far},
        sums=tuple(sums),
        directions=tuple(i for i in ids if i in far and i in whose),
    )
    means = await fleet.sites.means(wanted, note)
    near = changes([i for i in ids if i not in far])
    return _over_sites(means, near, {i: weights[i] for i in ids if i not in far}, ids, positions, factors, layout)


def _read(refs: Iterator[BlobRef], fleet: Fleet, layout: Layout) -> Iterator[Model]:
    """Updates one by one; while a large one is summed, the next is decoded."""
    if layout.n_params < BLOCK:
        yield from (fleet.get(ref, layout) for ref in refs)
        return
    with ThreadPoolExecutor(1, "fedge-next") as thread:
        following = (thread.submit(fleet.get, ref, layout) for ref in refs)
        coming = next(following, None)
        while coming is not None:
            update = coming.result()
            coming = next(following, None)
            yield update
            del update


def _over_sites(
    means: Sequence[SiteMean],
    near: Iterator[Model],
    weights: Mapping[str, float],
    ids: Sequence[str],
    positions: Sequence[Sequence[int]],
    factors: Factors,
    layout: Layout,
) -> tuple[Average | None, ...]:
    """`cluster_averages` of all; a site's mean of a cluster stands for its devices there. `weights`: of the others."""
    place = {p: n for n, p in enumerate(p for p, i in enumerate(ids) if i in weights)}
    members = [
        [
            *(place[p] for p in own if p in place),
            *(len(place) + n for n, mean in enumerate(means) if mean.cluster == k),
        ]
        for k, own in enumerate(positions)
    ]
    sizes = [*(weights[ids[p]] for p in place), *(mean.weight for mean in means)]
    models = chain(near, (mean.model for mean in means))
    own_factors = {(k, place[p]): pair for (k, p), pair in factors.items() if p in place}
    return cluster_averages(models, sizes, members, layout, own_factors)


async def average(
    method: Method[Any],
    fleet: Fleet,
    updates: Mapping[str, Update],
    layout: Layout,
    *,
    alike: bool = False,
    note: Note = ignore,
    whose: Collection[str] = (),
    discounts: Mapping[str, float] = FRESH,
) -> Average | None:
    """The average over all updates; None if no site has answered."""
    (found,) = await averages(
        method, fleet, updates, [updates], layout, alike=alike, note=note, whose=whose, discounts=discounts
    )
    return found


def lengths(
    method: Method[Any], fleet: Fleet, updates: Mapping[str, Update], layout: Layout
) -> dict[str, tuple[float, float]]:
    """The factors of each update's parameters and buffers, for a method that weighs updates itself."""
    ids = list(updates)
    norms = [fleet.norms(u.update, layout) for u in updates.values()]
    if method.settings.protection.average == "mean":
        return dict.fromkeys(ids, (1.0, 1.0))
    found = shortened(norms, [1.0] * len(ids), [range(len(ids))])
    return {i: found.get((0, p), (1.0, 1.0)) for p, i in enumerate(ids)}
