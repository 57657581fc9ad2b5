"""Sums on sites: what a site is asked, and what it computes."""

import numpy as np

from coordinator.aggregation import average_clusters
from coordinator.fleet.sites import SiteMean, SiteSums, average_updates
from fedge.tensors.layout import Layout, Model, TensorInfo
from fedge.wire.messages import BlobRef

LAYOUT = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))
UPDATES = {f"s.d{k}": Model(np.float32([k, 1]), np.zeros(0, np.float32), np.zeros(0, np.int64)) for k in range(4)}
REFS = {i: BlobRef(digest=f"{k:064x}", size_bytes=8) for k, i in enumerate(UPDATES)}
WEIGHTS = {i: k + 1.0 for k, i in enumerate(UPDATES)}
CLUSTERS = [{"s.d0": (1.0, 1.0), "s.d3": (0.5, 1.0), "t.d9": (1.0, 1.0)}, {}, dict.fromkeys(UPDATES, (1.0, 1.0))]
READ = {REFS[i].digest: update for i, update in UPDATES.items()}


def request(*directions: str) -> SiteSums:
    return SiteSums(layout=LAYOUT, updates=REFS, weights=WEIGHTS, sums=tuple(CLUSTERS), directions=directions)


def test_a_site_is_asked_for_its_own_devices_by_their_own_names() -> None:
    wanted = request("s.d1", "t.d9").narrow_to(REFS, prefix="s.")
    assert wanted.sums[:2] == ({"d0": (1.0, 1.0), "d3": (0.5, 1.0)}, {})
    assert wanted.directions == ("d1",)
    assert list(wanted.updates) == list(wanted.weights) == ["d0", "d1", "d2", "d3"]


def test_the_means_of_two_sites_are_the_mean_of_all() -> None:
    halves = [dict(list(REFS.items())[:2]), dict(list(REFS.items())[2:])]
    found = []
    for own in halves:
        means, directions = average_updates(request("s.d0").narrow_to(own), own, lambda ref: READ[ref.digest])
        assert means[1] is None
        assert list(directions) == [i for i in own if i == "s.d0"]
        found += [SiteMean(k, mean, tuple(own)) for k, mean in enumerate(means) if mean is not None]
    whole = [mean for mean in found if mean.cluster == 2]
    (mean,) = average_clusters(
        [m.model for m in whole], [sum(WEIGHTS[i] for i in m.devices) for m in whole], [range(2)], LAYOUT
    )
    assert mean is not None
    np.testing.assert_allclose(mean.params, [(0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10, 1])
    factored = [mean for mean in found if mean.cluster == 0]
    np.testing.assert_allclose([m.model.params for m in factored], [[0, 1], [1.5, 0.5]])


def test_what_is_missing_counts_nowhere() -> None:
    wanted = request()
    (first, _, whole), _ = average_updates(wanted, ["s.d3", "s.d2"], lambda ref: READ[ref.digest])
    assert first is not None
    assert whole is not None
    assert (first.n_samples, whole.n_samples) == (4.0, 7.0)
