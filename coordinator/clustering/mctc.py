"""MCTC: overlapping clusters of clients by the direction of their updates.

Source: Li et al., "SCMoE-PFL", Information Fusion, 2026, Eq. 1-4 and Algorithm 1; specification
docs/methods/scmoe_pfl.md. Departures (profile `default`): a client that belongs with a chosen centre is no centre
itself (`distinct`, 6.2), centres join other clusters (6.5), the threshold is Otsu's cut (6.7).

Clients are positions, by ascending client id. Every cosine and every threshold is rounded to 9 decimals before it is
compared: ties are real ties, and no result depends on the order in which sums are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.aidc import Clusters, number_clusters
from coordinator.clustering.geometry import DECIMALS, ROWS, Vectors, compute_cosines, compute_similarity

TIED: Final = 10  # decimals of a share of the variance; cuts that differ by less are equal
THETA: Final = 0.9  # largest valid cos_avg, Eq. 3
PAIRS: Final = 1 << 20  # pairs of clients that are processed at a time


@dataclass(frozen=True, slots=True)
class ClusteringResult:
    """The clusters found; for directions also MCTC's threshold and its separability, even with a rival clustering.

    Clusters of MCTC may overlap; every client is in at least one. `separability` is None if tau was given.
    """

    clusters: Clusters
    tau: float | None = None
    separability: float | None = None


# ---------------------------------------------------------------------------------------------- section 6: MCTC


def choose_centres(sim: Vectors, n_clusters: int, *, bar: float) -> tuple[int, ...]:
    """Choose centres from the least similar pairs (Algorithm 1, lines 2-15).

    Args:
        sim: (N, N), N >= 1.
        n_clusters: K >= 1, an upper bound.
        bar: a client at least this close to a chosen centre is no centre; 1 refuses only parallel centres.
    """
    n = len(sim)
    k = max(1, min(n_clusters, n))
    if n == 1:
        return (0,)
    centres: list[int] = []
    eligible = np.ones(n, dtype=bool)
    least = _find_least_similar(sim)
    while len(centres) < k and eligible.any():
        # the next pair with a possible centre: all pairs before it have none left
        value = least[eligible].min()
        at = np.flatnonzero(eligible & (least == value)).tolist()
        others = (next(int(j) for j in np.flatnonzero(sim[i] == value) if j != i) for i in at)
        for client in min(sorted(pair) for pair in zip(at, others, strict=True)):  # ties: by position
            if eligible[client] and len(centres) < k:
                centres.append(client)
                eligible &= sim[client] < bar
                eligible[client] = False
    return tuple(centres)


def _find_least_similar(sim: Vectors) -> Vectors:
    """Compute the smallest similarity of each client to another one, (N,), N >= 2."""
    least = np.empty(len(sim))
    for start in range(0, len(sim), ROWS):
        block = sim[start : start + ROWS].copy()
        block[np.arange(len(block)), start + np.arange(len(block))] = np.inf
        least[start : start + ROWS] = block.min(axis=1)
    return least


def cluster_softly(
    z: Vectors,
    sim: Vectors,
    n_clusters: int,
    tau: float,
    *,
    distinct: bool = True,
    centres_join: bool = True,
) -> Clusters:
    """Assign every client to one or more clusters of similar direction (MCTC, Algorithm 1).

    Args:
        z: embedding, (N, m), N >= 1, finite. A zero row has cosine 0 with everything.
        sim: `compute_similarity` of z.
        n_clusters: K >= 1, an upper bound.
        tau: a client joins every cluster whose centre has at least this cosine, [-1, 1]; above 1, a hard partition.
        distinct: whether a client that belongs with a chosen centre may not be a centre (6.2).
        centres_join: whether centres join other clusters at the end (6.5).

    Cost: O(N^2 + N K m) time.

    Example:
        >>> angles = np.radians([0, 20, 80, 100, 50])
        >>> z = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        >>> cluster_softly(z, compute_similarity(z), 2, 0.8)
        ((0, 1, 4), (2, 3))
    """
    tau = round(tau, DECIMALS)
    centres = choose_centres(sim, n_clusters, bar=min(tau, 1.0) if distinct else 1.0)
    members = [{c} for c in centres]
    sums, means = z[list(centres)].copy(), z[list(centres)].copy()
    for i in range(len(z)):  # lines 16 ff.
        if i in centres:
            continue
        for k in _find_close(compute_cosines(z[i : i + 1], means)[0], tau):
            members[k].add(i)
            sums[k] += z[i]
            means[k] = sums[k] / len(members[k])  # Eq. 4
    if centres_join:
        means = sums / np.array([[len(s)] for s in members])
        for a, k in np.argwhere(compute_cosines(z[list(centres)], means) >= tau):
            members[k].add(centres[a])
    return tuple(tuple(sorted(s)) for s in members)


def _find_close(close: Vectors, tau: float) -> tuple[int, ...]:
    """Return the clusters at least this close, otherwise the nearest cluster, the first on a tie."""
    return tuple(np.flatnonzero(close >= tau).tolist()) or (int(np.argmax(close)),)


def _require_valid(z: Vectors, n_clusters: int) -> None:
    if n_clusters < 1 or not len(z):
        raise ValueError(f"{n_clusters} clusters of {len(z)} clients: both must be at least 1")
    broken = np.flatnonzero(~np.isfinite(z).all(axis=1))
    if len(broken):
        raise ValueError(f"the embedding of client {broken[0]} is not finite")


def compute_means(z: Vectors, members: Sequence[Sequence[int]]) -> Vectors:
    """Compute v_k, the mean of each cluster, Eq. 4: (K_eff, m)."""
    return np.stack([z[list(cluster)].mean(axis=0) for cluster in members])


def compute_mean_cosine(means: Vectors) -> float:
    """Compute cos_avg, the mean cosine of pairs of cluster means, Eq. 3; 0 for fewer than two."""
    pairs = np.triu_indices(len(means), 1)
    return float(np.mean(compute_cosines(means, means)[pairs])) if len(means) > 1 else 0.0


def otsu(sim: Vectors) -> tuple[float, float]:
    """Compute tau, Otsu's cut of the cosines of all pairs (6.7), in [0, 0.95], and its separability (17.4).

    eta = between-class variance at tau / variance of the cosines: 0.75 for a uniform distribution, 0.64 for a normal
    one; >= 0.8 speaks for groups, < 0.7 against. eta belongs to the cut that is used: if tau is clipped, eta is smaller
    than at Otsu's own cut, and 0 if all pairs lie on one side. For fewer than two pairs, or equal cosines, tau is 0.95
    and eta 0.
    """
    c = np.concatenate([row[i + 1 :] for i, row in enumerate(sim)])  # above the diagonal
    c.sort()
    p = len(c)
    if p < 2 or c[0] == c[-1]:
        return 0.95, 0.0
    lowest = float(c[0])
    c -= lowest  # small differences would vanish in sums of large numbers
    variance = float(np.var(c))
    sums = np.cumsum(c)

    def compute_separability(t: NDArray[np.int64]) -> Vectors:
        """Return the share of variance between the t smallest cosines and the others, 1 <= t < p."""
        lower = sums[t - 1]
        parts = (t / p) * (1 - t / p) * ((sums[-1] - lower) / (p - t) - lower / t) ** 2
        return np.asarray(np.round(parts / variance, TIED))

    best, cut = -1.0, 0
    for start in range(0, p - 1, PAIRS):
        t = np.arange(start + 1, min(start + PAIRS, p - 1) + 1)
        found = np.where(c[t - 1] < c[t], compute_separability(t), -1.0)
        first = int(np.argmax(found))  # the lowest of equal ones
        if found[first] > best:
            best, cut = float(found[first]), start + first
    low, high = np.round(lowest + c[cut : cut + 2], DECIMALS)  # the two cosines as they were
    tau = round(float(np.clip((low + high) / 2, 0.0, 0.95)), DECIMALS)
    below = int(np.searchsorted(c, tau - lowest))  # a pair at tau is close
    return tau, min(1.0, float(compute_separability(np.array([below]))[0])) if 0 < below < p else 0.0


# ---------------------------------------------------------------------------------------- section 7: validation


def mctc(
    z: Vectors,
    *,
    n_clusters: int = 8,
    tau: float | None = None,
    distinct: bool = True,
    centres_join: bool = True,
) -> ClusteringResult:
    """Find overlapping clusters whose means are not nearly parallel: MCTC with its validation loop (section 7).

    Clusters with cos_avg > 0.9 are discarded and made again with stricter tau (four steps of 0.05, at most 0.95), then
    with one cluster less. Clients whose updates nearly coincide end in one cluster.

    Args:
        z: embedding, (N, m), N >= 1, finite.
        n_clusters: K >= 1, an upper bound.
        tau: the first threshold; Otsu's if None.
        distinct: as in `cluster_softly`.
        centres_join: as in `cluster_softly`.

    Raises:
        ValueError: n_clusters is below 1, there is no client, or a row is not finite; the message names the client.

    Cost: once the cosines of all pairs and their order, O(N^2 (m + log N)) time and 16 to 24 N^2 bytes; then at most
    5*K times O(N^2 + N K m).
    """
    _require_valid(z, n_clusters)
    sim = compute_similarity(z)
    first, separability = otsu(sim) if tau is None else (round(tau, DECIMALS), None)
    k = n_clusters
    while True:
        for step in range(5):
            t = round(min(first + 0.05 * step, max(0.95, first)), DECIMALS)
            members = cluster_softly(z, sim, k, t, distinct=distinct, centres_join=centres_join)
            if len(members) < 2 or compute_mean_cosine(compute_means(z, members)) <= THETA:
                return ClusteringResult(members, t, separability)
            if t >= 0.95:
                break
        k = len(members) - 1


# ------------------------------------------------------------------------------- section 9: clients that sat out


def attach(z: Vectors, means: Vectors, tau: float) -> tuple[tuple[int, ...], ...]:
    """Attach clients that sat out or came late to all clusters with cosine >= tau, otherwise to the nearest cluster.

    Args:
        z: (n, m), in the same basis as `means`, because their unit vectors were in the Gram matrix of this embedding.
        means: v_k, (K_eff, m), K_eff >= 1.
        tau: the clustering's threshold.
    """
    return tuple(_find_close(row, round(tau, DECIMALS)) for row in compute_cosines(z, means))


def make_partition(z: Vectors, members: Sequence[Sequence[int]]) -> Clusters:
    """Make overlapping clusters disjoint: each client stays in that of its clusters whose mean is nearest.

    Methods with one cluster per device need this. On a tie, the lowest number wins. Means are over all members, so the
    order of the clients does not matter. Clusters in which no client stays are removed.

    Args:
        z: (N, m), the embedding in which the clusters were found.
        members: S_k, every client in at least one.

    Example:
        >>> make_partition(np.array([[1.0, 0], [1, 0.1], [0.6, 0.8], [0, 1]]), [(0, 1, 2), (2, 3)])
        ((0, 1), (2, 3))
    """
    close = compute_cosines(z, compute_means(z, members))
    for k, cluster in enumerate(members):
        close[np.setdiff1d(np.arange(len(z)), cluster), k] = -np.inf
    stays = close.argmax(axis=1)
    return number_clusters([np.flatnonzero(stays == k).tolist() for k in range(len(members))])


# ----------------------------------------------------------------------------------------- section 13: silhouette


def silhouette(sim: Vectors, members: Sequence[Sequence[int]]) -> float:
    """Compute the mean silhouette over memberships, in [-1, 1]; the usual one for a partition (section 13).

    With distance 1 - Sim, a membership (i, k) has a, the mean distance to the other members of S_k, and b, that to the
    nearest cluster without i. It counts 0 if S_k = {i}, i is in every cluster, or max(a, b) = 0. The figure favours
    overlap.
    """
    distance = 1.0 - sim
    values = []
    for k, cluster in enumerate(members):
        for i in cluster:
            rest = [j for j in cluster if j != i]
            rivals = [distance[i, list(s)].mean() for m, s in enumerate(members) if m != k and i not in s]
            a, b = (distance[i, rest].mean(), min(rivals)) if rest and rivals else (0.0, 0.0)
            values.append((b - a) / max(a, b) if max(a, b) > 0 else 0.0)
    return float(np.mean(values))
