"""Clusterings of devices: `find_clusters`, and `by_label`; all are found by entry point (`GROUP`), fedge's own, too.

Each kind of features has its paper's clustering: profiles have AIDC (FedEPC), directions of updates MCTC (SCMoE-PFL),
label features the groups of equal label (CFIC). The rivals `k-means` and `agglomerative` take profiles or directions.
By default rivals make as many clusters as the paper's own clustering, so that the number makes no difference
(scmoe_pfl.md section 14). Average linkage of profiles stops at theta_merge, like AIDC without its density step
(fedepc.md 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, TypeAlias, cast

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from coordinator.clustering import aidc, geometry, mctc
from coordinator.clustering.aidc import Clusters
from coordinator.clustering.mctc import ClusteringResult
from coordinator.clustering.rivals import agglomerative, kmeans
from fedge.errors import ConfigError
from fedge.system.loading import FAILURES, describe_error, load_named
from fedge.system.moved import alias_members

Vectors = NDArray[np.float64]

GROUP: Final = "fedge.clusterings"
"""Entry points of installed packages, ours among them, that name a clustering each."""
OURS: Final = ("aidc", "mctc", "labels", "k-means", "agglomerative")


def offer_clusterings(*ours: str) -> Meta:
    """Return the type of an option that names one of these clusterings, or one of another package."""
    return Meta(extra={"offers": ours})


Clustering = Annotated[str, offer_clusterings(*OURS)]


@alias_members(distances="compute_distances", own="cluster_by_paper")
@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """ReLU-sparsity profiles (N, q), N >= 1, and their unit D_ref (FedEPC section 4)."""

    vectors: Vectors
    unit: float

    def cluster_by_paper(self, rng: np.random.Generator) -> ClusteringResult:
        """Cluster the devices by AIDC."""
        return ClusteringResult(aidc.aidc(self.vectors, unit=self.unit, rng=rng))

    def compute_distances(self) -> Vectors:
        """Compute the divergences in units of D_ref, (N, N)."""
        return aidc.compute_divergences(self.vectors, unit=self.unit)


@alias_members(distances="compute_distances", own="cluster_by_paper")
@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """Embedded unit updates (N, m), N >= 1, and the settings of MCTC (SCMoE-PFL sections 5 to 7); see `mctc.mctc`."""

    vectors: Vectors
    n_clusters: int = 8  # at most
    tau: float | None = None
    distinct: bool = True
    centres_join: bool = True

    def cluster_by_paper(self, rng: np.random.Generator) -> ClusteringResult:  # noqa: ARG002 - nothing is drawn
        """Cluster the devices by MCTC."""
        return mctc.mctc(
            self.vectors,
            n_clusters=self.n_clusters,
            tau=self.tau,
            distinct=self.distinct,
            centres_join=self.centres_join,
        )

    def compute_distances(self) -> Vectors:
        """Compute the distances 1 - cosine, (N, N)."""
        away = 1.0 - geometry.compute_similarity(self.vectors)
        np.fill_diagonal(away, 0.0)  # also for a row of zeros
        return away


def by_label(features: Sequence[int]) -> Clusters:
    """Devices with equal label feature (CFIC section 3); one without, which is -1, is in no cluster."""
    psi = np.array(features, np.int64)
    return aidc.number_clusters([np.flatnonzero(psi == label).tolist() for label in np.unique(psi[psi >= 0])])


Features: TypeAlias = Profiles | Directions
Clusterer: TypeAlias = Callable[[Features, int | None, np.random.Generator], ArrayLike | ClusteringResult]
"""(features of N devices, by ascending id; number of clusters, to be found if None; random numbers) -> the number of
each device's cluster, (N,), or for overlapping clusters a `ClusteringResult`."""


def load_clusterer(how: str) -> Clusterer:
    """Load the clustering of that name or path (`package.module:function`).

    Raises:
        ConfigError: there is no such clustering; the text lists the installed ones.
    """
    found = load_named(how, GROUP, "clustering")
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{how} is no clustering: it must be a function (features, n_clusters, rng)")
    return cast("Clusterer", found)


def find_clusters(
    how: str, features: Features, *, rng: np.random.Generator, n_clusters: int | None = None
) -> ClusteringResult:
    """Cluster N devices.

    Args:
        how: the clustering, not labels; a paper's clustering takes its own kind of features.
        features: features of the devices, by ascending id.
        rng: for k-means' starts and AIDC's subset.
        n_clusters: for the rivals, >= 1; by default as many as the paper's clustering.

    Raises:
        ConfigError: there is no such clustering, or it fails, or does not put each device into one cluster.

    Example:
        >>> angles = np.radians([0, 10, 90, 100])
        >>> seen = Directions(vectors=np.stack([np.cos(angles), np.sin(angles)], axis=1))
        >>> [find_clusters(how, seen, rng=np.random.default_rng(0)).clusters for how in ("mctc", "k-means")]
        [((0, 1), (2, 3)), ((0, 1), (2, 3))]
    """
    cluster = load_clusterer(how)
    try:
        partition = cluster(features, n_clusters, rng)
        if isinstance(partition, ClusteringResult):
            return partition
        labels = np.asarray(partition)
    except FAILURES as error:
        raise ConfigError(f"clustering {how} failed: {describe_error(error)}") from error
    n = len(features.vectors)
    if labels.shape != (n,) or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"clustering {how} gave {labels.dtype} of shape {labels.shape} for {n} devices: it must give the number of "
            f"each device's cluster, whole numbers of shape ({n},)"
        )
    seen = features.cluster_by_paper(rng) if isinstance(features, Directions) else ClusteringResult(())
    return replace(
        seen, clusters=aidc.number_clusters([np.flatnonzero(labels == k).tolist() for k in np.unique(labels)])
    )


# --------------------------------------------------------------------------------- ours, as entry points name them


def by_paper(features: Features, n_clusters: int | None, rng: np.random.Generator) -> ClusteringResult:  # noqa: ARG001
    """Profiles are clustered by AIDC, directions of updates by MCTC; both find the number of clusters."""
    return features.cluster_by_paper(rng)


def by_k_means(features: Features, n_clusters: int | None, rng: np.random.Generator) -> ClusteringResult:
    """Directions of vectors are clustered by k-means; by default it makes as many clusters as the paper's own."""
    found, k = _count_clusters(features, n_clusters, rng)
    return replace(found, clusters=kmeans(features.vectors, n_clusters=k, rng=rng))


def by_linkage(features: Features, n_clusters: int | None, rng: np.random.Generator) -> ClusteringResult:
    """The two nearest clusters are united again and again (average linkage)."""
    if n_clusters is None and isinstance(features, Profiles):
        return ClusteringResult(agglomerative(features.compute_distances(), threshold=aidc.MERGE))
    found, k = _count_clusters(features, n_clusters, rng)
    return replace(found, clusters=agglomerative(features.compute_distances(), n_clusters=k))


def _count_clusters(
    features: Features, n_clusters: int | None, rng: np.random.Generator
) -> tuple[ClusteringResult, int]:
    """Return the paper's own clusters, if the number is not given, and the number of clusters."""
    found = features.cluster_by_paper(rng) if n_clusters is None else ClusteringResult(())
    return found, len(found.clusters) if n_clusters is None else n_clusters
