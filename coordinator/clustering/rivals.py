"""The plain rivals of AIDC and MCTC: k-means on directions, and average linkage of divergences.

Source: Lloyd's algorithm with k-means++ starts, and average linkage (UPGMA), both by scikit-learn. For k-means rows are
scaled to unit length first, so that the squared distance of two rows is 2 - 2 cos, and lengths (how much a device
trained, how dead its units are) do not count. In average linkage the distance of two clusters is the mean over their
pairs, `between` of docs/methods/fedepc.md, section 4.4. With theta_merge as the threshold the result is that of AIDC if
DBSCAN finds only noise, except that no cluster is split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.aidc import Clusters, number_clusters

RESTARTS = 10  # the start with the smallest sum of squares wins


def kmeans(vectors: NDArray[np.float64], *, n_clusters: int, rng: np.random.Generator) -> Clusters:
    """Cluster rows with similar directions by k-means.

    Args:
        vectors: (N, d), one row per device, by ascending id; finite. A row of zeros stays where it is, at the origin.
        n_clusters: K >= 1; lowered to the number of different directions.
        rng: random numbers for the starts.

    Returns:
        A partition of the positions, numbered by smallest member.

    Raises:
        ValueError: `n_clusters` is below 1, or a row is not finite.

    Cost: O(RESTARTS * iterations * N K d).

    Example:
        >>> kmeans(np.array([[1.0, 0], [0, 2], [3, 0], [0, 4]]), n_clusters=2, rng=np.random.default_rng(0))
        ((0, 2), (1, 3))
    """
    if not len(vectors):
        return ()
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths > 0, lengths, 1.0)
    k = min(n_clusters, len(np.unique(units.round(12), axis=0)))
    seed = int(rng.integers(2**31))
    with threadpool_limits(1):  # several threads would add in any order
        labels = KMeans(k, n_init=RESTARTS, random_state=seed).fit_predict(units)
    return number_clusters([np.flatnonzero(labels == c).tolist() for c in range(k)])


def agglomerative(
    distances: NDArray[np.float64], *, threshold: float | None = None, n_clusters: int | None = None
) -> Clusters:
    """Unite the two nearest clusters again and again.

    Args:
        distances: (N, N), symmetric, zero diagonal, >= 0, by ascending device id.
        threshold: stop when the nearest two clusters are at least so far apart.
        n_clusters: stop at this number of clusters (or N, if there are fewer devices), >= 1. Give one of the two.

    Returns:
        A partition of the positions, numbered by smallest member.

    Raises:
        ValueError: both or none of the two are given, `n_clusters` is below 1, or a distance is not finite.

    Cost: O(N^2 log N) time, O(N^2) memory.

    Example:
        >>> d = np.array([[0, 0.1, 0.9], [0.1, 0, 0.8], [0.9, 0.8, 0]])
        >>> agglomerative(d, threshold=0.15), agglomerative(d, n_clusters=1)
        (((0, 1), (2,)), ((0, 1, 2),))
    """
    if len(distances) < 2:
        return number_clusters([range(len(distances))])
    from sklearn.cluster import AgglomerativeClustering

    found = AgglomerativeClustering(
        n_clusters=None if n_clusters is None else min(n_clusters, len(distances)),
        distance_threshold=threshold,
        metric="precomputed",
        linkage="average",
    ).fit_predict(distances)
    return number_clusters([np.flatnonzero(found == c).tolist() for c in range(found.max() + 1)])
