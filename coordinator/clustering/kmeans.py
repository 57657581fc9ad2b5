"""k-means on directions: the plain rival of AIDC and MCTC, which find the number of clusters themselves.

Source: Lloyd's algorithm with k-means++ starts (scikit-learn). Rows are scaled to unit length first, so that the
squared distance of two rows is 2 - 2 cos, and lengths (how much a device trained, how dead its units are) do not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.aidc import Clusters, numbered

RESTARTS = 10  # the start with the smallest sum of squares wins


def kmeans(vectors: NDArray[np.floating], *, n_clusters: int, rng: np.random.Generator) -> Clusters:
    """Clusters of rows with similar directions.

    Args:
        vectors: (N, d), one row per device, by ascending id; finite. A row of zeros stays where it is, at the origin.
        n_clusters: K >= 1; lowered to the number of different directions.
        rng: of the starts.

    Returns:
        A partition of the positions, numbered by smallest member.

    Raises:
        ValueError: `n_clusters` is below 1, or a row is not finite.

    Cost: O(RESTARTS * iterations * N K d).

    Example:
        >>> kmeans(np.array([[1.0, 0], [0, 2], [3, 0], [0, 4]]), n_clusters=2, rng=np.random.default_rng(0))
        ((0, 2), (1, 3))
    """
    if n_clusters < 1:
        raise ValueError(f"k-means needs at least one cluster, not {n_clusters}")
    rows = np.asarray(vectors, np.float64)
    if not np.isfinite(rows).all():
        raise ValueError("a vector is not finite")
    if not len(rows):
        return ()
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1.0)
    k = min(n_clusters, len(np.unique(units.round(12), axis=0)))
    seed = int(rng.integers(2**31))
    with threadpool_limits(1):  # several threads would add in any order
        labels = KMeans(k, n_init=RESTARTS, random_state=seed).fit_predict(units)
    return numbered([np.flatnonzero(labels == c).tolist() for c in range(k)])
