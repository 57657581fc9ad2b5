"""AIDC: worked numbers and properties of fedepc.md sections 4, 8.1 and 10."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from coordinator.clustering import aidc
from coordinator.clustering.aidc import MERGE, SPLIT, Place

ROOT = Path(__file__).parents[3]

profile_sets = arrays(
    np.float64,
    st.tuples(st.integers(0, 9), st.integers(1, 4)),
    elements=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.9, 1.0]),
)


def matrix(*upper):
    """Symmetric matrix with zero diagonal from its upper triangle, row by row."""
    n = (1 + math.isqrt(1 + 8 * len(upper))) // 2
    d = np.zeros((n, n))
    d[np.triu_indices(n, 1)] = upper
    return d + d.T


def labels(clusters):
    found = np.empty(sum(map(len, clusters)), int)
    for k, cluster in enumerate(clusters):
        found[list(cluster)] = k
    return found


def assert_sound(clusters, distances):
    n = len(distances)
    assert sorted(i for c in clusters for i in c) == list(range(n))
    assert list(clusters) == sorted(tuple(sorted(c)) for c in clusters)
    assert all(heterogeneity(distances, c) <= SPLIT + 1e-9 for c in clusters)
    for k, a in enumerate(clusters):
        assert all(between(distances, a, b) >= MERGE - 1e-9 for b in clusters[:k])


# ------------------------------------------------------------------------------------------------------- divergence


def heterogeneity(distances, members):
    """het(C), the mean of D_ij over all pairs of C, the diagonal included, (8)."""
    index = list(members)
    return float(distances[np.ix_(index, index)].mean())


def between(distances, a, b):
    """Mean of D_ij over i in A, j in B, (7)."""
    return float(distances[np.ix_(list(a), list(b))].mean())


def slow_divergence(s, r):
    def h(a, b):
        return max(0, sum(0.5 * x * math.log(2 * x / (a + b)) for x in (a, b) if x > 0))

    p, o = (x / x.sum() if x.sum() else np.full(len(x), 1 / len(x)) for x in (s, r))
    return sum(map(h, p, o)) + sum(map(h, s, r)) / len(s)


WORKED = [
    ([1, 0], [0, 1], 1.039721),
    ([0.2, 0.8], [0.8, 0.2], 0.289117),
    ([0.2, 0.4], [0.4, 0.8], 0.025485),
    ([0, 0], [0.5, 0.5], 0.173287),
    ([0, 0], [0, 0], 0),
]


@pytest.mark.parametrize(("s", "r", "expected"), WORKED)
def test_worked_divergences(s, r, expected):
    found = aidc.compute_divergences(np.array([s, r], float), unit=1.0)
    np.testing.assert_allclose(found, [[0, expected], [expected, 0]], atol=5e-7)


@given(profile_sets)
@settings(max_examples=40, deadline=None)
def test_divergence_matrix_is_the_slow_one_and_a_squared_metric(profiles):
    n = len(profiles)
    found = aidc.compute_divergences(profiles, unit=0.5)
    slow = [
        [slow_divergence(s, r) / 0.5 if i != j else 0 for j, r in enumerate(profiles)] for i, s in enumerate(profiles)
    ]
    np.testing.assert_allclose(found, np.reshape(slow, (n, n)), atol=1e-12)
    np.testing.assert_array_equal(found, found.T)
    assert (0.5 * found <= 2 * math.log(2) + 1e-12).all()
    root = np.sqrt(found)
    assert all((root <= root[:, [k]] + root[[k], :] + 1e-7).all() for k in range(n))
    order = np.random.default_rng(0).permutation(profiles.shape[1])
    np.testing.assert_allclose(aidc.compute_divergences(profiles[:, order], unit=0.5), found, atol=1e-12)


def test_matrix_in_blocks_of_rows():
    profiles = np.random.default_rng(0).random((300, 40))
    assert 8 * len(profiles) * profiles.size > 20 * aidc.BLOCK_BYTES
    whole = aidc.compute_divergence(profiles[:, None], profiles[None])
    np.fill_diagonal(whole, 0.0)
    np.testing.assert_allclose(aidc.compute_divergences(profiles, unit=1.0), whole, rtol=1e-12)


def test_units():
    classes = np.eye(3)
    one = math.log(2) + math.log(2) / 3  # D_raw of two different rows
    assert aidc.compute_class_unit(classes) == pytest.approx(one, abs=1e-6)
    assert aidc.compute_divergences(classes, unit=aidc.compute_class_unit(classes))[0, 1] == pytest.approx(1.0)
    assert aidc.compute_halves_unit([0.01, 0.03]) == pytest.approx(12 * 0.02 / 2)
    assert aidc.compute_halves_unit([0.0, 0.02, 1e6]) == pytest.approx(12 * 0.02 / 2), "a zero removes no bound"
    for useless in (np.ones((2, 3)), np.eye(3)[:1]):
        with pytest.raises(ValueError, match=r"unit"):
            aidc.compute_class_unit(useless)
    for halves in ([], [0.0, 0.0]):
        with pytest.raises(ValueError, match=r"D_ref|halve"):
            aidc.compute_halves_unit(halves)


def test_bad_profiles_and_parameters_are_refused():
    for wrong in ([[0.5, np.nan]], [[1.1, 0]], [[-0.1, 0]]):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            aidc.aidc(np.array([*wrong, [0, 0]]), unit=1.0)
    with pytest.raises(ValueError, match="D_ref"):
        aidc.aidc(np.eye(2), unit=0.0)


# ----------------------------------------------------------------------------------------- self-chosen parameters


def test_worked_parameters():
    h = aidc.entropy(np.full((4, 3), 0.5))
    assert h == pytest.approx(0.942085, abs=5e-7)
    sizes = dict.fromkeys(range(2, 9), 2) | {20: 3, 50: 4, 100: 5, 150: 6, 1000: 7}
    assert {n: aidc.compute_min_samples(n, h) for n in sizes} == sizes
    d = matrix(0.1, 0.4, 0.3)
    assert aidc.compute_radius(d, 2) == pytest.approx(0.260948, abs=5e-7)
    assert aidc.compute_radius(d, 3) == pytest.approx(0.413807, abs=5e-7)
    assert aidc.compute_radius(d, 9) == aidc.compute_radius(d, 3)  # the largest one available


def test_worked_clusters():
    profiles = np.array(
        [[0.9, 0.1, 0.2, 0.1], [0.8, 0.2, 0.2, 0.2], [0.1, 0.9, 0.2, 0.1], [0.2, 0.8, 0.1, 0.2], [0.15, 0.9, 0.2, 0.2]]
    )
    d = aidc.compute_divergences(profiles, unit=0.3)
    assert [d[0, 1], d[2, 3], d[2, 4], d[3, 4]] == pytest.approx([0.059, 0.092, 0.031, 0.033], abs=5e-4)
    assert (d[:2, 2:].min(), d[:2, 2:].max()) == pytest.approx((0.662, 1.250), abs=5e-4)
    h, eps = aidc.entropy(profiles), aidc.compute_radius(d, 2)
    assert (h, aidc.compute_min_samples(5, h), eps) == pytest.approx((0.676085, 2, 0.055911), abs=5e-7)
    assert aidc.cluster_by_density(d, eps, 2).tolist() == [-1, -1, 0, 0, 0]
    assert aidc.aidc(profiles, unit=0.3) == ((0, 1), (2, 3, 4))


def test_entropy_is_zero_where_nothing_is_uncertain_and_at_most_one():
    assert aidc.entropy(np.array([[0.0, 1.0]])) == 0.0
    assert aidc.entropy(np.full((2, 2), 1 / math.e)) == pytest.approx(1.0)
    assert aidc.entropy(np.full((2, 2), 1 / math.e)) <= 1.0


# ---------------------------------------------------------------------------------------------------------- DBSCAN


def test_scikit_learn_is_loaded_by_the_first_clustering_only():
    """It takes 100 MB of the coordinator's memory."""
    code = (
        "import sys, coordinator.clustering.aidc, coordinator.clustering.mctc, coordinator.selection.ccmab\n"
        "import coordinator.aggregation\n"
        "sys.exit(bool({'sklearn', 'scipy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def slow_dbscan(d, eps, min_points):
    """Section 4.3 word by word: ascending visits, breadth-first growth, a border device goes to the first cluster."""
    n = len(d)
    near = [[j for j in range(n) if d[i, j] <= eps] for i in range(n)]
    found, k = [-1] * n, 0
    for i in range(n):
        if found[i] >= 0 or len(near[i]) < min_points:
            continue
        found[i], queue = k, [i]
        while queue:
            at = queue.pop(0)
            for j in near[at] if len(near[at]) >= min_points else ():
                if found[j] < 0:
                    found[j] = k
                    queue.append(j)
        k += 1
    return found


@given(st.integers(0, 10**6), st.integers(2, 14), st.integers(2, 5))
@settings(max_examples=80, deadline=None)
def test_dbscan_visits_in_the_order_of_the_specification(seed, n, min_points):
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 12, (n, 1)).astype(float)  # on a grid: distances tie, borders are shared
    d = np.abs(points - points.T)
    eps = float(rng.integers(0, 4))
    assert aidc.cluster_by_density(d, eps, min_points).tolist() == slow_dbscan(d, eps, min_points)


def test_a_border_device_belongs_to_the_first_cluster_that_reaches_it():
    points = np.array([[0.0], [1], [2], [5], [6], [7], [3.5]])  # the last is within 1.5 of 2 and of 5
    d = np.abs(points - points.T)
    assert aidc.cluster_by_density(d, 1.5, 4).tolist() == slow_dbscan(d, 1.5, 4)
    assert aidc.cluster_by_density(d, 1.5, 3).tolist() == [0] * 7  # there it is a core device and bridges


# ----------------------------------------------------------------------------------------------- split, noise, merge


def test_split_parts_around_the_most_distant_pair():
    d = matrix(0.1, 0.9, 0.9, 0.9, 0.9, 0.1)  # 0, 1 | 2, 3
    assert aidc.split(d, [0, 1, 2, 3], 0.18) == ((0, 1), (2, 3))
    assert aidc.split(d, [0, 1, 2, 3], 0.6) == ((0, 1, 2, 3),)
    assert aidc.split(d, [3], 0.18) == ((3,),)


def test_split_ties_take_the_smallest_pair_and_the_nearer_half_is_inclusive():
    # (0, 2) and (1, 2) are equally far; 0 and 2 part, and 1 is nearer to 0. 3 is in the middle: D_ia <= D_ib.
    d = matrix(0.3, 0.9, 0.5, 0.9, 0.5, 0.5)
    assert aidc.split(d, [0, 1, 2, 3], 0.4) == ((0, 1, 3), (2,))


def test_at_exactly_a_threshold_rounding_decides_nothing():
    """0.1 + 0.1 + 0.1 is 0.30000000000000004."""
    assert aidc.place_noise(matrix(0.1, 0.1, 0.1), [[0, 1]], [2], (0.1 + 0.1 + 0.1) / 3 - 1e-17) == ((0, 1, 2),)
    d = matrix(*[0.1 + 0.1 + 0.1] * 3)
    assert aidc.split(d, [0, 1, 2], 0.2) == ((0, 1, 2),)  # 6 of 9 pairs: 0.2
    assert aidc.place_noise(matrix(0.1, 0.1 + 0.2, 0.1 + 0.2), [[0, 1]], [2], 0.3) == ((0, 1, 2),)
    assert aidc.merge(matrix(0.1 * 3 - 2e-16), [[0], [1]], 0.3) == ((0,), (1,)), "at the threshold they stay apart"
    equal = np.full((6, 6), 0.3) - 0.3 * np.eye(6)
    assert not aidc.cluster_by_density(equal, np.mean([0.3] * 6) - 1e-16, 3).any(), "a radius that is their distance"


def test_split_peels_devices_one_by_one():
    assert aidc.split(np.ones((40, 40)) - np.eye(40), range(40), 0.1) == tuple((i,) for i in range(40))


def test_noise_joins_the_nearest_founds_and_is_joined():
    d = matrix(0.1, 0.15, 0.9, 0.9, 0.15, 0.9, 0.9, 0.9, 0.9, 0.05)
    assert aidc.place_noise(d, [[0, 1]], [2, 3, 4], 0.18) == ((0, 1, 2), (3, 4))
    assert aidc.place_noise(d, [], [0, 1, 2, 3, 4], 0.18) == ((0, 1, 2), (3, 4))


def test_noise_needs_both_conditions():
    # between({2}, {0, 1}) = 0.17 <= 0.18, but het({0, 1, 2}) = 2 (0.3 + 0.34)/9 would be 0.142: it joins.
    d = matrix(0.3, 0.17, 0.17)
    assert aidc.place_noise(d, [[0, 1]], [2], 0.18) == ((0, 1, 2),)
    d = matrix(0.3, 0.19, 0.19)
    assert aidc.place_noise(d, [[0, 1]], [2], 0.18) == ((0, 1), (2,))
    d = matrix(0.7, 0.17, 0.17)  # het({0, 1, 2}) = 2 (0.7 + 0.34)/9 = 0.231
    assert aidc.place_noise(d, [[0, 1]], [2], 0.18) == ((0, 1), (2,))


def test_noise_ties_take_the_earliest_cluster():
    d = matrix(0.9, 0.1, 0.1)
    assert aidc.place_noise(d, [[1], [0]], [2], 0.18) == ((0, 2), (1,))


def test_merge_is_exclusive_and_takes_the_nearest_pair_first():
    d = matrix(0.15, 0.9, 0.9)
    assert aidc.merge(d, [[0], [1], [2]], 0.15) == ((0,), (1,), (2,))
    assert aidc.merge(d, [[0], [1], [2]], 0.1500001) == ((0, 1), (2,))
    d = matrix(0.12, 0.10, 0.16)  # 0 and 2 first; then between({0, 2}, {1}) = 0.14
    assert aidc.merge(d, [[0], [1], [2]], 0.13) == ((0, 2), (1,))
    assert aidc.merge(d, [[0], [1], [2]], 0.15) == ((0, 1, 2),)


def test_merge_ties_take_the_clusters_with_the_smallest_members():
    d = matrix(0.1, 0.1 - 1e-14, 0.3)  # (0, 1) and (0, 2) tie within 1e-12
    assert aidc.merge(d, [[0], [1], [2]], 0.15) == ((0, 1), (2,))


def slow_merge(d, clusters, theta):
    clusters = sorted(map(sorted, clusters))
    while len(clusters) > 1:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a + 1, len(clusters))]
        means = [d[np.ix_(clusters[a], clusters[b])].mean() for a, b in pairs]
        if min(means) >= theta:
            break
        a, b = next(p for p, m in zip(pairs, means, strict=True) if m <= min(means) + 1e-12)
        clusters = sorted([c for k, c in enumerate(clusters) if k not in (a, b)] + [sorted(clusters[a] + clusters[b])])
    return tuple(map(tuple, clusters))


@given(st.integers(0, 10**6), st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_merge_agrees_with_the_slow_one(seed, n):
    d = np.random.default_rng(seed).random((n, n))
    d = np.triu(d, 1) + np.triu(d, 1).T
    assert aidc.merge(d, [[i] for i in range(n)], 0.5) == slow_merge(d, [[i] for i in range(n)], 0.5)


# ------------------------------------------------------------------------------------------------------ whole of AIDC


@given(profile_sets, st.sampled_from([0.02, 0.2, 1.0]))
@settings(max_examples=100, deadline=None)
def test_result_is_sound_for_any_input(profiles, unit):
    groups = aidc.aidc(profiles, unit=unit)
    assert_sound(groups, aidc.compute_divergences(profiles, unit=unit))
    assert groups == aidc.aidc(profiles, unit=unit)
    found = labels(groups) if len(profiles) else []
    for i in range(len(profiles)):
        for j in range(i):
            if (profiles[i] == profiles[j]).all():
                assert found[i] == found[j]


@given(profile_sets, st.sampled_from([0.5, 4.0]))  # powers of two scale without rounding: ties stay ties
@settings(max_examples=40, deadline=None)
def test_unit_and_thresholds_scale_alike(profiles, factor):
    plain = aidc.aidc(profiles, unit=0.3, thresholds=(0.15317, 0.18419))
    scaled = aidc.aidc(profiles, unit=0.3 / factor, thresholds=(0.15317 * factor, 0.18419 * factor))
    assert scaled == plain


def test_edge_cases():
    assert aidc.aidc(np.zeros((0, 3)), unit=1.0) == ()
    assert aidc.aidc(np.ones((1, 3)), unit=1.0) == ((0,),)
    assert aidc.aidc(np.full((5, 3), 0.4), unit=1.0) == ((0, 1, 2, 3, 4),)  # with a radius of 0
    two = np.array([[0.2, 0.8], [0.8, 0.2]])  # D_raw = 0.289117; they part if D > 2 theta_split
    assert aidc.aidc(two, unit=0.289117 / 0.359) == ((0, 1),)
    assert aidc.aidc(two, unit=0.289117 / 0.361) == ((0,), (1,))


def mixture(rng, n, q=32, groups=4, spread=0.02):
    """Profiles in well separated groups, and the groups."""
    centres = rng.random((groups, q))
    truth = rng.integers(0, groups, n)
    return np.clip(centres[truth] + spread * rng.standard_normal((n, q)), 0, 1), truth, aidc.compute_class_unit(centres)


@pytest.mark.parametrize("seed", range(3))
def test_separable_mixtures_are_recovered(seed):
    profiles, truth, unit = mixture(np.random.default_rng(seed), 60)
    assert adjusted_rand_score(truth, labels(aidc.aidc(profiles, unit=unit))) == 1.0


def test_many_devices_go_through_anchors():
    rng = np.random.default_rng(1)
    profiles, truth, unit = mixture(rng, 2300)
    stranger = np.where(np.arange(32) % 2, 1.0, 0.0)
    profiles = np.vstack([profiles, stranger[None]])  # founds its own cluster, or was drawn as an anchor
    groups = aidc.aidc(profiles, unit=unit, rng=np.random.default_rng(0))
    assert sorted(i for c in groups for i in c) == list(range(2301))
    assert adjusted_rand_score([*truth, 4], labels(groups)) == 1.0
    anchors = sorted(np.random.default_rng(0).choice(2301, size=aidc.ANCHORS, replace=False).tolist())
    d = aidc.compute_divergences(profiles[anchors], unit=unit)
    inner = [[anchors.index(i) for i in c if i in anchors] for c in groups]
    assert all(heterogeneity(d, c) <= 0.18 for c in inner if c)
    assert groups == aidc.aidc(profiles, unit=unit, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="random generator"):
        aidc.aidc(profiles, unit=unit)


# ----------------------------------------------------------------------------------------------------- joins, leaves


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_placement_keeps_clusters_homogeneous(seed):
    rng = np.random.default_rng(seed)
    profiles, _, unit = mixture(rng, 12, q=8, spread=0.1)
    clusters = aidc.aidc(profiles[:-1], unit=unit)
    spot = aidc.place(profiles[-1], [profiles[list(c)] for c in clusters], unit=unit)
    d = aidc.compute_divergences(profiles, unit=unit)
    means = [between(d, [11], c) for c in clusters]
    assert spot.nearest == int(np.argmin(means))
    joined = (*clusters[spot.nearest], 11)
    fits = min(means) <= 0.18 and heterogeneity(d, joined) <= 0.18
    assert spot.cluster == (spot.nearest if fits else None)


def test_the_first_new_device_founds():
    assert aidc.place(np.ones(3), (), unit=1.0) == Place(None, None)


def test_changed_data():
    s, r = np.array([0.2, 0.8]), np.array([0.8, 0.2])  # D_raw = 0.289117
    assert aidc.has_changed(s, r, unit=0.289117 / 0.151)
    assert not aidc.has_changed(s, r, unit=0.289117 / 0.149)
    assert not aidc.has_changed(s, s, unit=0.001)


def test_reclustering_above_a_fifth():
    assert not aidc.needs_reclustering(2, 10)
    assert aidc.needs_reclustering(3, 10)
    assert not aidc.needs_reclustering(0, 0)


def test_a_bandit_is_that_of_the_cluster_with_the_largest_overlap():
    assert aidc.inherit(old=["abc", "de"], new=["ade", "b", "cf", "g", "ad"]) == (1, 0, 0, None, 0)
    assert aidc.inherit(old=[], new=["a"]) == (None,)


# ------------------------------------------------------------------------------------------------- planted groups, 8.1


def trained_extractor(x, y, seed):
    """The network of section 8, trained as FedEPC's extractor is: outputs of its 64 ReLU units for images."""
    import torch

    from coordinator.methods.server import extractor_training as extractor

    torch.manual_seed(seed)
    body = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 64),
        torch.nn.ReLU(),
    )
    head = torch.nn.Linear(64, 10)
    sgd = extractor.SGD
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=sgd.learning_rate, momentum=sgd.momentum)
    for _ in range(extractor.EPOCHS):
        for batch in torch.randperm(len(x)).split(sgd.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(body(x[batch])), y[batch]).backward()
            optimizer.step()
    return lambda images: body(images).detach().numpy()


GROUPS = {
    "five pairs of labels": ([(2 * k, 2 * k + 1) for k in range(5)], 0.97),
    "ten single labels": ([(k,) for k in range(10)], 1.00),
    "two halves": ([range(5), range(5, 10)], 0.98),
    "four groups": ([(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)], 0.98),
    "one group": ([range(10)], 0.80),  # the share of seeds with exactly one cluster
}
"""Classes of each group, and the specification's index."""


@pytest.mark.statistical
def test_planted_label_groups_are_found_in_real_profiles():
    """Table 8.1, 40 devices of 20-40 samples, mean adjusted Rand index over three seeds."""
    import torch

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    scores = {name: [] for name in GROUPS}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images))
        server_data, rest = order[:200], order[200:]
        extract = trained_extractor(images[server_data], torch.tensor(digits.target[server_data]), seed)
        dead = extract(images) == 0
        unit = aidc.compute_class_unit(
            np.stack([dead[server_data][digits.target[server_data] == c].mean(axis=0) for c in range(10)])
        )
        for name, (classes, _) in GROUPS.items():
            truth = np.arange(40) % len(classes)
            profiles = []
            for group in truth:
                mine = rest[np.isin(digits.target[rest], list(classes[group]))]
                profiles.append(dead[rng.choice(mine, rng.integers(20, 41), replace=False)].mean(axis=0))
            found = aidc.aidc(np.stack(profiles), unit=unit)
            index = adjusted_rand_score(truth, labels(found))
            scores[name].append(float(len(found) == 1) if name == "one group" else index)
    for name, (_, bound) in GROUPS.items():
        assert np.mean(scores[name]) >= bound, f"{name}: {scores[name]}"
