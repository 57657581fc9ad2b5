"""The trial: fedge.md sections 5, 12 and 16."""

import numpy as np
import pytest

from coordinator.aggregation.trial import trial_statistic, wants_split


def deltas(g, e):
    return [a - b for a, b in zip(g, e, strict=True)]


def test_worked_trials():
    t = trial_statistic(deltas((1.0, 0.8, 0.9, 1.1), (0.7, 0.6, 0.9, 0.8)))
    assert t == pytest.approx(2.828427, abs=5e-7)
    assert wants_split(t, 0.7, 4)
    t = trial_statistic(deltas((1.0, 0.8, 0.9, 1.1), (1.2, 0.7, 1.0, 1.1)))
    assert t == pytest.approx(-0.774597, abs=5e-7)
    assert not wants_split(t, 0.65, 4)
    t = trial_statistic(deltas((0.10, 0.12, 0.08, 0.09), (0.10, 0.11, 0.09, 0.09)))
    assert t == pytest.approx(0, abs=1e-9)
    assert wants_split(t, 0.96, 4)


def test_identical_losses_split_only_above_eta_three_quarters():
    t = trial_statistic([0.0] * 5)
    assert t == 0
    assert not wants_split(t, 0.75 - 1e-6, 5)
    assert wants_split(t, 0.75 + 1e-6, 5)


def test_structureless_similarities_need_a_large_statistic():
    assert not wants_split(2.59, 0.62, 10)
    assert wants_split(2.61, 0.62, 10)


def test_too_few_devices_never_split():
    assert trial_statistic([]) is None
    assert trial_statistic([0.5]) is None
    assert not wants_split(None, 1.0, 10)
    assert not wants_split(100.0, 1.0, 3)
    assert wants_split(100.0, 1.0, 4)


def test_a_constant_gain_is_a_large_finite_statistic():
    assert trial_statistic([0.25, 0.25, 0.25]) == pytest.approx(0.25 / 1e-9)


def test_a_shift_of_both_losses_changes_nothing():
    rng = np.random.default_rng(0)
    g, e, shift = rng.random(6), rng.random(6), 10 * rng.random(6)
    assert trial_statistic(deltas(g + shift, e + shift)) == pytest.approx(trial_statistic(deltas(g, e)), rel=1e-9)


def test_liars_neither_force_a_split_nor_forbid_one():
    rng = np.random.default_rng(0)
    useless, useful = rng.normal(0, 0.1, size=16), rng.normal(0.3, 0.1, size=16)
    assert not wants_split(trial_statistic([*useless, *[1e6] * 4]), 0.65, 20)
    assert wants_split(trial_statistic([*useful, *[-1e6] * 4]), 0.75, 20)
    assert trial_statistic(useless) == pytest.approx(useless.mean() / (useless.std(ddof=1) / 4), rel=1e-6)
