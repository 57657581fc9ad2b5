import numpy as np
import pytest

from deploy import load
from deploy.quality import measure
from fedge.energies import free_energy, gate_entropy
from fedge.validation import Validation

from .bundles import GOLDEN, broken_gate, variant

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

    found = measure(runtime, Validation(inputs, y))

    n = len(y)
    assert found.quality.n == n
    assert found.quality.accuracy == pytest.approx(1 - 1 / n)
    assert list(found.correct) == [False] + [True] * (n - 1)
    assert found.quality.free_energy == pytest.approx(free_energy(wanted.weights, wanted.energies).mean())
    assert found.quality.gate_entropy == pytest.approx(gate_entropy(wanted.weights).mean())
    assert found.quality.latency_ms > 0
    assert found.finite


def inputs_of(runtime, samples):
    from fedge.preprocess import apply

    return apply(runtime.task, runtime.as_batch(samples))


def test_without_labels_there_is_no_accuracy(samples):
    runtime = load(GOLDEN)

    found = measure(runtime, Validation(inputs_of(runtime, samples), None))

    assert found.correct is None
    assert found.quality.accuracy is None


def test_without_samples_there_is_a_latency(samples):
    runtime = load(GOLDEN)

    found = measure(runtime, Validation(inputs_of(runtime, samples)[:0], None))

    assert found.quality.n == 0
    assert found.quality.latency_ms > 0
    assert found.finite


def test_numbers_that_are_not_finite_are_seen(tmp_path, samples):
    runtime = load(variant(tmp_path / "broken", release=2, gate=broken_gate))

    assert not measure(runtime, Validation(inputs_of(runtime, samples), None)).finite
