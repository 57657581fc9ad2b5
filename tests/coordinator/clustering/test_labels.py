"""Clusters by label feature."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.clustering.labels import by_label


@given(st.lists(st.integers(-1, 4), max_size=20))
def test_devices_share_a_cluster_just_where_they_share_a_label(features) -> None:
    found = by_label(features)
    cluster_of = {i: k for k, cluster in enumerate(found) for i in cluster}
    assert sorted(cluster_of) == [i for i, feature in enumerate(features) if feature >= 0]
    for i, own in cluster_of.items():
        for j, other in cluster_of.items():
            assert (own == other) == (features[i] == features[j])
    assert [min(cluster) for cluster in found] == sorted(min(cluster) for cluster in found)


def test_nobody_and_nobody_with_samples() -> None:
    assert by_label([]) == ()
    assert by_label([-1, -1]) == ()
