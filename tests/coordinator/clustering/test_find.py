"""One signature for all clusterings: what each is made for, and how many clusters the rivals make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.clustering import aidc
from coordinator.clustering.find import Directions, Profiles, by_label, find_clusters
from coordinator.clustering.geometry import compute_embedding
from coordinator.clustering.mctc import mctc

GROUPS = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def planted(seed: int = 0) -> np.ndarray:
    """Nine rows in three groups, in [0, 1]."""
    rng = np.random.default_rng(seed)
    return np.repeat(np.eye(3, 12) + np.eye(3, 12, 3), 3, axis=0) * 0.8 + rng.uniform(0, 0.05, (9, 12))


def features() -> list[Profiles | Directions]:
    rows = planted()
    return [
        Profiles(vectors=rows, unit=aidc.compute_class_unit(rows[::3])),
        Directions(vectors=compute_embedding(rows)),
    ]


@pytest.mark.parametrize("how", ["k-means", "agglomerative"])
def test_planted_groups_are_found_in_what_each_is_made_for(how) -> None:
    for own, seen in zip(("aidc", "mctc"), features(), strict=True):
        assert find_clusters(own, seen, rng=np.random.default_rng(0)).clusters == GROUPS
        assert find_clusters(how, seen, rng=np.random.default_rng(0)).clusters == GROUPS
    assert by_label((4, 4, 4, 0, 0, 0, 2, 2, 2)) == GROUPS


@given(st.lists(st.integers(-1, 4), max_size=20))
def test_devices_share_a_cluster_just_where_they_share_a_label(features) -> None:
    found = by_label(features)
    cluster_of = {i: k for k, cluster in enumerate(found) for i in cluster}
    assert sorted(cluster_of) == [i for i, feature in enumerate(features) if feature >= 0]
    for i, own in cluster_of.items():
        for j, other in cluster_of.items():
            assert (own == other) == (features[i] == features[j])
    assert [min(cluster) for cluster in found] == sorted(min(cluster) for cluster in found)


def test_nobody_and_nobody_with_samples_has_a_label() -> None:
    assert by_label([]) == ()
    assert by_label([-1, -1]) == ()


@pytest.mark.parametrize("how", ["k-means", "agglomerative"])
def test_rivals_make_as_many_clusters_as_told_or_as_the_papers_own(how) -> None:
    profiles, directions = features()
    for seen in (profiles, directions):
        for k in (1, 2, 5):
            assert len(find_clusters(how, seen, rng=np.random.default_rng(0), n_clusters=k).clusters) == k
    noise = Directions(vectors=compute_embedding(np.random.default_rng(3).normal(size=(20, 8))), n_clusters=6)
    own = find_clusters("mctc", noise, rng=np.random.default_rng(0))
    rival = find_clusters(how, noise, rng=np.random.default_rng(0))
    assert len(rival.clusters) == len(own.clusters) > 1
    assert (rival.tau, rival.separability) == (own.tau, own.separability)
    assert sorted(i for cluster in rival.clusters for i in cluster) == list(range(20)), "a partition"


def test_average_linkage_of_profiles_stops_at_the_threshold() -> None:
    """fedepc.md 4.4: where DBSCAN finds noise alone, AIDC is average linkage up to theta_merge."""
    rows = planted()
    seen = Profiles(vectors=rows, unit=100.0)  # by which all are closer than theta_merge
    assert find_clusters("agglomerative", seen, rng=np.random.default_rng(0)).clusters == (tuple(range(9)),)
    assert len(find_clusters("k-means", seen, rng=np.random.default_rng(0)).clusters) == 1


def test_mctc_is_what_the_module_of_that_name_finds() -> None:
    z = compute_embedding(np.random.default_rng(1).normal(size=(15, 30)))
    seen = Directions(vectors=z, n_clusters=4, tau=0.1, distinct=False, centres_join=False)
    expected = mctc(z, n_clusters=4, tau=0.1, distinct=False, centres_join=False)
    found = find_clusters("mctc", seen, rng=np.random.default_rng(0))
    assert (found.clusters, found.tau) == (expected.clusters, expected.tau)


def test_a_row_without_direction_is_no_fault() -> None:
    rows = planted()
    rows[4] = 0
    found = find_clusters(
        "agglomerative", Directions(vectors=compute_embedding(rows)), rng=np.random.default_rng(0), n_clusters=4
    )
    assert (4,) in found.clusters
