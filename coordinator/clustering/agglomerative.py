"""Average-linkage clustering of a matrix of divergences: AIDC without its density step.

Source: average linkage (UPGMA; scikit-learn). The distance of two clusters is the mean over their pairs, `between` of
docs/methods/fedepc.md, section 4.4: with theta_merge as the threshold this is what AIDC does where DBSCAN finds noise
alone, except that no cluster is split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.aidc import Clusters, numbered


def agglomerative(
    distances: NDArray[np.float64], *, threshold: float | None = None, n_clusters: int | None = None
) -> Clusters:
    """Unite the two nearest clusters again and again.

    Args:
        distances: (N, N), symmetric, zero diagonal, >= 0, by ascending device id.
        threshold: stop where the nearest two are at least so far apart.
        n_clusters: stop at so many clusters (or N, if there are fewer devices), >= 1. One of the two is given.

    Returns:
        A partition of the positions, numbered by smallest member.

    Raises:
        ValueError: both or none of the two are given, `n_clusters` is below 1, or a distance is not finite or negative.

    Cost: O(N^2 log N) time, O(N^2) memory.

    Example:
        >>> d = np.array([[0, 0.1, 0.9], [0.1, 0, 0.8], [0.9, 0.8, 0]])
        >>> agglomerative(d, threshold=0.15), agglomerative(d, n_clusters=1)
        (((0, 1), (2,)), ((0, 1, 2),))
    """
    if (threshold is None) == (n_clusters is None):
        raise ValueError("give either a threshold or a number of clusters")
    if n_clusters is not None and n_clusters < 1:
        raise ValueError(f"{n_clusters} clusters: at least one is needed")
    if not (np.isfinite(distances).all() and (distances >= 0).all()):
        raise ValueError("distances must be finite and at least 0")
    if len(distances) < 2:
        return numbered([range(len(distances))])
    from sklearn.cluster import AgglomerativeClustering

    found = AgglomerativeClustering(
        n_clusters=None if n_clusters is None else min(n_clusters, len(distances)),
        distance_threshold=threshold,
        metric="precomputed",
        linkage="average",
    ).fit_predict(distances)
    return numbered([np.flatnonzero(found == c).tolist() for c in range(found.max() + 1)])
