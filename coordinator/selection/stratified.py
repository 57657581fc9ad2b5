"""Clustered sampling: about the same number of clients from each cluster.

Source: Yang et al., "Cluster Federated Learning with Intra-Cluster Correction" (CFIC), CMC 2025, Algorithm 1;
specification docs/methods/cfic.md, section 5. Departure: the count per cluster is max, not min, of 1 and the share;
with fewer picks than clusters, they take turns (section 9, point 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.selection.uniform import uniform


def stratified(
    clusters: Mapping[int, Sequence[str]],
    n: int,
    rng: np.random.Generator,
    *,
    others: Sequence[str] = (),
    last_visit: Mapping[int, int],
) -> list[str]:
    """min(n, clients there are) different clients, by ascending id; all draws uniform without replacement.

    With n >= m clusters: base_i = min(|G_i|, floor(n/m)) from each, the rest from all that were not drawn yet. With
    n < m: one client each from the n clusters that were visited longest ago, ties at random. Without clusters: n of
    `others`.

    Args:
        clusters: G_i by key, ascending; members by ascending id, every client in at most one; none is empty.
        n: n_s >= 0.
        rng: of this round.
        others: clients without a cluster, by ascending id; extra picks alone reach them.
        last_visit: round in which some member was drawn last, by key; a cluster that is not there never was.
    """
    m = len(clusters)
    if n < m:
        order = rng.permutation(sorted(clusters)).tolist()
        chosen = sorted(order, key=lambda key: last_visit.get(key, 0))[:n]  # stable: ties stay at random
        return sorted(i for key in sorted(chosen) for i in uniform(clusters[key], 1, rng))
    base = [i for key in sorted(clusters) for i in uniform(clusters[key], n // m, rng)]
    drawn = set(base)
    rest = sorted(i for pool in (*clusters.values(), others) for i in pool if i not in drawn)
    return sorted(base + uniform(rest, n - len(base), rng))
