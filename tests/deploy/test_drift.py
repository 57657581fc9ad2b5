import math

import numpy as np
import pytest

from deploy.drift import WINDOW, Drift
from fedge.energies import reference

pytestmark = pytest.mark.torch_free
NAN = math.nan


def yardstick(rng, n):
    """What a bundle that was made with n such samples carries."""
    found, _ = reference(*outputs(rng, n))
    return found


def outputs(rng, n, *, shift=0.0):
    """Weights and energies of n samples, two candidates."""
    first = rng.beta(8, 2, n)
    return np.stack([first, 1 - first], axis=1), rng.normal(-shift, 1, (n, 2))


@pytest.mark.parametrize("seed", range(20))
def test_samples_like_those_before_are_no_drift(seed):
    rng = np.random.default_rng(seed)
    drift = Drift(yardstick(rng, 30))

    for _ in range(30):
        drift.observe(*outputs(rng, 50))
        assert not drift.drifted


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_flagged_after_a_window_and_cleared_when_it_is_over(seed):
    rng = np.random.default_rng(seed)
    drift = Drift(yardstick(rng, 60))
    drift.observe(*outputs(rng, 1000))

    drift.observe(*outputs(rng, 3 * WINDOW, shift=2.0))
    assert drift.drifted is True  # Health knows no bool of numpy's
    assert drift.shift[0] > 1

    drift.observe(*outputs(rng, 10 * WINDOW))
    assert not drift.drifted


def test_a_gate_that_loses_its_mind_is_flagged_though_the_energies_are_as_before():
    rng = np.random.default_rng(1)
    drift = Drift(yardstick(rng, 60))
    _, energies = outputs(rng, 3 * WINDOW)

    drift.observe(np.full((3 * WINDOW, 2), 0.5), energies)

    assert drift.drifted


def test_nothing_is_said_before_a_whole_window():
    rng = np.random.default_rng(2)
    drift = Drift(yardstick(rng, 60))

    drift.observe(*outputs(rng, WINDOW - 1, shift=9.0))

    assert not drift.drifted


def test_samples_without_a_usable_candidate_are_left_out():
    drift = Drift(yardstick(np.random.default_rng(3), 60))

    drift.observe(np.zeros((2 * WINDOW, 2)), np.full((2 * WINDOW, 2), NAN))

    assert drift.shift == (0.0, 0.0)
    assert not drift.drifted
