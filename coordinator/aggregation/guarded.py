"""Averages of updates by the configured rule, for each cluster of a step.

The rules of `SUMMABLE` read each update once and hold only the sums. The others hold all updates of a step, 4 n d bytes
for n updates of d numbers, count every device once, and take the median of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from coordinator.aggregation import rules
from coordinator.aggregation.mean import Average, Share, Shares, average_clusters
from coordinator.aggregation.protection import SUMMABLE, Protection
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Layout, Model


def average_by_rule(
    changes: Iterable[Model],
    norms: Sequence[Norms],
    sizes: Sequence[float],
    members: Sequence[Sequence[int]],
    layout: Layout,
    protection: Protection,
) -> tuple[Average | None, ...]:
    """Average updates within clusters by the configured rule.

    Args:
        changes: updates by ascending client id; finite; each is read once.
        norms: the norms of each update.
        sizes: as in `average_clusters`. Devices claim them unverified; `clipped` limits them to twice their cluster's
            median.
        members: for each cluster the positions of its members.
        layout: the layout of the updates.
        protection: the rule. In a cluster of fewer than three members every rule is the mean.

    Raises:
        ValueError: as `average_clusters`.
    """
    if protection.average in SUMMABLE:
        return average_clusters(changes, sizes, members, layout, compute_shares(norms, sizes, members, protection))
    rows = list(changes)
    return tuple(_average_robustly([rows[i] for i in own], layout, protection) for own in members)


def limit_sizes(sizes: Sequence[float], protection: Protection) -> Sequence[float]:
    """Return the members' weights by the rule: samples, samples limited to twice their median, or one for each."""
    if protection.average not in SUMMABLE:
        return [1.0] * len(sizes)
    if protection.average != "clipped":
        return sizes
    most = rules.FACTOR * rules.compute_typical([size for size in sizes if size > 0])
    return [min(size, most) for size in sizes]


def compute_shares(
    norms: Sequence[Norms], sizes: Sequence[float], members: Sequence[Sequence[int]], protection: Protection
) -> Shares:
    """Compute the shares of the updates that a rule makes lighter or shorter, in each cluster by its own members.

    `norm-clipped` bounds norms by twice their median. `clipped` bounds weights, and weight times norm, by twice their
    medians. A mean of equal updates stays that update, because no bounded weight times the norm exceeds the second
    bound. Updates with n_i = 0 are not averaged and do not count in the medians.
    """
    if protection.average == "mean":
        return {}
    found: dict[tuple[int, int], Share] = {}
    for k, members_of_k in enumerate(members):
        own = [i for i in members_of_k if sizes[i] > 0]
        weights = limit_sizes([sizes[i] for i in own], protection)
        moved = weights if protection.average == "clipped" else [1.0] * len(own)
        of_parts = [
            rules.compute_factors([weight * norms[i][part] for i, weight in zip(own, moved, strict=True)], zeros=True)
            for part in range(2)
        ]
        for i, share in zip(own, map(Share, weights, *of_parts), strict=True):
            if share != Share(sizes[i]):
                found[k, i] = share
    return found


def _average_robustly(rows: Sequence[Model], layout: Layout, protection: Protection) -> Average | None:
    """Compute the robust average of one cluster."""
    n = len(rows)
    f = rules.count_hostile(n, protection.hostile)
    if n < rules.FEWEST:
        (average,) = average_clusters(rows, [1] * n, [range(n)], layout)
        return average
    params = [row.params for row in rows]
    match protection.average:
        case "median":
            found = rules.median(params)
        case "trimmed-mean":
            found = rules.trimmed_mean(params, f)
        case "multi-krum":
            (chosen,) = average_clusters(rows, [1] * n, [rules.multi_krum(params, f)], layout)
            assert chosen is not None
            found = chosen.params
        case _:
            found = rules.centred_clipping(params)
    counters = np.sort(np.stack([row.counters for row in rows]), axis=0)[(n - 1) // 2]
    return Average(found, rules.median([row.buffers for row in rows]), counters, n)
