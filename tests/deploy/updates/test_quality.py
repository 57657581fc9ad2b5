import math

import msgspec
import numpy as np
import pytest

from deploy import load
from deploy.updates.quality import ERROR, MAX_HOME, PairedTest, _compute_indecision, measure_home, measure_quality
from fedge.bundle.energies import compute_free_energy, compute_gate_entropy
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
    assert list(found.grades) == [False] + [True] * (n - 1)
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
    assert len(found.grades) == len(y)
    assert list(found.grades[~marks]) == [True] * int((~marks).sum())
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

    assert found.grades is None
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


def test_what_is_usual_at_home_is_known_from_unmarked_validation_samples(samples):
    runtime = load(GOLDEN)
    inputs = inputs_of(runtime, samples)
    wanted = runtime.predict(samples)
    marks = np.zeros(len(inputs), np.bool_)
    marks[::2] = True
    y = np.where(marks, (wanted.class_index + 1) % runtime.task.n_classes, wanted.class_index)

    found = measure_home(runtime, Validation(inputs, y, marks))

    assert found.n == (~marks).sum()
    assert found.accuracy > 0.97
    assert found.shares.sum() == pytest.approx(1)
    assert found.shares == pytest.approx(wanted.probabilities[~marks].mean(axis=0), abs=0.01)
    many = Validation(np.tile(inputs, (5, *[1] * (inputs.ndim - 1))), None)
    assert len(many.x) > MAX_HOME
    assert measure_home(runtime, many).n == MAX_HOME
    assert measure_home(runtime, many).accuracy is None
    assert measure_home(runtime, Validation(inputs, y, np.ones(len(inputs), np.bool_))) is None
