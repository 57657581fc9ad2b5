from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_agent.learning import mixture as mx
from fedge.bundle.formula import standardise
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.formulas import fit_em_weights
from fedge.wire.messages import Role
from tests.support.tables import calibrated, energies_of, log_mixture, problem_of

PROBLEM = problem_of(3)
FLAT = PROBLEM.fit_offset(np.zeros(0, np.int64), lambda: np.zeros((0, 3)))


def cal(temperature=1.0, kappa=0.0):
    return Calibration(temperature=temperature, kappa=kappa)


def prior_of(*counts):
    """The offset of a device with so many samples of each class."""
    return PROBLEM.fit_offset(np.repeat(np.arange(3), counts), lambda: np.zeros((sum(counts), 3)))


def loss_of(logits, y, prior, how):
    return -PROBLEM.sum_likelihood(PROBLEM.calibrate(logits, how, prior), y)


# -------------------------------------------------------------------------------------------- prior, temperature


def test_prior_worked_numbers():
    prior = prior_of(8, 2, 0)
    assert np.exp(prior) == pytest.approx([0.739130, 0.217391, 0.043478], abs=1e-6)
    logits = np.array([[1.0, 2.0, 2.5]])
    for (temperature, kappa), expected in {
        (1, 0): (0.121952, 0.331499, 0.546549),
        (1, 1): (0.484702, 0.387517, 0.127781),
        (2, 1): (0.621331, 0.301295, 0.077374),
    }.items():
        p = np.exp(calibrated(logits, prior, cal(temperature, kappa)))[0]
        assert p == pytest.approx(expected, abs=1e-6)


@given(arrays(np.float64, (4, 3), elements=st.floats(-20, 20)), st.floats(0.5, 3), st.floats(0, 2), st.floats(-50, 50))
def test_equal_counts_mean_no_prior_and_a_common_offset_changes_no_q(logits, temperature, kappa, offset):
    even = prior_of(7, 7, 7)
    without = calibrated(logits, even, cal(temperature))
    assert calibrated(logits, even, cal(temperature, kappa)) == pytest.approx(without, abs=1e-9)
    assert calibrated(logits + offset, even, cal(temperature)) == pytest.approx(without, abs=1e-9)
    one, other = energies_of(logits[None]), energies_of(logits[None] + offset)
    standard = standardise(one, *mx.compute_energy_statistics(one))
    assert standardise(other, *mx.compute_energy_statistics(other)) == pytest.approx(standard, abs=1e-6)


def test_grid_has_temperature_outermost_and_kappas_by_role():
    rng = np.random.default_rng(0)
    logits, y, prior = rng.normal(size=(5, 3)), np.array([0, 1, 2, 0, 0]), prior_of(3, 1, 1)
    for role, kappas in {Role.GLOBAL: (0, 0.5, 1, 1.5), Role.LOCAL: (0, 0.3, 0.6, 1)}.items():
        losses = PROBLEM.compute_statistics(logits, y, prior, own=not role.is_shared)
        assert len(losses) == PROBLEM.count_statistics(own=not role.is_shared) == 16
        assert losses[4 + 2] == pytest.approx(loss_of(logits, y, prior, cal(1.4, kappas[2])))
        assert losses[3] == pytest.approx(loss_of(logits, y, prior, cal(1.0, kappas[3])))


def test_no_validation_samples_cost_nothing():
    losses = PROBLEM.compute_statistics(np.zeros((0, 3)), np.zeros(0, np.int64), FLAT, own=False)
    assert losses == (0.0,) * 16


def test_a_candidate_that_is_not_finite_costs_what_guessing_costs():
    logits = np.array([[np.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert loss_of(logits, np.array([1, 1]), FLAT, cal()) == pytest.approx(2 * np.log(3))


# ------------------------------------------------------------------------------------------------------- weights

FIRST = np.log([[0.9, 0.5], [0.8, 0.5], [0.2, 0.5]])
SECOND = np.log([[0.1, 0.6], [0.3, 0.7]])
HALF = np.array([0.5, 0.5])


@pytest.mark.parametrize(("a", "expected"), [(0.001, 0.631400), (5, 0.508261), (20, 0.502163)])
def test_weights_worked_numbers(a, expected):
    assert fit_em_weights(FIRST, HALF, a)[0] == pytest.approx(expected, abs=1e-6)


def test_pooled_weights_worked_numbers():
    u = HALF
    for _ in range(2):
        u = (3 * fit_em_weights(FIRST, u, 10.0) + 2 * fit_em_weights(SECOND, u, 10.0)) / 5
    assert u == pytest.approx([0.464488, 0.535512], abs=1e-6)
    assert fit_em_weights(FIRST, u, 20.0)[0] == pytest.approx(0.467192, abs=1e-6)
    assert fit_em_weights(SECOND, u, 20.0)[0] == pytest.approx(0.438917, abs=1e-6)


losses = arrays(np.float64, st.tuples(st.integers(1, 6), st.just(3)), elements=st.floats(-800, 0))
shares = arrays(np.float64, 3, elements=st.floats(0.05, 1)).map(lambda v: v / v.sum())


def objective(log_p, weights, u, a):
    return np.logaddexp.reduce(np.log(weights) + log_p, axis=1).sum() + a * (u * np.log(weights)).sum()


@given(losses, shares, st.floats(0.1, 100))
def test_weights_sum_to_one_keep_their_floor_and_improve_the_objective(log_p, u, a):
    weights = fit_em_weights(log_p, u, a)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= a * u / (len(log_p) + a) - 1e-12).all()
    assert objective(log_p, weights, u, a) >= objective(log_p, u, u, a) - 1e-6
    assert fit_em_weights(log_p, u, 1e12) == pytest.approx(u, abs=1e-6)
    order = [2, 0, 1]
    assert fit_em_weights(log_p[:, order], u[order], a) == pytest.approx(weights[order], abs=1e-9)


def test_no_validation_samples_give_the_pooled_weights():
    assert fit_em_weights(np.zeros((0, 2)), np.array([0.3, 0.7]), 20.0) == pytest.approx([0.3, 0.7])


def test_a_missing_candidates_share_is_spread_in_proportion():
    pooled = {Role.PRIVATE: 0.5, Role.GLOBAL: 0.2, Role.EXPERT: 0.3}
    assert mx.distribute_weights(pooled, [Role.GLOBAL, Role.EXPERT]) == pytest.approx([0.4, 0.6])
    assert mx.distribute_weights({Role.PRIVATE: 1.0, Role.GLOBAL: 0.0}, [Role.GLOBAL]) == pytest.approx([1.0])
    with pytest.raises(ValueError, match="none of the candidates"):
        mx.distribute_weights(pooled, [])


# -------------------------------------------------------------------------------------------------------- fusion


def q_of(logits, temperature=1.0, kappa=0.0, prior=FLAT):
    return np.stack([calibrated(row, prior, cal(temperature, kappa)) for row in logits])


def test_fusion_worked_numbers():
    by_sample = np.array([[[2, 0, 0], [0, 3, 0]], [[0.5, 0.4, 0], [0, 0, 6]]])
    logits = by_sample.transpose(1, 0, 2)
    raw = energies_of(logits)
    mean, std = mx.compute_energy_statistics(raw)
    assert mean == pytest.approx([1.830186, 4.549934], abs=1e-6)
    assert std == pytest.approx([0.409359, 1.455011], abs=1e-6)
    energies = standardise(raw, mean, std)
    assert np.abs(energies) == pytest.approx(np.ones((2, 2)))
    for beta, expected in {0: (0.443606, 0.421183, 0.135211), 1: (0.627915, 0.215625, 0.156460)}.items():
        log_p = log_mixture(q_of(logits, 1.4), np.log([0.6, 0.4]) + beta * energies)
        assert np.exp(log_p[0]) == pytest.approx(expected, abs=1e-6)


@given(arrays(np.float64, (3, 2, 3), elements=st.floats(-30, 30)), shares, st.integers(0, 2))
def test_the_loss_is_bounded_by_every_candidate(logits, weights, label):
    log_q = q_of(logits)
    log_p = log_mixture(log_q, np.tile(np.log(weights), (2, 1)))
    assert np.exp(log_p).sum(axis=1) == pytest.approx(1)
    for k in range(3):
        assert (-log_p[:, label] <= -log_q[k, :, label] - np.log(weights[k]) + 1e-9).all()


@given(
    arrays(np.float64, (2, 3), elements=st.floats(-30, 30)),
    shares,
    arrays(np.float64, (2, 3), elements=st.floats(-5, 5)),
)
def test_equal_candidates_predict_as_one(logits, weights, scores):
    log_q = q_of(np.stack([logits] * 3))
    assert log_mixture(log_q, np.log(weights) + scores) == pytest.approx(log_q[0], abs=1e-9)


# -------------------------------------------------------------------------------------------------- steps, guard


@pytest.mark.parametrize(
    ("log_likelihoods", "steps"),
    [
        ((-10, -9, -8, -7.5), 40),
        ((-10, -9, -6.5, -6.9), 80),
        ((-6, -9, -12, -20), 20),
        ((-7, -9, -9, -9), 20),
        ((-9, -9, -9), 40),
    ],
)
def test_steps(log_likelihoods, steps):
    assert (20, 40, 80, 160)[mx.choose_steps(log_likelihoods)] == steps


def test_representative_worked_numbers():
    validation, training = np.array([0, 15, 7, 17, 0, 0]), np.array([53, 32, 19, 25, 44, 0])
    assert mx.compute_class_distance(validation, training) == pytest.approx(0.5607, abs=1e-4)
    assert not mx.is_representative(validation, training)
    assert mx.compute_class_distance(np.array([5, 5]), np.array([6, 4])) == pytest.approx(0.1)
    assert mx.is_representative(np.array([5, 5]), np.array([6, 4]))
    assert mx.is_representative(np.array([10, 0]), np.array([6, 4]))  # 0.4 is still near
    assert not mx.is_representative(np.array([0, 0]), np.array([6, 4]))


def test_a_distance_of_exactly_two_fifths_is_representative_however_its_shares_are_rounded():
    validation, training = np.array([0, 1, 4]), np.array([2, 0, 3])  # half of 0.4 + 0.2 + 0.2: in floats above 0.4
    assert mx.compute_class_distance(validation, training) == Fraction(2, 5)
    assert mx.is_representative(validation, training)
    assert mx.is_representative(training, validation)
    assert not mx.is_representative(1000 * validation + [1, 0, 0], 1000 * training + [2, 0, 0])


def test_guard_worked_numbers():
    assert mx.choose_alternative((-20, 8), [(-40, 3), (-12, 11), (-14, 12)]) == 1
    assert mx.choose_alternative((-20, 8), [(-40, 3), (-16, 11), (-12, 9)]) is None
    assert mx.choose_alternative((-20, 8), [(-15, 20)]) is None  # 5 nats are not more than 5 nats
    assert mx.choose_alternative((-20, 8), [(-14.9, 10)]) == 0


def test_two_samples_more_are_two_however_a_share_of_samples_is_rounded():
    for m in range(2, 100):
        for correct in range(m - 1):
            two, one = (-14.0, m * ((correct + 2) / m)), (-14.0, m * ((correct + 1) / m))
            assert mx.choose_alternative((-20.0, m * (correct / m)), [one]) is None
            assert mx.choose_alternative((-20.0, m * (correct / m)), [one, two]) == 1


def test_ties_go_to_the_first():
    assert mx.find_best([1.0, 1.0 + 1e-10, 0.5]) == 0
    assert mx.find_best([1.0, 1.0 + 1e-8]) == 1
