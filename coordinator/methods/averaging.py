"""The one way in which methods average what devices send: by the rule of the settings, within clusters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from coordinator.aggregation import Average
from coordinator.aggregation.guarded import guarded_averages, shortened
from coordinator.fleet import Fleet
from coordinator.methods import Method
from fedge.messages import BlobRef
from fedge.tensors import Layout, Model


class Update(Protocol):
    """What is averaged: Delta_i and n_i."""

    @property
    def update(self) -> BlobRef:
        """Delta_i."""

    @property
    def n_samples(self) -> int:
        """n_i."""


def averages(
    method: Method[Any],
    fleet: Fleet,
    updates: Mapping[str, Update],
    members: Sequence[Collection[str]],
    layout: Layout,
    *,
    alike: bool = False,
    note: Callable[[str, Model], None] | None = None,
) -> tuple[Average | None, ...]:
    """Average updates within clusters.

    Args:
        method: whose settings say how.
        fleet: where the updates are.
        updates: by ascending device id.
        members: of each cluster, ids among those of the updates; clusters may overlap or be empty.
        layout: of the updates.
        alike: every device counts as one, whatever it learned from.
        note: is shown each update when it is read.

    Returns:
        The average of each cluster; None where it has no members.
    """
    ids = list(updates)
    norms = [fleet.norms(u.update, layout) for u in updates.values()]
    positions = [[p for p, i in enumerate(ids) if i in own] for own in members]

    def changes() -> Iterator[Model]:
        for i, update in updates.items():
            change = fleet.get(update.update, layout)
            if note is not None:
                note(i, change)
            yield change

    sizes = [1 if alike else u.n_samples for u in updates.values()]
    return guarded_averages(changes(), norms, sizes, positions, layout, method.settings.protection)


def average(
    method: Method[Any],
    fleet: Fleet,
    updates: Mapping[str, Update],
    layout: Layout,
    note: Callable[[str, Model], None] | None = None,
) -> Average:
    """The average over everybody, of at least one update."""
    (found,) = averages(method, fleet, updates, [updates], layout, note=note)
    assert found is not None
    return found


def lengths(
    method: Method[Any], fleet: Fleet, updates: Mapping[str, Update], layout: Layout
) -> dict[str, tuple[float, float]]:
    """By what parameters and buffers of each update are multiplied, for a method that weighs updates itself."""
    ids = list(updates)
    norms = [fleet.norms(u.update, layout) for u in updates.values()]
    if method.settings.protection.average == "mean":
        return dict.fromkeys(ids, (1.0, 1.0))
    found = shortened(norms, [1.0] * len(ids), [range(len(ids))])
    return {i: found.get((0, p), (1.0, 1.0)) for p, i in enumerate(ids)}
