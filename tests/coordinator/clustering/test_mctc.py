"""MCTC: worked numbers and properties of scmoe_pfl.md sections 5-7, 9, 13, 16."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import adjusted_rand_score, silhouette_score

from coordinator.clustering import geometry, mctc
from coordinator.clustering.find import Directions, find_clusters
from coordinator.clustering.rivals import kmeans
from tests.support.directions import at, embeddings, updates_of

CIRCLE = at(0, 20, 80, 100, 50)
PAPER = {"distinct": False, "centres_join": False}


def soft(z, k, tau, **how):
    return mctc.cluster_softly(z, geometry.compute_similarity(z), k, tau, **how)


def centres_of(z, k, tau, *, distinct=True, **_):
    return mctc.choose_centres(geometry.compute_similarity(z), k, bar=min(round(tau, 9), 1.0) if distinct else 1.0)


def mean_cosine(z, members):
    return mctc.compute_mean_cosine(mctc.compute_means(z, members))


def recorded(patch):
    """K and tau of each partition that the validation looks at from now on."""
    seen, real = [], mctc.cluster_softly

    def spy(z, sim, k, tau, **how):
        seen.append((k, tau))
        return real(z, sim, k, tau, **how)

    patch.setattr(mctc, "cluster_softly", spy)
    return seen


@pytest.fixture
def tries(monkeypatch):
    return recorded(monkeypatch)


# ------------------------------------------------------------------------------------------- unit updates, embedding


def test_rows_made_at_a_time_change_nothing(monkeypatch):
    z = geometry.compute_embedding(updates_of(7, 23))
    whole = mctc.mctc(z)
    monkeypatch.setattr(geometry, "ROWS", 5)
    monkeypatch.setattr(mctc, "ROWS", 5)
    monkeypatch.setattr(mctc, "PAIRS", 7)
    assert mctc.mctc(z) == whole


def test_a_fleet_that_is_worked_on_in_parts_gets_what_the_whole_would_give():
    z = geometry.compute_embedding(updates_of(7, 1500))
    sim = geometry.compute_similarity(z)
    units = z / np.linalg.norm(z, axis=1, keepdims=True)
    np.testing.assert_allclose(sim, units @ units.T, atol=1e-9)
    others = np.where(np.eye(len(sim), dtype=bool), np.inf, sim)
    np.testing.assert_array_equal(mctc._find_least_similar(sim), others.min(axis=1))

    c = np.sort(sim[np.triu_indices(len(sim), 1)])
    assert len(sim) > geometry.ROWS
    assert len(c) > mctc.PAIRS
    t = np.arange(1, len(c))
    below = np.cumsum(c)[:-1]
    between = t * (len(c) - t) * ((c.sum() - below) / (len(c) - t) - below / t) ** 2
    cut = int(np.argmax(between))
    assert mctc.otsu(sim)[0] == pytest.approx(float(np.clip((c[cut] + c[cut + 1]) / 2, 0, 0.95)), abs=1e-4)


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6), st.sampled_from([0.2, 0.7, 1.0]))
@settings(max_examples=200, deadline=None)
def test_centres_are_those_of_the_sorted_pairs(seed, n, k, bar):
    rng = np.random.default_rng(seed)
    upper = np.triu(np.round(rng.uniform(-1, 1, (n, n)), 1), 1)  # with many ties
    sim = upper + upper.T + np.eye(n)
    wanted, eligible = [], np.ones(n, dtype=bool)
    rows, columns = np.triu_indices(n, 1)
    for pair in np.argsort(sim[rows, columns], kind="stable"):
        for client in (rows[pair], columns[pair]):
            if eligible[client] and len(wanted) < k:
                wanted.append(client)
                eligible &= sim[client] < bar
                eligible[client] = False
    assert list(mctc.choose_centres(sim, k, bar=bar)) == wanted


def test_scaling_and_flipping_all_updates_changes_nothing():
    updates = updates_of(4, 7)
    expected = mctc.mctc(geometry.embed_gram(geometry.compute_gram(updates)))
    factors = np.array([[1e-3], [7], [1], [0.3], [1e4], [2], [5]])
    for other in (updates * factors, -updates):
        found = mctc.mctc(geometry.embed_gram(geometry.compute_gram(other)))
        assert found.clusters == expected.clusters
        assert found.tau == expected.tau


# ------------------------------------------------------------------------------------------------------------- MCTC


def test_circle_similarities():
    sim = geometry.compute_similarity(CIRCLE)
    expected = {(0, 1): 0.9397, (0, 2): 0.1736, (0, 3): -0.1736, (0, 4): 0.6428, (1, 2): 0.5}
    expected |= {(1, 3): 0.1736, (1, 4): 0.8660, (2, 3): 0.9397, (2, 4): 0.8660, (3, 4): 0.6428}
    for pair, cosine in expected.items():
        assert sim[pair] == pytest.approx(cosine, abs=5e-5)
    assert mctc.otsu(sim)[0] == pytest.approx(0.336824, abs=5e-7)


def test_circle_two_clusters_with_a_fallback():
    found = soft(CIRCLE, 2, 0.8)
    assert centres_of(CIRCLE, 2, 0.8) == (0, 3)
    assert found == ((0, 1, 4), (2, 3))  # 4 is close to no centre: it goes to the nearest
    np.testing.assert_allclose(mctc.compute_means(CIRCLE, found), [[0.8608, 0.3694], [0, 0.9848]], atol=5e-5)
    assert mean_cosine(CIRCLE, found) == pytest.approx(0.3943, abs=5e-5)
    assert mctc.silhouette(geometry.compute_similarity(CIRCLE), found) == pytest.approx(0.6888, abs=5e-5)


def test_circle_a_client_in_both():
    found = soft(CIRCLE, 2, 0.75)
    assert found == ((0, 1, 4), (2, 3, 4))
    assert mean_cosine(CIRCLE, found) == pytest.approx(0.5941, abs=5e-5)
    assert mctc.silhouette(geometry.compute_similarity(CIRCLE), found) == pytest.approx(0.5116, abs=5e-5)


def test_circle_three_clusters():
    found = soft(CIRCLE, 3, 0.8)
    assert centres_of(CIRCLE, 3, 0.8) == (0, 3, 4)
    assert found == ((0, 1), (2, 3), (0, 1, 4))
    assert mean_cosine(CIRCLE, found) == pytest.approx(0.5138, abs=5e-5)
    printed = soft(CIRCLE, 3, 0.8, **PAPER)
    assert printed == ((0, 1), (3,), (2, 4))


def test_why_distinct():
    z = at(0, 3, 179, 176, 85, 95)
    printed = soft(z, 3, 0.9, **PAPER)
    assert centres_of(z, 3, 0.9, **PAPER) == (0, 2, 3)
    assert printed == ((0, 1, 4, 5), (2,), (3,))
    found = soft(z, 3, 0.9)
    assert centres_of(z, 3, 0.9) == (0, 2, 5)
    assert found == ((0, 1), (2, 3), (4, 5))


def test_of_the_last_pair_only_the_lower_position_enters():
    # least similar: (0, 1); then (2, 3), of which only 2 is needed for K = 3.
    sim = np.eye(4) * 1.0
    sim[0, 1], sim[2, 3] = -0.9, -0.8
    sim = np.maximum(sim, sim.T) + np.minimum(sim, sim.T) - np.diag(sim.diagonal())
    assert mctc.choose_centres(sim, 3, bar=1.0) == (0, 1, 2)
    assert mctc.choose_centres(sim, 9, bar=1.0) == (0, 1, 2, 3)
    assert mctc.choose_centres(sim[:1, :1], 3, bar=1.0) == (0,)


def test_tau_is_inclusive():
    z = at(0, 60, 120)
    found = soft(z, 2, 0.5, centres_join=False)  # cos 60 degrees is 0.5 in 9 decimals
    assert found == ((0, 1), (1, 2))


def test_tau_out_of_range_puts_everybody_everywhere_or_parts_hard():
    z = geometry.embed_gram(geometry.compute_gram(updates_of(6, 9)))
    everywhere = soft(z, 3, -1.0, **PAPER)
    others = set(range(9)) - set(centres_of(z, 3, -1.0, **PAPER))
    assert all(others <= set(s) for s in everywhere)
    hard = soft(z, 3, 1.1, **PAPER)
    assert sorted(i for s in hard for i in s) == list(range(9))


def oracle(z, n_clusters, tau, *, distinct, centres_join):
    """Sections 6.2 to 6.5 as they are printed, `sequential`."""

    def cos(a, b):
        lengths = np.sqrt(a @ a) * np.sqrt(b @ b)
        return round(float(np.clip(a @ b / lengths, -1, 1)), 9) if lengths > 1e-12 else 0.0

    n, tau = len(z), round(tau, 9)
    bar = min(tau, 1.0) if distinct else 1.0
    k_max = max(1, min(n_clusters, n))
    centres = [0] if n == 1 else []
    for _, *pair in sorted((cos(z[i], z[j]), i, j) for i in range(n) for j in range(i + 1, n)):
        for c in pair:
            if c not in centres and len(centres) < k_max and not any(cos(z[c], z[e]) >= bar for e in centres):
                centres.append(c)
    members = [[c] for c in centres]
    means = [z[c] for c in centres]
    for i in range(n):
        if i in centres:
            continue
        close = [cos(z[i], v) for v in means]
        joined = [k for k, c in enumerate(close) if c >= tau] or [close.index(max(close))]
        for k in joined:
            members[k].append(i)
        means = [np.mean(z[s], axis=0) for s in members]
    if centres_join:
        for a, c in enumerate(centres):
            for k, v in enumerate(means):
                if k != a and cos(z[c], v) >= tau:
                    members[k].append(c)
    return tuple(centres), tuple(tuple(sorted(s)) for s in members)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5), st.floats(-0.2, 1.0), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_agrees_with_the_slow_oracle(seed, n, k, tau, distinct, centres_join):
    z = np.random.default_rng(seed).standard_normal((n, 3))
    found = soft(z, k, tau, distinct=distinct, centres_join=centres_join)
    assert (centres_of(z, k, tau, distinct=distinct), found) == oracle(
        z, k, tau, distinct=distinct, centres_join=centres_join
    )


@given(embeddings, st.integers(1, 6), st.floats(-1, 1.2), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_partition_is_sound(z, k, tau, distinct, centres_join):
    found = soft(z, k, tau, distinct=distinct, centres_join=centres_join)
    centres = centres_of(z, k, tau, distinct=distinct)
    assert set().union(*found) == set(range(len(z)))
    assert 1 <= len(found) <= min(k, len(z))
    assert all(c in s for c, s in zip(centres, found, strict=True))
    assert len(set(centres)) == len(centres)
    sim, tau = geometry.compute_similarity(z), round(tau, 9)
    if distinct:
        assert all(sim[a, b] < min(tau, 1) for a in centres for b in centres if a != b)
    if not centres_join:
        assert all(sum(c in s for s in found) == 1 for c in centres)
    again = soft(z, k, tau, distinct=distinct, centres_join=centres_join)
    assert again == found


def test_printed_rule_without_parallels_makes_k_clusters():
    z = geometry.embed_gram(geometry.compute_gram(updates_of(7, 6)))
    for k in range(1, 9):
        assert len(soft(z, k, 0.2, **PAPER)) == min(k, 6)


@pytest.mark.parametrize("z", [at(30, 30, 30), 2 * at(10, 10)])
def test_parallel_updates_are_one_cluster(z):
    assert mctc.mctc(z).clusters == (tuple(range(len(z))),)
    assert soft(z, 1, 0.3) == (tuple(range(len(z))),)


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="client 1"):
        mctc.mctc(np.array([[1.0], [np.nan]]))
    with pytest.raises(ValueError, match="at least 1"):
        mctc.mctc(CIRCLE, n_clusters=0)
    with pytest.raises(ValueError, match="at least 1"):
        mctc.mctc(np.zeros((0, 2)))


# ------------------------------------------------------------------------------------------------------------- Otsu


def otsu_oracle(c):
    c = sorted(c)
    p = len(c)
    best, cut = -1.0, None
    for t in range(1, p):
        if c[t - 1] < c[t]:
            value = round(t / p * (1 - t / p) * (np.mean(c[t:]) - np.mean(c[:t])) ** 2, 12)
            if value > best:
                best, cut = value, t
    tau = round(min(max(float(c[cut - 1] + c[cut]) / 2, 0), 0.95), 9)
    low, high = [v for v in c if v < tau], [v for v in c if v >= tau]
    between = len(low) * len(high) / p**2 * (np.mean(high) - np.mean(low)) ** 2 if low and high else 0.0
    return tau, between / np.var(c)


@given(st.integers(0, 10**6), st.integers(3, 9))
@settings(max_examples=40, deadline=None)
def test_otsu_agrees_with_the_definition(seed, n):
    sim = geometry.compute_similarity(np.random.default_rng(seed).standard_normal((n, 3)))
    tau, eta = otsu_oracle(sim[np.triu_indices(n, 1)])
    found, separability = mctc.otsu(sim)
    assert found == tau
    assert separability == pytest.approx(eta, rel=1e-6)
    assert 0 <= separability <= 1


@pytest.mark.parametrize(
    ("pairs", "tau", "eta"),
    [
        ((-0.869, -0.650, -0.325, -0.164, -0.088, 0.262), 0.0, 0.468),  # Otsu's own cut, -0.4875, has 0.748
        ((-0.9, -0.8, -0.7, -0.3, -0.2, -0.1), 0.0, 0.0),  # nobody is close
        ((0.951, 0.952, 0.953, 0.998, 0.999, 1.0), 0.95, 0.0),  # everybody is
        ((0.5, 0.5, 0.5, 0.500001, 0.500001, 0.500001), 0.5000005, 1.0),  # two values, however close
    ],
)
def test_separability_is_that_of_the_cut_that_is_used(pairs, tau, eta):
    sim = np.eye(4)
    sim[np.triu_indices(4, 1)] = pairs
    found, separability = mctc.otsu(sim)
    assert found == tau
    assert separability == pytest.approx(eta, abs=5e-4)


def test_otsu_without_a_cut():
    for z in (at(0), at(0, 50), at(0, 0, 0)):
        assert mctc.otsu(geometry.compute_similarity(z)) == (0.95, 0.0)


def test_separability_of_a_uniform_and_of_a_normal_distribution():
    def spread(values):
        n = 300
        sim = np.zeros((n, n))
        sim[np.triu_indices(n, 1)] = values(n * (n - 1) // 2)
        return mctc.otsu(sim)[1]

    rng = np.random.default_rng(0)
    assert spread(rng.random) == pytest.approx(0.75, abs=0.01)
    assert spread(lambda p: 0.1 * rng.standard_normal(p)) == pytest.approx(0.64, abs=0.01)


# ------------------------------------------------------------------------------------------------------- validation


def test_a_valid_partition_is_accepted_at_once(tries):
    found = mctc.mctc(CIRCLE, n_clusters=2, tau=0.8)
    assert found.clusters == ((0, 1, 4), (2, 3))
    assert found.separability is None
    assert tries == [(2, 0.8)]


def test_nearly_coinciding_updates_fall_back_to_one_cluster(tries):
    z = at(0, 5, 9, 14)
    found = mctc.mctc(z, n_clusters=3, tau=0.2, **PAPER)
    assert found.clusters == ((0, 1, 2, 3),)
    assert tries == [(k, tau) for k in (3, 2) for tau in (0.2, 0.25, 0.3, 0.35, 0.4)] + [(1, 0.2)]


def test_tau_rises_to_its_limit_only(tries):
    mctc.mctc(at(0, 5, 9, 14), n_clusters=2, tau=0.88, **PAPER)
    mctc.mctc(at(0, 5, 9, 14), n_clusters=2, tau=0.97, **PAPER)
    assert [tau for _, tau in tries] == [0.88, 0.93, 0.95, 0.88, 0.97, 0.97]


@given(embeddings, st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_validation_ends_and_its_result_is_valid(z, k, distinct):
    with pytest.MonkeyPatch.context() as patch:
        tries = recorded(patch)
        found = mctc.mctc(z, n_clusters=k, distinct=distinct)
    assert len(tries) <= 5 * k
    refused = [soft(z, *each, distinct=distinct) for each in tries[:-1]]
    assert all(len(members) > 1 and mean_cosine(z, members) > 0.9 for members in refused)
    assert len(found.clusters) == 1 or mean_cosine(z, found.clusters) <= 0.9
    assert soft(z, *tries[-1], distinct=distinct) == found.clusters  # nothing of a refused try survives
    assert found.tau == tries[-1][1]


def test_planted_groups_are_found():
    rng = np.random.default_rng(8)
    groups = np.arange(16) % 4
    common, own = rng.standard_normal(500), rng.standard_normal((4, 500))
    updates = (common + 2 * own[groups] + 0.7 * rng.standard_normal((16, 500))).astype(np.float32)
    found = mctc.mctc(geometry.embed_gram(geometry.compute_gram(updates)))
    assert found.separability >= 0.9
    labels = [[k for k, s in enumerate(found.clusters) if i in s] for i in range(16)]
    assert adjusted_rand_score(groups, [x[0] for x in labels]) == 1.0
    assert all(len(x) == 1 for x in labels)


# --------------------------------------------------------------------------------------------------- attach, silhouette


def test_attach_takes_all_close_clusters_or_the_nearest():
    found = soft(CIRCLE, 2, 0.75)
    means = mctc.compute_means(CIRCLE, found)
    before = means.copy()
    assert mctc.attach(at(0, 50, 180), means, 0.75) == ((0,), (0, 1), (1,))
    np.testing.assert_array_equal(means, before)


def test_a_client_that_sat_out_changes_no_centre():
    updates = updates_of(9, 7)
    own = geometry.embed_gram(geometry.compute_gram(updates[:6]))
    alone = soft(own, 2, 0.1)
    z = geometry.embed_gram(
        geometry.compute_gram(updates)
    )  # its stored unit update is in the basis, not in the clusters
    together = soft(z[:6], 2, 0.1)
    assert together == alone
    means, of_own = mctc.compute_means(z, together), mctc.compute_means(own, alone)
    np.testing.assert_allclose(
        geometry.compute_cosines(means, means), geometry.compute_cosines(of_own, of_own), atol=1e-8
    )
    (clusters,) = mctc.attach(z[6:], means, 0.1)
    close = geometry.compute_cosines(z[6:], means)[0]
    assert clusters == tuple(np.flatnonzero(close >= 0.1)) or clusters == (int(np.argmax(close)),)


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_silhouette_of_a_partition_is_the_cosine_silhouette(seed):
    rng = np.random.default_rng(seed)
    z, labels = rng.standard_normal((12, 4)), np.r_[0, 1, 2, rng.integers(0, 3, 9)]
    members = [np.flatnonzero(labels == k).tolist() for k in range(3)]
    ours = mctc.silhouette(geometry.compute_similarity(z), members)
    assert ours == pytest.approx(silhouette_score(z, labels, metric="cosine"), abs=1e-6)


def test_silhouette_without_rivals_is_zero():
    sim = geometry.compute_similarity(CIRCLE)
    assert mctc.silhouette(sim, [(0, 1, 2, 3, 4)]) == 0
    assert mctc.silhouette(sim, [(0,), (1,), (2,), (3,), (4,)]) == 0


# ----------------------------------------------------------------- against k-means, where groups overlap (section 17.2)


def overlapping(seed: int, n: int = 4, d: int = 60, noise: float = 0.3):
    """Updates of 5 n clients, two groups of directions: 2 n in each alone, n in both (their models are half of each).

    Returns the updates (5 n, d), what they are without noise, and for each client the groups that it is in.
    """
    rng = np.random.default_rng(seed)
    groups = np.linalg.qr(rng.normal(size=(d, 2)))[0].T
    belongs = [(0,)] * 2 * n + [(1,)] * 2 * n + [(0, 1)] * n
    wanted = np.stack([groups[list(of)].mean(axis=0) for of in belongs])
    return wanted + rng.normal(size=wanted.shape) * noise / np.sqrt(d), wanted, belongs


@pytest.mark.parametrize("seed", range(5))
def test_with_overlapping_groups_it_finds_the_overlap_that_k_means_cannot(seed) -> None:
    """Both groups with all of their members: who is in both is in two clusters, which a partition cannot be."""
    updates, _, belongs = overlapping(seed)
    z = geometry.compute_embedding(updates)
    found = mctc.mctc(z, n_clusters=2, tau=0.5)
    truth = {frozenset(i for i, of in enumerate(belongs) if k in of) for k in (0, 1)}
    assert {frozenset(cluster) for cluster in found.clusters} == truth
    hard = kmeans(z, n_clusters=2, rng=np.random.default_rng(seed))
    assert sum(map(len, hard)) == len(belongs)


@pytest.mark.parametrize("seed", range(5))
def test_experts_of_overlapping_groups_fit_their_clients_better_than_k_means(seed) -> None:
    """Mean squared distance of the mean of a client's experts (section 14, without gate) to what the client wants."""
    updates, wanted, _ = overlapping(seed)
    seen = Directions(vectors=geometry.compute_embedding(updates), n_clusters=2, tau=0.5)
    errors = {}
    for how in ("mctc", "k-means"):
        clusters = find_clusters(how, seen, rng=np.random.default_rng(seed)).clusters
        experts = [updates[list(members)].mean(axis=0) for members in clusters]
        own = [np.mean([experts[k] for k, c in enumerate(clusters) if i in c], axis=0) for i in range(len(updates))]
        errors[how] = float(np.mean(np.sum((np.array(own) - wanted) ** 2, axis=1)))
    assert errors["mctc"] < 0.8 * errors["k-means"]


@given(arrays(np.float64, (9, 4), elements=st.floats(-1, 1, width=32)), st.integers(1, 6), st.permutations(range(9)))
def test_a_partition_leaves_each_client_in_its_nearest_cluster(rows, n_clusters, order) -> None:
    z = geometry.compute_embedding(rows)
    found = mctc.mctc(z, n_clusters=n_clusters, tau=0.3).clusters
    parts = mctc.make_partition(z, found)
    assert sorted(i for part in parts for i in part) == list(range(9))
    assert len(parts) <= len(found)
    means = np.stack([z[list(cluster)].mean(axis=0) for cluster in found])
    close = geometry.compute_cosines(z, means)
    for i in range(9):
        (mine,) = [set(part) for part in parts if i in part]
        own = [k for k, cluster in enumerate(found) if i in cluster]
        nearest = max(own, key=lambda k: (close[i, k], -k))
        assert mine <= set(found[nearest])
    turned = mctc.make_partition(z[order], [[order.index(i) for i in cluster] for cluster in found])
    assert {frozenset(order[i] for i in part) for part in turned} == set(map(frozenset, parts))


def test_a_partition_without_overlap_stays_as_it_is() -> None:
    z = geometry.compute_embedding(np.repeat(np.eye(3), 2, axis=0))
    assert mctc.make_partition(z, [(0, 1), (2, 3), (4, 5)]) == ((0, 1), (2, 3), (4, 5))
