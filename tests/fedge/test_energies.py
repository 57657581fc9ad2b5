import math

import numpy as np
import pytest

from fedge.energies import free_energy, gate_entropy, reference

NAN = math.nan


def outputs(rng, n, *, shift=0.0):
    """Weights and energies of n samples, two candidates."""
    first = rng.beta(8, 2, n)
    return np.stack([first, 1 - first], axis=1), rng.normal(-shift, 1, (n, 2))


def test_free_energy_is_the_weighted_energy_of_the_usable_candidates():
    weights = np.array([[0.75, 0.25], [0.5, 0.0], [0.0, 0.0]])
    energies = np.array([[2.0, -2.0], [1.5, NAN], [NAN, NAN]])

    free = free_energy(weights, energies)

    assert free[:2] == pytest.approx([-1.0, -1.5])
    assert math.isnan(free[2])


def test_gate_entropy_of_one_is_nothing_of_all_alike_is_log_m():
    assert gate_entropy(np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx([0.0, math.log(2)])


def test_few_validation_samples_are_flagged():
    rng = np.random.default_rng(0)
    weights, energies = outputs(rng, 2000)

    yardstick = reference(weights[:40], energies[:40])

    assert yardstick is not None
    assert (free_energy(weights, energies) > yardstick.outlier_above).mean() < 0.02
    assert (free_energy(*outputs(rng, 500, shift=6.0)) > yardstick.outlier_above).mean() > 0.9


def test_one_sample_makes_no_yardstick():
    assert reference(np.ones((1, 2)) / 2, np.zeros((1, 2))) is None
    assert reference(np.ones((3, 1)), np.array([[0.0], [NAN], [NAN]])) is None


def test_rounding_makes_no_entropy_negative():
    assert gate_entropy(np.array([[np.nextafter(np.float32(1), np.float32(2)), 0]], np.float32)) == 0.0
