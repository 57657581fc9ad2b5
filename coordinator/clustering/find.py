"""Clusterings of devices: `find_clusters`, and `by_label`.

Each kind of features has its paper's clustering: profiles have AIDC (FedEPC), directions of updates MCTC (SCMoE-PFL),
label features the groups of equal label (CFIC). The rivals `k-means` and `agglomerative` take profiles or directions.
By default they make as many clusters as the paper's own, so that the number makes no difference (scmoe_pfl.md section
14). Average linkage of profiles stops at theta_merge: AIDC without its density step (fedepc.md 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering import aidc, geometry, mctc
from coordinator.clustering.aidc import Clusters
from coordinator.clustering.mctc import Found
from coordinator.clustering.rivals import agglomerative, kmeans

Vectors = NDArray[np.float64]
Clustering = Literal["aidc", "mctc", "labels", "k-means", "agglomerative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """ReLU-sparsity profiles (N, q), N >= 1, and their unit D_ref (FedEPC section 4)."""

    vectors: Vectors
    unit: float

    def own(self, rng: np.random.Generator) -> Found:
        """AIDC."""
        return Found(aidc.aidc(self.vectors, unit=self.unit, rng=rng))

    def distances(self) -> Vectors:
        """Divergences in units of D_ref, (N, N)."""
        return aidc.divergence_matrix(self.vectors, unit=self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """Embedded unit updates (N, m), N >= 1, and the settings of MCTC (SCMoE-PFL sections 5 to 7); see `mctc.mctc`."""

    vectors: Vectors
    n_clusters: int = 8  # at most
    tau: float | None = None
    distinct: bool = True
    centres_join: bool = True

    def own(self, rng: np.random.Generator) -> Found:  # noqa: ARG002 - nothing is drawn
        """MCTC."""
        return mctc.mctc(
            self.vectors,
            n_clusters=self.n_clusters,
            tau=self.tau,
            distinct=self.distinct,
            centres_join=self.centres_join,
        )

    def distances(self) -> Vectors:
        """1 - cosine, (N, N)."""
        away = 1.0 - geometry.similarity(self.vectors)
        np.fill_diagonal(away, 0.0)  # of a row of zeros, too
        return away


def by_label(features: Sequence[int]) -> Clusters:
    """Devices with equal label feature (CFIC section 3); one without, which is -1, is in no cluster."""
    psi = np.array(features, np.int64)
    return aidc.numbered([np.flatnonzero(psi == label).tolist() for label in np.unique(psi[psi >= 0])])


Features: TypeAlias = Profiles | Directions


def find_clusters(
    how: Clustering, features: Features, *, rng: np.random.Generator, n_clusters: int | None = None
) -> Found:
    """Cluster N devices.

    Args:
        how: the clustering, not labels; that of a paper takes its own kind of features.
        features: of the devices, by ascending id.
        rng: of k-means' starts and AIDC's subset.
        n_clusters: of the rivals, >= 1; None: see above.

    Example:
        >>> angles = np.radians([0, 10, 90, 100])
        >>> seen = Directions(vectors=np.stack([np.cos(angles), np.sin(angles)], axis=1))
        >>> [find_clusters(how, seen, rng=np.random.default_rng(0)).clusters for how in ("mctc", "k-means")]
        [((0, 1), (2, 3)), ((0, 1), (2, 3))]
    """
    if how in {"aidc", "mctc"}:
        return features.own(rng)
    if how == "agglomerative" and n_clusters is None and isinstance(features, Profiles):
        return Found(agglomerative(features.distances(), threshold=aidc.MERGE))
    found = features.own(rng) if n_clusters is None else Found(())
    k = len(found.clusters) if n_clusters is None else n_clusters
    if how == "k-means":
        return replace(found, clusters=kmeans(features.vectors, n_clusters=k, rng=rng))
    return replace(found, clusters=agglomerative(features.distances(), n_clusters=k))
