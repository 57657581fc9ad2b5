"""Averages of updates by the configured rule, for each cluster of a step.

`mean` and `clipped` read each update once and hold only the sums. The other rules hold all updates of a step, 4 n d
bytes for n updates of d numbers, count every device once, and take the median of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from coordinator.aggregation import rules
from coordinator.aggregation.mean import Average, Factors, cluster_averages
from coordinator.protection import Protection
from fedge.codec import Norms
from fedge.tensors import Layout, Model


def guarded_averages(
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
        norms: of each of them.
        sizes: as in `cluster_averages`; unverified claims, which `clipped` limits to twice the median.
        members: for each cluster the positions of its members.
        layout: of the updates.
        protection: the rule. In a cluster of fewer than three members every rule is the mean.

    Raises:
        ValueError: as `cluster_averages`.
    """
    weights = believed(sizes, protection)
    if protection.average == "mean":
        return cluster_averages(changes, weights, members, layout)
    if protection.average == "clipped":
        return cluster_averages(changes, weights, members, layout, shortened(norms, weights, members))
    rows = list(changes)
    return tuple(_robust([rows[i] for i in own], layout, protection) for own in members)


def believed(sizes: Sequence[float], protection: Protection) -> Sequence[float]:
    """The weight of each update: its samples, those limited to twice the median, or one, by the rule."""
    if protection.average == "mean":
        return sizes
    return rules.bounded(sizes) if protection.average == "clipped" else [1.0] * len(sizes)


def shortened(norms: Sequence[Norms], weights: Sequence[float], members: Sequence[Sequence[int]]) -> Factors:
    """Factors that shorten updates in each cluster (`rules.factors`), for parameters and buffers separately."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for k, own in enumerate(members):
        pairs = zip(*(rules.factors([weights[i] * norms[i][part] for i in own]) for part in range(2)), strict=True)
        found |= {(k, i): pair for i, pair in zip(own, pairs, strict=True) if pair != (1.0, 1.0)}
    return found


def _robust(rows: Sequence[Model], layout: Layout, protection: Protection) -> Average | None:
    """The robust average of one cluster."""
    n = len(rows)
    f = rules.n_hostile(n, protection.hostile)
    if n < rules.FEWEST:
        (average,) = cluster_averages(rows, [1] * n, [range(n)], layout)
        return average
    params = [row.params for row in rows]
    match protection.average:
        case "median":
            found = rules.median(params)
        case "trimmed-mean":
            found = rules.trimmed_mean(params, f)
        case "multi-krum":
            (chosen,) = cluster_averages(rows, [1] * n, [rules.multi_krum(params, f)], layout)
            assert chosen is not None
            found = chosen.params
        case _:
            found = rules.centred_clipping(params)
    counters = np.sort(np.stack([row.counters for row in rows]), axis=0)[(n - 1) // 2]
    return Average(found, rules.median([row.buffers for row in rows]), counters, n)
