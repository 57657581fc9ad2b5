"""CICS's model of rewards and its search: worked numbers of fedepc.md sections 5.3, 5.4 and 10."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.batch_search import greedy_batch
from coordinator.selection import ccmab, reward_model

FREE = {"seconds": np.ones(50), "budget_s": math.inf}


def covariances(found):
    """All of a posterior's columns, (n, n)."""
    return np.stack([found.compute_column(i) for i in range(len(found.mean))], axis=1)


def parts(cov):
    """A covariance matrix as a search takes it: variances, and columns by number."""
    return cov.diagonal(), cov.__getitem__


def test_worked_kernel():
    x = np.array([[0.0], [0.5], [1.0]])
    np.testing.assert_allclose(4 * reward_model.compute_kernel(x, x[:1])[:, 0], [1, 0.784888, 0.483358], atol=5e-7)


def test_worked_ridge():
    phi = reward_model.expand_features(np.array([[1.0, 0], [0, 1]]))
    np.testing.assert_allclose(reward_model.fit_ridge(phi, np.array([1.0, 2])), [1 / 3, 2 / 3, 1 / 3, 2 / 3])


def test_worked_posterior():
    x = np.array([[0.5] * 5, [0.0] * 5])
    found = reward_model.compute_posterior(x, x[:1], np.array([0.4]))
    np.testing.assert_allclose(found.mean, [0.393996, 0.063560], atol=5e-7)
    np.testing.assert_allclose(found.variance, [0.009615, 0.206893], atol=5e-7)


def test_no_history_is_the_prior():
    x = np.random.default_rng(0).random((4, 5))
    found = reward_model.compute_posterior(x, np.zeros((0, 5)), np.zeros(0))
    np.testing.assert_array_equal(found.mean, np.zeros(4))
    np.testing.assert_array_equal(covariances(found), reward_model.compute_kernel(x, x))


def test_variance_never_grows_with_data_and_never_exceeds_the_prior():
    rng = np.random.default_rng(2)
    x, seen, r = rng.random((6, 5)), rng.random((40, 5)), rng.uniform(-1, 1, 40)
    before = np.full(6, 0.25)
    for h in range(41):
        variance = reward_model.compute_posterior(x, seen[:h], r[:h]).variance
        assert (variance <= before + 1e-12).all()
        before = variance


def test_posterior_agrees_with_the_formula_by_inversion():
    rng = np.random.default_rng(3)
    x, seen, r = rng.random((3, 5)), rng.random((20, 5)), rng.uniform(-1, 1, 20)
    phi = np.hstack([seen, seen**2])
    theta = np.linalg.inv(np.eye(10) + phi.T @ phi) @ phi.T @ r

    def kap(a, b):
        d = math.sqrt(3) * math.dist(a, b)
        return 0.25 * (1 + d) * math.exp(-d)

    inverse = np.linalg.inv(np.array([[kap(a, b) for b in seen] for a in seen]) + 0.01 * np.eye(20))
    k = np.array([[kap(a, b) for b in seen] for a in x])
    found = reward_model.compute_posterior(x, seen, r)
    np.testing.assert_allclose(found.mean, np.hstack([x, x**2]) @ theta + k @ inverse @ (r - phi @ theta), atol=1e-10)
    np.testing.assert_allclose(found.variance, covariances(found).diagonal(), atol=1e-12)
    np.testing.assert_allclose(covariances(found), [[kap(a, b) for b in x] for a in x] - k @ inverse @ k.T, atol=1e-10)


def test_repeated_contexts_do_not_break_cholesky():
    x = np.full((ccmab.HISTORY, 5), 0.5)
    found = reward_model.compute_posterior(x[:2], x, np.ones(len(x)))
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.variance).all()
    assert np.isfinite(covariances(found)).all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_kernel_of_sets_is_positive_semidefinite(seed):
    rng = np.random.default_rng(seed)
    x = rng.random((20, 5))
    member = np.zeros((30, 20))
    for row in member:
        row[rng.choice(20, rng.integers(1, 6), replace=False)] = 1
    assert np.linalg.eigvalsh(member @ reward_model.compute_kernel(x, x) @ member.T).min() > -1e-9


def test_exploration():
    assert [round(reward_model.compute_exploration(t), 6) for t in (1, 2, 10)] == [4.605170, 7.377759, 13.815511]


def set_score(mean, cov, beta, members):
    index = np.array(members)
    return mean[index].sum() + math.sqrt(beta * max(cov[np.ix_(index, index)].sum(), 0))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_greedy_is_the_slow_greedy(seed, size):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((8, 8))
    mean, cov = rng.standard_normal(8), root @ root.T
    first, allowed = [6][: size - 1], [0, 1, 2, 3, 4, 6]
    chosen = list(first)
    while len(chosen) < size:
        chosen.append(
            max((i for i in allowed if i not in chosen), key=lambda i: set_score(mean, cov, 3.0, [*chosen, i]))
        )
    assert (
        reward_model.select_greedily(mean, *parts(cov), 3.0, first=first, allowed=allowed, size=size, **FREE) == chosen
    )


def test_greedy_ties_go_to_the_lowest_and_it_stops_when_nobody_is_left():
    mean, cov = np.zeros(4), np.eye(4)
    assert reward_model.select_greedily(mean, *parts(cov), 1.0, first=[], allowed=[3, 1, 2], size=2, **FREE) == [1, 2]
    assert reward_model.select_greedily(mean, *parts(cov), 1.0, first=[0], allowed=[2], size=4, **FREE) == [0, 2]


def test_batch_spreads_over_unlike_contexts():
    x = np.array([[0.0] * 5, [0.01] * 5, [1.0] * 5])
    mean, cov = np.array([0.02, 0.01, 0.0]), reward_model.compute_kernel(x, x)
    kept = cov.copy()
    assert greedy_batch(mean, *parts(cov), 4.0, first=[], allowed=[0, 1, 2], size=2, **FREE) == [
        0,
        2,
    ]
    assert greedy_batch(mean, *parts(cov), 4.0, first=[0], allowed=[1, 2], size=2, **FREE) == [
        0,
        2,
    ]
    np.testing.assert_array_equal(cov, kept)


def test_a_budget_passes_over_those_who_do_not_fit():
    mean, cov = np.array([0.3, 0.2, 0.1]), np.eye(3) * 1e-6
    budget = {"seconds": np.array([4.0, 2.0, 1.0]), "budget_s": 5.0}
    for search in (reward_model.select_greedily, greedy_batch):
        assert search(mean, *parts(cov), 1.0, first=[], allowed=[0, 1, 2], size=3, **budget) == [0, 2]
