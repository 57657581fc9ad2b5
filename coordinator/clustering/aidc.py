"""AIDC: clusters of devices by the divergence of their ReLU-sparsity profiles.

Source: Tang et al., "FedEPC", CMC 85(2), 2025, equations (3)-(8); specification docs/methods/fedepc.md. Departures:
divergences are in a calibrated unit D_ref (4.1). MinPts and the radius come from the mean entropy and from
nearest-neighbour distances (4.2). A rule places noise devices (4.4). For large N a random subset replaces the single
reference client (4.5).

Devices are positions, by ascending id. Values closer than 1e-12 are equal, also if one of them is a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.rules import bound_sizes
from fedge.steps.divergence import compute_divergence

Vectors = NDArray[np.float64]
Clusters = tuple[tuple[int, ...], ...]

TIE: Final = 1e-12
BLOCK_BYTES: Final = 1 << 20  # size of a temporary array while the matrix is filled, limited by cache, not memory
EXACT_UP_TO: Final = 2000  # most devices without the subset option
ANCHORS: Final = 200  # number of anchors in the subset option
RECLUSTER_SHARE: Final = 0.2  # share of devices that joined, left or changed; above it, clusters are remade (4.6)
ETA: Final = 2.0  # how fast MinPts falls with the entropy, (6)
MERGE: Final = 0.15  # theta_merge, in units of D_ref
SPLIT: Final = 0.18  # theta_split >= theta_merge


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a new device.

    Attributes:
        cluster: the cluster that the device joins; None if it founds a cluster.
        nearest: the cluster whose model a founder starts from; None if there is no cluster at all.
    """

    cluster: int | None
    nearest: int | None


# -------------------------------------------------------------------------------------------- 4.1: divergence


def compute_divergences(profiles: Vectors, *, unit: float) -> Vectors:
    """Compute D_ij = D_raw / D_ref of all pairs, (3)-(4): profiles (N, q) -> (N, N), symmetric, zero diagonal.

    Raises:
        ValueError: an entry is not in [0, 1], or the unit is too small (`compute_class_unit`).

    Cost: O(N^2 q) time; temporary memory is bounded by blocks of rows.
    """
    unit = _require_usable(unit)
    result = np.zeros((len(profiles), len(profiles)))
    rows = max(1, BLOCK_BYTES // max(1, 8 * profiles.size))
    for start in range(0, len(profiles), rows):
        block = profiles[start : start + rows]
        result[start : start + rows, start:] = compute_divergence(block[:, None], profiles[None, start:])
    upper = np.triu(result, 1) / unit
    return np.asarray(upper + upper.T)


def compute_class_unit(class_profiles: Vectors) -> float:
    """Compute D_ref, the mean D_raw over all pairs of profiles of single classes, (n_classes, q).

    D = 1 then reads "as different as two devices with one class each, classes unequal".

    Raises:
        ValueError: there are fewer than two classes, or the extractor cannot tell them apart (D_ref <= 1e-12).
    """
    if len(class_profiles) < 2:
        raise ValueError("a unit needs profiles of at least two classes")
    pairs = compute_divergences(class_profiles, unit=1.0)[np.triu_indices(len(class_profiles), 1)]
    return _require_usable(float(np.mean(pairs)))


def compute_halves_unit(halves: Sequence[float]) -> float:
    """Compute D_ref without labels, as 12 * mean / 2 of each device's D_raw between its even and odd samples.

    No value counts as more than twice the median, so that a single claim cannot make all devices alike.

    Raises:
        ValueError: no device reported, or D_ref <= 1e-12.
    """
    if not len(halves):
        raise ValueError("no device could halve its samples")
    return _require_usable(12 * float(np.mean(bound_sizes(halves))) / 2)


def _require_usable(unit: float) -> float:
    if not unit > 1e-12:
        raise ValueError(f"the unit D_ref is {unit}: the extractor tells nothing apart")
    return unit


# --------------------------------------------------------------------------------- 4.2: self-chosen parameters


def entropy(profiles: Vectors) -> float:
    """Compute H = e * mean over devices and channels of -s ln s, in [0, 1]; 0 where s = 0. profiles (n, q)."""
    logs = np.log(profiles, out=np.zeros(profiles.shape), where=profiles > 0)
    return float(np.clip(math.e * np.mean(-profiles * logs), 0.0, 1.0))


def compute_min_samples(n: int, h: float) -> int:
    """Compute MinPts, (6), which counts the device itself, for n >= 2 devices of mean entropy h."""
    wanted = math.ceil(n / (1 + math.exp(ETA * h)) - 1e-9)
    return min(max(wanted, 2), max(2, 1 + math.floor(math.log(n))))


def compute_radius(distances: Vectors, min_points: int) -> float:
    """Compute eps, (5): mean + population sd of the distances to the (MinPts-1)-th nearest other device.

    `distances`: (n, n), n >= 2; if there are too few other devices, the furthest one is taken.
    """
    n = len(distances)
    others = np.sort(distances[~np.eye(n, dtype=bool)].reshape(n, n - 1), axis=1)
    nearest = others[:, min(min_points - 1, n - 1) - 1]
    return float(np.mean(nearest) + np.std(nearest))


# ----------------------------------------------------------------------------------------- 4.3: density clustering


def cluster_by_density(distances: Vectors, eps: float, min_points: int) -> NDArray[np.intp]:
    """Label devices by DBSCAN: labels (n,), -1 is noise. A device and all at distance <= eps are its neighbours.

    scikit-learn visits devices in ascending order and finishes one cluster before the next, so a border device belongs
    to the first cluster that reaches it, as in the specification.
    """
    from sklearn.cluster import dbscan

    _, labels = dbscan(distances, eps=eps + TIE, min_samples=min_points, metric="precomputed")
    return np.asarray(labels, np.intp)


# -------------------------------------------------------------------------------------- 4.4: split, noise, merge


def split(distances: Vectors, cluster: Sequence[int], theta: float) -> Clusters:
    """Split a cluster around its two most distant devices until every piece has het <= theta_split (SPLIT)."""
    pieces, waiting = [], [np.array(sorted(cluster))]
    while waiting:
        members = waiting.pop()
        inner = distances[np.ix_(members, members)]
        if len(members) < 2 or inner.mean() <= theta + TIE:
            pieces.append(members.tolist())
            continue
        first, second = np.triu_indices(len(members), 1)
        pair = _find_first(inner[first, second] >= inner[first, second].max() - TIE)  # ties: lexicographically smallest
        a, b = first[pair], second[pair]
        near_a = inner[:, a] <= inner[:, b] + TIE
        near_a[b] = False
        waiting += [members[near_a], members[~near_a]]
    return number_clusters(pieces)


def _find_first(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def _apply_noise_rule(sums: Vectors, sizes: NDArray[np.intp], within: Callable[[int], float], theta: float) -> Place:
    """Place a device by `sums`, its distances to each cluster's members. `within`: (cluster) -> sum of D over C x C."""
    if not len(sizes):
        return Place(None, None)
    means = sums / sizes
    k = _find_first(means <= means.min() + TIE)  # ties: the earliest
    het = (within(k) + 2 * sums[k]) / (sizes[k] + 1) ** 2
    return Place(k if means[k] <= theta + TIE and het <= theta + TIE else None, k)


class _GrowingClusters:
    """Clusters that grow by the NOISE rule, with running sums of distances."""

    def __init__(self, distances: Vectors, clusters: Sequence[Sequence[int]]) -> None:
        self.members = [list(c) for c in clusters]
        self._within = [float(distances[np.ix_(c, c)].sum()) for c in self.members]

    def place(self, row: Vectors, theta: float) -> Place:
        """Place a device with distances `row` to all devices."""
        sums = np.array([row[c].sum() for c in self.members])
        return _apply_noise_rule(sums, np.array([len(c) for c in self.members]), self._within.__getitem__, theta)

    def add(self, device: int, row: Vectors, cluster: int | None) -> None:
        """Put a device with distances `row` into a cluster, or into a new one."""
        if cluster is None:
            self.members.append([device])
            self._within.append(0.0)
        else:
            self._within[cluster] += 2 * float(row[self.members[cluster]].sum())
            self.members[cluster].append(device)


def place_noise(distances: Vectors, clusters: Sequence[Sequence[int]], noise: Sequence[int], theta: float) -> Clusters:
    """Let noise devices, ascending, join the nearest cluster if it stays homogeneous, else found a cluster (NOISE)."""
    growing = _GrowingClusters(distances, sorted((sorted(c) for c in clusters), key=min))
    for device in sorted(noise):
        growing.add(device, distances[device], growing.place(distances[device], theta).cluster)
    return number_clusters(growing.members)


def merge(distances: Vectors, clusters: Sequence[Sequence[int]], theta: float) -> Clusters:
    """Unite the two clusters with the smallest `between` while that is below theta_merge, (7) (MERGE).

    Afterwards every `between` is >= theta_merge and every het still <= theta_split (4.4), so `split` is not repeated.
    Cost: O(K^3) for K clusters.
    """
    members = [list(c) for c in number_clusters(clusters)]
    belongs = np.zeros((len(members), len(distances)))
    for k, cluster in enumerate(members):
        belongs[k, cluster] = 1.0
    sums = belongs @ distances @ belongs.T
    sizes = belongs.sum(axis=1)
    means = sums / np.outer(sizes, sizes)
    np.fill_diagonal(means, np.inf)
    while (nearest := means.min(axis=1, initial=np.inf)).min(initial=np.inf) < theta - TIE:
        smallest = nearest.min()
        a = _find_first(nearest <= smallest + TIE)  # ties: the clusters with the smallest members
        b = _find_first(means[a] <= smallest + TIE)
        members[a] += members[b]
        members[b] = []
        sums[a] += sums[b]
        sums[:, a] += sums[:, b]
        sizes[a] += sizes[b]
        means[b] = means[:, b] = np.inf
        means[a] = means[:, a] = np.where(np.isinf(means[a]), np.inf, sums[a] / (sizes[a] * sizes))
    return number_clusters(members)


def number_clusters(clusters: Sequence[Sequence[int]]) -> Clusters:
    """Sort the members of clusters, and the clusters by their smallest member; empty clusters are removed."""
    return tuple(sorted((tuple(sorted(c)) for c in clusters if c), key=min))


# ---------------------------------------------------------------------------------------------- the whole of AIDC


def aidc(
    profiles: Vectors,
    *,
    unit: float,
    thresholds: tuple[float, float] = (MERGE, SPLIT),
    rng: np.random.Generator | None = None,
) -> Clusters:
    """Cluster devices with similar profiles.

    Args:
        profiles: (N, q), by ascending device id, entries in [0, 1].
        unit: D_ref > 0, from `compute_class_unit` or `compute_halves_unit`.
        thresholds: 0 < theta_merge <= theta_split.
        rng: draws 200 anchors; only used (and then needed) above 2000 devices.

    Returns:
        A partition. For the anchors every het is <= theta_split and every `between` >= theta_merge.

    Raises:
        ValueError: a profile or the unit is out of range.

    Cost: O(N^2 q) time, 8 N^2 bytes; above 2000 devices O(N R q) and O(R^2 + R) for R anchors (4.5).

    Example:
        >>> profiles = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> aidc(profiles, unit=1.0)
        ((0, 1), (2, 3))
    """
    n = len(profiles)
    if n <= EXACT_UP_TO:
        return _cluster_exactly(profiles, unit, thresholds)
    if rng is None:
        raise ValueError(f"{n} devices need a random generator that draws the anchors")
    anchors = np.sort(rng.choice(n, size=ANCHORS, replace=False))
    return _place_the_rest(
        profiles, anchors, _cluster_exactly(profiles[anchors], unit, thresholds), unit, thresholds[1]
    )


def _cluster_exactly(profiles: Vectors, unit: float, thresholds: tuple[float, float]) -> Clusters:
    if len(profiles) < 2:
        return number_clusters([range(len(profiles))])
    theta_merge, theta_split = thresholds
    distances = compute_divergences(profiles, unit=unit)
    points = compute_min_samples(len(profiles), entropy(profiles))
    labels = cluster_by_density(distances, compute_radius(distances, points), points)
    dense = [np.flatnonzero(labels == k).tolist() for k in range(labels.max() + 1)]
    pure = [piece for cluster in dense for piece in split(distances, cluster, theta_split)]
    placed = place_noise(distances, pure, np.flatnonzero(labels < 0).tolist(), theta_split)
    return merge(distances, placed, theta_merge)


def _place_the_rest(
    profiles: Vectors, anchors: NDArray[np.intp], found: Clusters, unit: float, theta: float
) -> Clusters:
    """Place all other devices, ascending, by the NOISE rule over anchors alone; founders become anchors (4.5)."""
    placed = [[int(anchors[i]) for i in cluster] for cluster in found]
    kept = profiles[anchors]
    growing = _GrowingClusters(compute_divergences(kept, unit=unit), found)
    for device in np.setdiff1d(np.arange(len(profiles)), anchors).tolist():
        row = compute_divergence(profiles[device], kept) / unit
        cluster = growing.place(row, theta).cluster
        if cluster is None:
            growing.add(len(kept), row, None)
            kept = np.vstack([kept, profiles[device]])
            placed.append([device])
        else:
            placed[cluster].append(device)
    return number_clusters(placed)


# ------------------------------------------------------------------------------- 4.6: joins, leaves, changed data


def place(new_device: Vectors, clusters: Sequence[Vectors], *, unit: float) -> Place:
    """Place a new device, (q,), by the NOISE rule; others stay. `clusters`: each cluster's profiles (N_k, q).

    Ties go to the earliest cluster. Cost: O(N q), and O(N_k^2 q) for the heterogeneity of the nearest cluster.
    """
    unit = _require_usable(unit)
    sums = np.array([(compute_divergence(new_device, cluster) / unit).sum() for cluster in clusters])

    def sum_divergences(k: int) -> float:
        return float(compute_divergences(clusters[k], unit=unit).sum())

    return _apply_noise_rule(sums, np.array([len(cluster) for cluster in clusters]), sum_divergences, SPLIT)


def has_changed(old: Vectors, new: Vectors, *, unit: float) -> bool:
    """Return whether a device with a new profile, (q,) each, must be placed as a new device: D >= theta_merge."""
    return bool(compute_divergence(old, new) / _require_usable(unit) >= MERGE)


def needs_reclustering(n_moved: int, n_devices: int) -> bool:
    """Return whether more than 20 % of the devices joined, left or changed since the last full clustering."""
    return n_moved > RECLUSTER_SHARE * n_devices


def inherit(old: Sequence[Collection[str]], new: Sequence[Collection[str]]) -> tuple[int | None, ...]:
    """Return for each new cluster of ids the old cluster with the largest overlap, whose bandit it takes, or None.

    Ties go to the lowest number.
    """
    overlaps = ([len(set(before) & set(after)) for before in old] for after in new)
    return tuple(row.index(max(row)) if any(row) else None for row in overlaps)
