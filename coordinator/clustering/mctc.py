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

from coordinator.clustering.aidc import Clusters, numbered

Vectors = NDArray[np.float64]

DECIMALS: Final = 9
TIED: Final = 10  # decimals of a share of the variance: cuts that differ by less are equal
NO_DIRECTION: Final = 1e-12  # ||g|| at or below it: no direction, section 4
COLUMNS: Final = 1 << 18  # of the updates, converted to float64 at a time
LARGE: Final = 100_000  # parameters above which directions are projected when they are kept
PROJECTED: Final = 4096  # dimension of the projection (section 5)
PROJECTED_AT_ONCE: Final = 1 << 16  # parameters
NONZEROS: Final = 4  # per row of the random projection
THETA: Final = 0.9  # largest valid cos_avg, Eq. 3
LARGEST_GRAM: Final = 4096  # clients whose Gram matrix is decomposed; for more, the dimension of a projection
PAIRS: Final = 1 << 20  # of clients, processed at a time
ROWS: Final = 1024  # of a matrix of all clients, computed at a time


@dataclass(frozen=True, slots=True)
class Found:
    """Clusters; of directions also MCTC's threshold and its separability, even with a rival.

    MCTC's may overlap: every client is in at least one. `separability` is None where tau was given.
    """

    clusters: Clusters
    tau: float | None = None
    separability: float | None = None


# ------------------------------------------------------------------------------------- sections 4 and 5: embedding


def unit_update(update: NDArray[np.floating]) -> Vectors | None:
    """Direction of an update, Eq. 1: (d,) of norm 1. None if it has none: not finite, or of norm <= 1e-12.

    The largest entry is divided out first, so that no square overflows or underflows.
    """
    largest = float(np.max(np.abs(update), initial=0.0))
    if not 0 < largest < np.inf:  # a NaN makes the maximum NaN, which fails here too
        return None
    scaled = update.astype(np.float64) / largest
    norm = float(np.linalg.norm(scaled))
    return None if largest * norm <= NO_DIRECTION else scaled / norm


def direction(update: NDArray[np.floating]) -> Vectors | None:
    """The stored form of an update: its unit vector, or for a large model its fixed projection. None: no direction."""
    unit = unit_update(update)
    return unit if unit is None or len(unit) <= LARGE else project(unit, PROJECTED, seed=0)


def project(update: NDArray[np.floating], size: int, seed: int) -> Vectors:
    """Random projection of a large update on arrival, (d,) -> (size,), the same matrix for equal seeds (section 5).

    The matrix (d, size) is sparse: four entries per row (with replacement), each +-1/2, so entries have variance
    1/size. Cosines are kept within about 1/sqrt(size), one standard deviation: use size >= 4096 where tau is tuned
    finely.

    Cost: O(d) time; the matrix is drawn in blocks of rows and never held.
    """
    projected = np.zeros(size)
    for block, start in enumerate(range(0, len(update), PROJECTED_AT_ONCE)):
        rng = np.random.default_rng((seed, block))
        values = update[start : start + PROJECTED_AT_ONCE].astype(np.float64)
        for _ in range(NONZEROS):
            columns = rng.integers(size, size=PROJECTED_AT_ONCE)[: len(values)]
            signs = rng.integers(2, size=PROJECTED_AT_ONCE, dtype=np.int8)[: len(values)] - 0.5
            projected += np.bincount(columns, weights=values * signs, minlength=size)
    return projected


def gram(updates: NDArray[np.floating]) -> Vectors:
    """Inner products of unit updates, (N, d) -> (N, N) float64, N >= 1.

    A row without direction (`unit_update`) has product 0 with everything, itself included.
    Cost: O(N^2 d) time, O(N) memory per column of a block beyond the updates.
    """
    largest = np.max(np.abs(updates), axis=1, initial=0.0).astype(np.float64)
    usable = (largest > 0) & np.isfinite(largest)
    scale = np.where(usable, largest, 1.0)
    products = np.zeros((len(updates), len(updates)))
    for start in range(0, updates.shape[1], COLUMNS):
        block = updates[:, start : start + COLUMNS].astype(np.float64)
        block[~usable] = 0.0
        block /= scale[:, None]
        products += block @ block.T
    norms = np.sqrt(products.diagonal())
    directed = usable & (scale * norms > NO_DIRECTION)
    norms = np.where(directed, norms, np.inf)
    return products / norms[:, None] / norms[None, :]


def embed(products: Vectors) -> Vectors:
    """Embedding Z = U_m Lambda_m^(1/2) from the Gram matrix of the unit updates (`gram`), Eq. 2: (N, N) -> (N, m).

    All nonzero components are kept, and nothing is centred, so that cosines are exactly those of the updates.
    """
    values, vectors = np.linalg.eigh(products)
    values, vectors = values[::-1], vectors[:, ::-1]
    keep = int(np.sum(values > NO_DIRECTION * max(values[0], 0.0)))
    return np.asarray(vectors[:, :keep] * np.sqrt(values[:keep]))


def embedding(updates: NDArray[np.floating]) -> Vectors:
    """Z of Eq. 2, a rotation of the unit updates: (N, d) -> (N, m), N >= 1.

    Where there are as many clients as parameters the unit updates are that embedding already. Of more than 4096 clients
    with more parameters than that, they are projected to 4096 numbers (section 5): cosines keep within about 1/64.

    Cost: O(N^2 d + N^3) time and O(N^2) memory for N < d, N <= 4096; else O(N d) time and O(N min(d, 4096)) memory.
    """
    n, d = updates.shape
    if n < min(d, LARGEST_GRAM + 1):
        return embed(gram(updates))
    z = np.zeros((n, min(d, LARGEST_GRAM)))
    for row, update in zip(z, updates, strict=True):
        unit = unit_update(update)
        if unit is not None:
            row[:] = unit if d <= LARGEST_GRAM else project(unit, LARGEST_GRAM, seed=0)
    return z


def cosines(a: Vectors, b: Vectors) -> Vectors:
    """Cosines of the rows of a (n, m) with those of b (k, m), rounded to 9 decimals; 0 for a zero row."""
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)[None, :]
    quotient = np.divide(a @ b.T, lengths, out=np.zeros(lengths.shape), where=lengths > NO_DIRECTION)
    return np.asarray(np.round(np.clip(quotient, -1.0, 1.0), DECIMALS))


def similarity(z: Vectors) -> Vectors:
    """Sim, the cosines of an embedding with itself: (N, m) -> (N, N), symmetric, diagonal 1 (0 for a zero row).

    Cost: O(N^2 m) time, 8 N^2 bytes and some rows of that.
    """
    sim = np.empty((len(z), len(z)))
    for start in range(0, len(z), ROWS):
        end = start + ROWS
        sim[start:end, start:] = cosines(z[start:end], z[start:])
        inner = np.triu(sim[start:end, start:end], 1)
        sim[start:end, start:end] = inner + inner.T
        sim[end:, start:end] = sim[start:end, end:].T
    np.fill_diagonal(sim, np.linalg.norm(z, axis=1) > NO_DIRECTION)
    return sim


def plane(z: Vectors) -> Vectors:
    """Positions of an embedding's rows in a plane, for plots: (N, m) -> (N, 2), centred.

    Classical scaling of the distances sqrt(2 - 2 cos): no other plane keeps more of their squares. An axis may come out
    mirrored. Cost: O(N m^2 + m^3) time.

    Source: Torgerson, "Multidimensional scaling: I. Theory and method", Psychometrika 17, 1952.
    """
    lengths = np.linalg.norm(z, axis=1, keepdims=True)
    units = np.divide(z, lengths, out=np.zeros_like(z), where=lengths > NO_DIRECTION)
    units -= units.mean(axis=0)
    _, axes = np.linalg.eigh(units.T @ units)
    places = units @ axes[:, ::-1][:, :2]
    return np.pad(places, ((0, 0), (0, 2 - places.shape[1])))


# ---------------------------------------------------------------------------------------------- section 6: MCTC


def choose_centres(sim: Vectors, n_clusters: int, *, bar: float) -> tuple[int, ...]:
    """Centres, from the least similar pairs, Algorithm 1, lines 2-15.

    Args:
        sim: (N, N), N >= 1.
        n_clusters: K >= 1, an upper bound.
        bar: a client at least this close to a chosen centre is none; 1 refuses parallel centres alone.
    """
    n = len(sim)
    k = max(1, min(n_clusters, n))
    if n == 1:
        return (0,)
    centres: list[int] = []
    eligible = np.ones(n, dtype=bool)
    least = _least(sim)
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


def _least(sim: Vectors) -> Vectors:
    """The smallest similarity of each client to another one, (N,), N >= 2."""
    least = np.empty(len(sim))
    for start in range(0, len(sim), ROWS):
        block = sim[start : start + ROWS].copy()
        block[np.arange(len(block)), start + np.arange(len(block))] = np.inf
        least[start : start + ROWS] = block.min(axis=1)
    return least


def soft_clusters(
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
        sim: `similarity` of z.
        n_clusters: K >= 1, an upper bound.
        tau: a client joins every cluster whose centre has at least this cosine, [-1, 1]; above 1: a hard partition.
        distinct: whether a client that belongs with a chosen centre may not be a centre (6.2).
        centres_join: whether centres join other clusters at the end (6.5).

    Cost: O(N^2 + N K m) time.

    Example:
        >>> angles = np.radians([0, 20, 80, 100, 50])
        >>> z = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        >>> soft_clusters(z, similarity(z), 2, 0.8)
        ((0, 1, 4), (2, 3))
    """
    tau = round(tau, DECIMALS)
    centres = choose_centres(sim, n_clusters, bar=min(tau, 1.0) if distinct else 1.0)
    members = [{c} for c in centres]
    sums, means = z[list(centres)].copy(), z[list(centres)].copy()
    for i in range(len(z)):  # lines 16 ff.
        if i in centres:
            continue
        for k in _joined(cosines(z[i : i + 1], means)[0], tau):
            members[k].add(i)
            sums[k] += z[i]
            means[k] = sums[k] / len(members[k])  # Eq. 4
    if centres_join:
        means = sums / np.array([[len(s)] for s in members])
        for a, k in np.argwhere(cosines(z[list(centres)], means) >= tau):
            members[k].add(centres[a])
    return tuple(tuple(sorted(s)) for s in members)


def _joined(close: Vectors, tau: float) -> tuple[int, ...]:
    """The clusters at least this close, otherwise the nearest: the first of equal ones."""
    return tuple(np.flatnonzero(close >= tau).tolist()) or (int(np.argmax(close)),)


def _check(z: Vectors, n_clusters: int) -> None:
    if n_clusters < 1 or not len(z):
        raise ValueError(f"{n_clusters} clusters of {len(z)} clients: both must be at least 1")
    broken = np.flatnonzero(~np.isfinite(z).all(axis=1))
    if len(broken):
        raise ValueError(f"the embedding of client {broken[0]} is not finite")


def means_of(z: Vectors, members: Sequence[Sequence[int]]) -> Vectors:
    """v_k, the mean of each cluster, Eq. 4: (K_eff, m)."""
    return np.stack([z[list(cluster)].mean(axis=0) for cluster in members])


def mean_cosine(means: Vectors) -> float:
    """cos_avg, the mean cosine of pairs of cluster means, Eq. 3; 0 for fewer than two."""
    pairs = np.triu_indices(len(means), 1)
    return float(np.mean(cosines(means, means)[pairs])) if len(means) > 1 else 0.0


def otsu(sim: Vectors) -> tuple[float, float]:
    """Adaptive tau: Otsu's cut of the cosines of all pairs (6.7), clipped to [0, 0.95], and its separability (17.4).

    eta = between-class variance at tau / variance of the cosines: 0.75 for a uniform distribution, 0.64 for a normal
    one; >= 0.8 speaks for groups, < 0.7 against. It is that of the cut that is used: where tau is clipped it is smaller
    than at Otsu's own cut, and 0 if all pairs lie on one side. Fewer than two pairs, or equal cosines: tau 0.95, eta 0.
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

    def between(t: NDArray[np.int64]) -> Vectors:
        """Share of the variance that is between the t smallest cosines and the others, 1 <= t < p."""
        lower = sums[t - 1]
        parts = (t / p) * (1 - t / p) * ((sums[-1] - lower) / (p - t) - lower / t) ** 2
        return np.asarray(np.round(parts / variance, TIED))

    best, cut = -1.0, 0
    for start in range(0, p - 1, PAIRS):
        t = np.arange(start + 1, min(start + PAIRS, p - 1) + 1)
        found = np.where(c[t - 1] < c[t], between(t), -1.0)
        first = int(np.argmax(found))  # the lowest of equal ones
        if found[first] > best:
            best, cut = float(found[first]), start + first
    low, high = np.round(lowest + c[cut : cut + 2], DECIMALS)  # the two cosines as they were
    tau = round(float(np.clip((low + high) / 2, 0.0, 0.95)), DECIMALS)
    below = int(np.searchsorted(c, tau - lowest))  # a pair at tau is close
    return tau, min(1.0, float(between(np.array([below]))[0])) if 0 < below < p else 0.0


# ---------------------------------------------------------------------------------------- section 7: validation


def mctc(
    z: Vectors,
    *,
    n_clusters: int = 8,
    tau: float | None = None,
    distinct: bool = True,
    centres_join: bool = True,
) -> Found:
    """Overlapping clusters whose means are not nearly parallel: MCTC with its validation loop (section 7).

    A partition with cos_avg > 0.9 is thrown away whole and tried again with stricter tau (four steps of 0.05, at most
    0.95), then with one cluster less. Clients whose updates nearly coincide end in one cluster.

    Args:
        z: embedding, (N, m), N >= 1, finite.
        n_clusters: K >= 1, an upper bound.
        tau: the first threshold; None: Otsu's.
        distinct: see `soft_clusters`.
        centres_join: see `soft_clusters`.

    Raises:
        ValueError: n_clusters is below 1, there is no client, or a row is not finite; the message names the client.

    Cost: once the cosines of all pairs and their order, O(N^2 (m + log N)) time and 16 to 24 N^2 bytes; then at most
    5*K times O(N^2 + N K m).
    """
    _check(z, n_clusters)
    sim = similarity(z)
    first, separability = otsu(sim) if tau is None else (round(tau, DECIMALS), None)
    k = n_clusters
    while True:
        for step in range(5):
            t = round(min(first + 0.05 * step, max(0.95, first)), DECIMALS)
            members = soft_clusters(z, sim, k, t, distinct=distinct, centres_join=centres_join)
            if len(members) < 2 or mean_cosine(means_of(z, members)) <= THETA:
                return Found(members, t, separability)
            if t >= 0.95:
                break
        k = len(members) - 1


# ------------------------------------------------------------------------------- section 9: clients that sat out


def attach(z: Vectors, means: Vectors, tau: float) -> tuple[tuple[int, ...], ...]:
    """Clusters of clients that sat out or came late: all with cosine >= tau, else the nearest. Changes no cluster.

    Args:
        z: (n, m), in the same basis as `means`: their stored unit vectors were in the Gram matrix of this embedding.
        means: v_k, (K_eff, m), K_eff >= 1.
        tau: the clustering's threshold.
    """
    return tuple(_joined(row, round(tau, DECIMALS)) for row in cosines(z, means))


def parted(z: Vectors, members: Sequence[Sequence[int]]) -> Clusters:
    """Overlapping clusters as a partition: each client stays in the one of its clusters whose mean is nearest.

    For methods with one cluster per device. Ties: the cluster with the lowest number. Means are those of all members,
    so the order of the clients does not matter; a cluster that nobody stays in is removed.

    Args:
        z: (N, m), the embedding in which the clusters were found.
        members: S_k, every client in at least one.

    Example:
        >>> parted(np.array([[1.0, 0], [1, 0.1], [0.6, 0.8], [0, 1]]), [(0, 1, 2), (2, 3)])
        ((0, 1), (2, 3))
    """
    close = cosines(z, means_of(z, members))
    for k, cluster in enumerate(members):
        close[np.setdiff1d(np.arange(len(z)), cluster), k] = -np.inf
    stays = close.argmax(axis=1)
    return numbered([np.flatnonzero(stays == k).tolist() for k in range(len(members))])


# ----------------------------------------------------------------------------------------- section 13: silhouette


def silhouette(sim: Vectors, members: Sequence[Sequence[int]]) -> float:
    """Mean silhouette over memberships, in [-1, 1]; for a partition the usual cosine silhouette (section 13).

    Distance 1 - Sim. Per membership (i, k): a to the other members of S_k, b to the nearest cluster without i. 0 where
    S_k = {i}, i is in every cluster, or max(a, b) = 0. It favours overlap.
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
