"""The one way to average updates: by the configured rule, within clusters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from coordinator.aggregation import Average
from coordinator.aggregation.guarded import average_by_rule, compute_shares
from coordinator.aggregation.mean import BLOCK, Share, Shares, average_clusters
from coordinator.aggregation.protection import SUMMABLE
from coordinator.clustering import geometry
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.sites import Note, SiteMean, SiteSums
from coordinator.methods.method import Method
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

FRESH: Final[Mapping[str, float]] = MappingProxyType({})


class Update(Protocol):
    """An update that can be averaged, with Delta_i and n_i."""

    @property
    def update(self) -> BlobRef:
        """The device's change of the model, Delta_i."""

    @property
    def n_samples(self) -> int:
        """The samples that the device trained on, n_i."""


def ignore(device_id: str, direction: geometry.Vectors) -> None:
    """Ignore a direction."""


def ignore_device(device_id: str) -> None:
    """Ignore a device whose update is in no mean."""


async def average_by_cluster(
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
    miss: Callable[[str], object] = ignore_device,
) -> tuple[Average | None, ...]:
    """Average updates within clusters; updates on sites are summed on their sites.

    Args:
        method: the method, whose settings have the rule.
        fleet: where the updates are.
        updates: the updates, by ascending device id.
        members: the ids of each cluster's devices with updates; clusters may overlap or be empty.
        layout: the layout of the updates.
        alike: whether every device weighs 1, however many samples it has.
        note: called with directions of updates.
        whose: devices whose directions are wanted.
        discounts: factors of some updates, applied after their lengths are bounded.
        miss: called with each device whose update is in no mean, since its site has not answered or has lost it.

    Returns:
        The average of each cluster; None if the cluster has no members, or none of their sites has answered.
    """
    ids = list(updates)
    norms = [fleet.get_norms(u.update, layout) for u in updates.values()]
    positions = [[p for p, i in enumerate(ids) if i in own] for own in members]

    def iterate_changes(of: Collection[str]) -> Iterator[Model]:
        for i, change in zip(of, _read((updates[i].update for i in of), fleet, layout), strict=True):
            if i in whose and (direction := geometry.compute_direction(change.params)) is not None:
                note(i, direction)
            s = np.float32(discounts.get(i, 1.0))
            yield change if s == 1 else Model(s * change.params, change.buffers, change.counters)

    sizes = [1 if alike else u.n_samples for u in updates.values()]
    protection = method.settings.protection
    summable = protection.average in SUMMABLE
    far = fleet.sites.find_remote({i: u.update for i, u in updates.items()}) if fleet.sites and summable else ()
    if not fleet.sites or not far:
        return average_by_rule(iterate_changes(ids), norms, sizes, positions, layout, protection)
    counts = dict(compute_shares(norms, sizes, positions, protection))
    n_of = dict(zip(ids, sizes, strict=True))
    wanted = SiteSums(
        layout=layout,
        updates={i: updates[i].update for i in ids if i in far},
        weights={i: n_of[i] for i in ids if i in far},
        sums=tuple(
            {
                ids[p]: _compute_multiples(counts.get((k, p)), n_of[ids[p]], discounts.get(ids[p], 1.0))
                for p in own
                if ids[p] in far
            }
            for k, own in enumerate(positions)
        ),
        directions=tuple(i for i in ids if i in far and i in whose),
    )
    means = await fleet.sites.compute_means(wanted, note)
    for i in sorted(set(far).difference(*(mean.devices for mean in means))):
        miss(i)
    near = iterate_changes([i for i in ids if i not in far])
    return _average_over_sites(means, near, n_of, [i for i in ids if i not in far], ids, positions, counts, layout)


def _compute_multiples(share: Share | None, size: float, discount: float) -> tuple[float, float]:
    """Return the factors of an update that a site weighs by size, so that the update counts as its share says."""
    if share is None:
        return discount, 1.0
    return discount * share.params * share.weight / size, share.buffers * share.weight / size


def _read(refs: Iterator[BlobRef], fleet: Fleet, layout: Layout) -> Iterator[Model]:
    """Read updates one by one; while a large one is summed, the next is decoded."""
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


def _average_over_sites(
    means: Sequence[SiteMean],
    near: Iterator[Model],
    n_of: Mapping[str, float],
    here: Sequence[str],
    ids: Sequence[str],
    positions: Sequence[Sequence[int]],
    counts: Shares,
    layout: Layout,
) -> tuple[Average | None, ...]:
    """Average all updates as `average_clusters`; a site's mean of a cluster stands for the site's devices.

    `near`: the updates of the devices `here`, which are not on sites.
    """
    place = {i: n for n, i in enumerate(here)}
    members = [[place[ids[p]] for p in own if ids[p] in place] for own in positions]
    of_all = {(k, place[ids[p]]): share for (k, p), share in counts.items() if ids[p] in place}
    position = {i: p for p, i in enumerate(ids)}
    for n, mean in enumerate(means, len(here)):
        members[mean.cluster].append(n)
        weight = sum(counts.get((mean.cluster, position[i]), Share(n_of[i])).weight for i in mean.devices)
        longer = sum(n_of[i] for i in mean.devices) / weight
        of_all[mean.cluster, n] = Share(weight, longer, longer)
    sizes = [*(n_of[i] for i in here), *[0.0] * len(means)]
    return average_clusters(chain(near, (mean.model for mean in means)), sizes, members, layout, of_all)


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
    miss: Callable[[str], object] = ignore_device,
) -> Average | None:
    """Return the average over all updates; None if no site has answered."""
    (found,) = await average_by_cluster(
        method,
        fleet,
        updates,
        [updates],
        layout,
        alike=alike,
        note=note,
        whose=whose,
        discounts=discounts,
        miss=miss,
    )
    return found


def compute_update_factors(
    method: Method[Any], fleet: Fleet, updates: Mapping[str, Update], layout: Layout
) -> dict[str, tuple[float, float]]:
    """Return the factors of each update's parameters and buffers, for a method that weighs updates itself."""
    ids = list(updates)
    norms = [fleet.get_norms(u.update, layout) for u in updates.values()]
    found = compute_shares(norms, [1.0] * len(ids), [range(len(ids))], method.settings.protection)
    return {i: found.get((0, p), Share(1.0))[1:] for p, i in enumerate(ids)}
