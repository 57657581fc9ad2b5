import math

import numpy as np
import pytest

from fedge.bundle.energies import compute_free_energy, compute_gate_entropy, compute_reference
from fedge.data.problems.classification import Classification

NAN = math.nan
PROBLEM = Classification(classes=("a", "b"))


def reference(weights, energies):
    """That of a problem whose answers say nothing of how strange a sample is."""
    return compute_reference(PROBLEM, (np.full((len(weights), 2), 0.5),), weights, energies)


def outputs(rng, n, *, shift=0.0):
    """Weights and energies of n samples, two candidates."""
    first = rng.beta(8, 2, n)
    return np.stack([first, 1 - first], axis=1), rng.normal(-shift, 1, (n, 2))


def test_free_energy_is_the_weighted_energy_of_the_usable_candidates():
    weights = np.array([[0.75, 0.25], [0.5, 0.0], [0.0, 0.0]])
    energies = np.array([[2.0, -2.0], [1.5, NAN], [NAN, NAN]])

    free = compute_free_energy(weights, energies)

    assert free[:2] == pytest.approx([-1.0, -1.5])
    assert math.isnan(free[2])


def test_gate_entropy_of_one_is_nothing_of_all_alike_is_log_m():
    assert compute_gate_entropy(np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx([0.0, math.log(2)])


@pytest.mark.parametrize(("n", "k"), [(10, 1), (39, 1), (40, 1), (79, 2), (199, 5)])
def test_the_bounds_are_the_validation_samples_k_from_either_end(n, k):
    energies = -np.arange(n, dtype=np.float64)[:, np.newaxis]  # free energies 0 to n - 1

    yardstick, below = reference(np.ones((n, 1)), np.random.default_rng(0).permutation(energies))

    assert (below, yardstick.outlier_above) == (k - 1, n - k)


@pytest.mark.parametrize("shift", [6.0, -6.0])
def test_few_samples_like_the_validation_samples_are_flagged_and_stranger_or_surer_ones_are(shift):
    rng = np.random.default_rng(0)
    usual, unusual = [], []
    for _ in range(200):  # of a further sample, 2 / 41 are outside; standard error 0.0005
        yardstick, below = reference(*outputs(rng, 40))
        free, far = compute_free_energy(*outputs(rng, 1000)), compute_free_energy(*outputs(rng, 100, shift=shift))
        usual.append(((free < below) | (free > yardstick.outlier_above)).mean())
        unusual.append(((far < below) | (far > yardstick.outlier_above)).mean())

    assert np.mean(usual) == pytest.approx(2 / 41, abs=0.01)
    assert np.mean(unusual) > 0.9


def test_clipped_energies_are_flagged_where_they_saturate():
    """Energies end at 3: a bound of the mean plus three deviations lay beyond all that could come."""
    rng = np.random.default_rng(0)
    weights, energies = outputs(rng, 100)

    yardstick, _ = reference(weights, energies.clip(-3, 3))

    assert compute_free_energy(weights[:1], np.full_like(energies[:1], -3.0)) > yardstick.outlier_above


def test_one_sample_makes_no_yardstick():
    assert reference(np.ones((1, 2)) / 2, np.zeros((1, 2))) is None
    assert reference(np.ones((3, 1)), np.array([[0.0], [NAN], [NAN]])) is None


def test_rounding_makes_no_entropy_negative():
    assert compute_gate_entropy(np.array([[np.nextafter(np.float32(1), np.float32(2)), 0]], np.float32)) == 0.0
