import math

import msgspec
import numpy as np
import pytest

from deploy import load
from deploy.updates.quality import ERROR, WINDOW, Drift, PairedTest, _compute_indecision, measure_quality
from fedge.bundle.energies import compute_free_energy, compute_gate_entropy, compute_reference
from fedge.data.validation import Validation

from ..bundles import GOLDEN, broken_gate, variant

pytestmark = pytest.mark.torch_free


@pytest.fixture(scope="module")
def samples():
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        return np.tile(arrays["x"], (20, *[1] * (arrays["x"].ndim - 1)))


def test_a_bundle_is_measured_by_what_it_predicts(samples):
    runtime = load(GOLDEN)
    inputs = inputs_of(runtime, samples)
    wanted = runtime.predict(samples)
    y = wanted.class_index.copy()
    y[0] = (y[0] + 1) % runtime.task.n_classes

    found = measure_quality(runtime, Validation(inputs, y))

    n = len(y)
    assert found.quality.n == n
    assert found.quality.accuracy == pytest.approx(1 - 1 / n)
    assert list(found.correct) == [False] + [True] * (n - 1)
    assert found.quality.free_energy is None  # the golden bundle has no reference to compare with
    assert found.quality.gate_entropy == pytest.approx(compute_gate_entropy(wanted.weights).mean() / math.log(5))
    assert found.quality.latency_ms > 0
    assert found.finite


def test_what_is_told_is_of_samples_that_are_not_marked_and_what_decides_of_all(samples):
    runtime = load(GOLDEN)
    inputs = inputs_of(runtime, samples)
    y = runtime.predict(samples).class_index
    marks = np.arange(len(y)) % 3 == 0
    y = np.where(marks, (y + 1) % runtime.task.n_classes, y)
    strange = np.where(marks.reshape(-1, *[1] * (inputs.ndim - 1)), inputs + 7, inputs)

    found = measure_quality(runtime, Validation(strange, y, marks))
    unmarked = measure_quality(runtime, Validation(inputs[~marks], y[~marks]))

    def untimed(measured):
        return msgspec.structs.replace(measured.quality, latency_ms=None)

    assert untimed(found) == untimed(unmarked)
    assert len(found.correct) == len(y)
    assert list(found.correct[~marks]) == [True] * int((~marks).sum())
    none = measure_quality(runtime, Validation(inputs, y, np.ones(len(y), bool))).quality
    assert (none.n, none.accuracy, none.gate_entropy, none.free_energy) == (0, None, None, None)


def test_free_energy_is_counted_in_deviations_from_the_bundles_own_samples(tmp_path, samples):
    wanted = load(GOLDEN).predict(samples)
    free = compute_free_energy(wanted.weights, wanted.energies)
    reference = {
        "n": 50, "free_energy_mean": float(free.mean()) - 1.0, "free_energy_std": 0.5, "gate_entropy_mean": 0.0,
        "gate_entropy_std": 1.0, "outlier_above": 9.0,
    }  # fmt: skip
    runtime = load(variant(tmp_path / "1", release=1, reference=reference))

    found = measure_quality(runtime, Validation(inputs_of(runtime, samples), None))

    assert found.quality.free_energy == pytest.approx(2.0)


def inputs_of(runtime, samples):
    from fedge.data.preprocessing import preprocess

    return preprocess(runtime.task, runtime.add_batch_axis(samples))


def test_a_gates_indecision_is_the_entropys_share_of_what_it_could_be():
    alike, alone = np.full((2, 4), 0.25), np.eye(4)[:2]
    assert _compute_indecision(compute_gate_entropy(alike), 4) == pytest.approx(1.0)
    assert _compute_indecision(compute_gate_entropy(alone), 4) == 0.0
    assert _compute_indecision(compute_gate_entropy(np.ones((2, 1))), 1) is None
    assert _compute_indecision(np.array([math.log(4) * (1 + 1e-7)]), 4) == 1.0  # rounded, and yet a share


def test_without_labels_there_is_no_accuracy(samples):
    runtime = load(GOLDEN)

    found = measure_quality(runtime, Validation(inputs_of(runtime, samples), None))

    assert found.correct is None
    assert found.quality.accuracy is None


def test_without_samples_there_is_a_latency(samples):
    runtime = load(GOLDEN)

    found = measure_quality(runtime, Validation(inputs_of(runtime, samples)[:0], None))

    assert found.quality.n == 0
    assert found.quality.latency_ms > 0
    assert found.finite


def test_numbers_that_are_not_finite_are_seen(tmp_path, samples):
    runtime = load(variant(tmp_path / "broken", release=2, gate=broken_gate))

    assert not measure_quality(runtime, Validation(inputs_of(runtime, samples), None)).finite


def paired(*samples):
    """Each sample: does the bundle before get it right, does the new one."""
    found = PairedTest()
    for before, now in samples:
        found.observe(np.array([before]), np.array([now]))
    return found


@pytest.mark.parametrize(("n", "worse"), [(10, False), (11, True)])  # 2^n / (n + 1) is 93 and 171
def test_what_is_lost_without_exception_is_worse_after_eleven_samples(n, worse):
    assert paired(*[(True, False)] * n).is_worse(0.02) is worse


def test_samples_on_which_both_are_right_or_wrong_tell_nothing_but_how_little_is_lost():
    lost = [(True, False)] * 12
    assert paired(*lost).is_worse(0.02)
    assert not paired(*lost, *[(True, True)] * 1000).is_worse(0.02)
    assert not paired(*[(True, False), (False, True)] * 500).is_worse(0.0)
    assert not paired(*[(False, True)] * 100).is_worse(0.0)


def test_an_equal_bundle_is_rarely_given_up_however_often_one_looks():
    rng = np.random.default_rng(0)
    given_up = 0
    for _ in range(400):
        found = PairedTest()
        for lost in rng.random(200) < 0.5:
            found.observe(np.array([lost]), np.array([not lost]))
            if found.is_worse(0.0):
                given_up += 1
                break
    assert given_up <= 2 * ERROR * 400


NAN = math.nan


def yardstick(rng, n):
    """What a bundle that was made with n such samples carries."""
    found, _ = compute_reference(*outputs(rng, n))
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
