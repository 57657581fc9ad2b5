"""Which kind of drift is seen in streams of a bundle's outputs, and when the alarm goes out."""

import math

import numpy as np
import pytest

from deploy.updates.drift import LABELS, MIN_FITTING, MIN_LABELS, WINDOW, Alarm, Drift, compute_home_reference
from fedge.bundle.energies import compute_reference
from fedge.data.problems.classification import Classification
from fedge.wire.messages import DriftKind

pytestmark = pytest.mark.torch_free

NAN = math.nan
PROBLEM = Classification(classes=("a", "b", "c", "d"))
HOME = np.array([0.5, 0.3, 0.15, 0.05])
"""The classes' shares at home."""


def yardstick(rng, n):
    """What a bundle that was made with n such samples carries."""
    weights, energies, probabilities = outputs(rng, n)
    found, _ = compute_reference(PROBLEM, (probabilities,), weights, energies)
    return found


def outputs(rng, n, *, shift=0.0, shares=HOME):
    """Weights and energies of n samples, two candidates; and probabilities of four classes."""
    first = rng.beta(8, 2, n)
    sure = rng.uniform(0.85, 1.0, n)
    probabilities = np.repeat((1 - sure)[:, None] / 3, 4, axis=1)
    probabilities[np.arange(n), rng.choice(4, n, p=shares)] = sure
    return np.stack([first, 1 - first], axis=1), rng.normal(-shift, 1, (n, 2)), probabilities


def at_home(rng, n=60, correct=True):
    """What is usual at home, from n validation samples that are all right."""
    weights, energies, probabilities = outputs(rng, n)
    return compute_home_reference(probabilities, weights, energies, np.full(n, correct))


def test_other_shares_with_less_sure_answers_are_other_inputs():
    """Inputs that no energy tells from those at home, whose answers crowd in one class."""
    rng = np.random.default_rng(0)
    kinds = []
    for doubt in (0.0, 0.25):
        drift = watch(rng)
        weights, energies, probabilities = outputs(rng, 600, shares=HOME[::-1])
        drift.observe(weights, energies, (1 - doubt) * probabilities + doubt / 4)
        kinds.append(drift.kind)
    assert kinds == [DriftKind.SHARES, DriftKind.INPUTS]


def test_weights_at_home_are_the_mean_and_never_0():
    """Three samples whose second candidate is never used, and half a sample more."""
    home = compute_home_reference(np.full((3, 4), 0.25), np.tile([1.0, 0.0], (3, 1)), np.zeros((3, 2)), None)
    assert home.weights == pytest.approx([3.25 / 3.5, 0.25 / 3.5])


def watch(rng, held=None, n=60, release=2):
    """A watch that knows its reference and what is usual at home."""
    drift = Drift(yardstick(rng, n), release, None if held is None else Alarm(held, 1))
    drift.home = at_home(rng, n)
    return drift


def tell(drift, n, right, sure=0.95):
    """Tell n labels, of which the share `right` is what the bundle said."""
    for k in range(n):
        drift.observe_labels(np.array([(k + 1) * right // 1 > k * right // 1]), np.array([sure]))


@pytest.mark.parametrize("seed", range(20))
def test_samples_like_those_before_are_no_drift(seed):
    rng = np.random.default_rng(seed)
    drift = watch(rng, n=50)

    for _ in range(30):
        drift.observe(*outputs(rng, 50))
        tell(drift, 5, 0.95)
        assert drift.kind is None


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_is_flagged_after_a_window_and_cleared_when_it_is_over(seed):
    rng = np.random.default_rng(seed)
    drift = Drift(yardstick(rng, 60))
    drift.observe(*outputs(rng, 1000))

    drift.observe(*outputs(rng, 3 * WINDOW, shift=2.0))
    assert drift.kind is DriftKind.INPUTS
    assert drift.shift[0] > 1

    drift.observe(*outputs(rng, 10 * WINDOW))
    assert drift.kind is None


def test_a_gate_that_loses_its_mind_is_flagged_though_the_energies_are_as_before():
    rng = np.random.default_rng(1)
    drift = watch(rng)
    _, energies, probabilities = outputs(rng, 3 * WINDOW)

    drift.observe(np.full((3 * WINDOW, 2), 0.5), energies, probabilities)

    assert drift.kind is DriftKind.INPUTS


@pytest.mark.parametrize("seed", range(5))
def test_other_class_shares_are_told_from_other_inputs(seed):
    rng = np.random.default_rng(seed)
    drift = watch(rng)
    drift.observe(*outputs(rng, WINDOW))
    assert drift.kind is None

    drift.observe(*outputs(rng, 3 * WINDOW, shares=HOME[::-1]))
    assert drift.kind is DriftKind.SHARES

    drift.observe(*outputs(rng, 3 * WINDOW, shares=HOME[::-1], shift=2.0))
    assert drift.kind is DriftKind.INPUTS

    drift.observe(*outputs(rng, 10 * WINDOW))
    assert drift.kind is None


def test_a_gate_that_moves_with_the_class_shares_is_no_other_input():
    rng = np.random.default_rng(2)
    drift = watch(rng)
    _, energies, probabilities = outputs(rng, 3 * WINDOW, shares=HOME[::-1])

    drift.observe(np.full((3 * WINDOW, 2), 0.5), energies, probabilities)

    assert drift.kind is DriftKind.SHARES


def test_without_what_is_usual_at_home_shares_are_not_judged():
    rng = np.random.default_rng(2)
    drift = Drift(yardstick(rng, 60))

    drift.observe(*outputs(rng, 3 * WINDOW, shares=HOME[::-1]))

    assert drift.kind is None


def test_a_bundle_without_a_reference_is_judged_by_what_it_answers_at_home():
    rng = np.random.default_rng(3)
    drift = Drift(None)
    drift.observe(*outputs(rng, 3 * WINDOW, shift=2.0))
    assert (drift.kind, drift.shift) == (None, (0.0, 0.0))

    drift.home = at_home(rng)

    assert drift.kind is DriftKind.INPUTS


@pytest.mark.parametrize("seed", range(5))
def test_labels_contradict_a_bundle_whose_answers_look_as_before(seed):
    rng = np.random.default_rng(seed)
    drift = watch(rng)
    drift.observe(*outputs(rng, 3 * WINDOW))
    tell(drift, LABELS, 0.95)
    assert drift.kind is None

    tell(drift, LABELS, 0.5)
    assert drift.kind is DriftKind.LABELS

    tell(drift, LABELS, 0.95)
    assert drift.kind is None


def test_a_few_labels_decide_nothing_and_ten_wrong_ones_do():
    rng = np.random.default_rng(4)
    drift = watch(rng)
    drift.observe(*outputs(rng, WINDOW))

    tell(drift, MIN_LABELS - 1, 0.0)
    assert drift.kind is None
    tell(drift, 1, 0.0)
    assert drift.kind is DriftKind.LABELS


def test_a_bundle_that_is_as_unsure_as_it_is_wrong_still_breaks_what_it_promised_at_home():
    rng = np.random.default_rng(4)
    drift = watch(rng)

    tell(drift, LABELS, 0.5, sure=0.5)

    assert drift.kind is DriftKind.LABELS


@pytest.mark.parametrize("seed", range(50))
def test_a_bundle_as_good_as_it_says_is_rarely_contradicted(seed):
    rng = np.random.default_rng(seed)
    drift = watch(rng)
    for _ in range(300):
        sure = rng.uniform(0.9, 1.0)
        drift.observe_labels(np.array([rng.random() < sure]), np.array([sure]))
        assert drift.kind is None


def test_labelled_answers_that_fit_overrule_energies():
    rng = np.random.default_rng(5)
    drift = watch(rng)
    drift.observe(*outputs(rng, 3 * WINDOW, shift=2.0))
    assert drift.kind is DriftKind.INPUTS

    tell(drift, MIN_FITTING, 1.0)
    assert drift.kind is None

    drift.observe(*outputs(rng, WINDOW, shift=2.0))
    assert drift.kind is DriftKind.INPUTS, "labels of former times say nothing of recent samples"


def test_an_alarm_outlives_the_bundle_until_a_whole_window_of_answers_fits():
    rng = np.random.default_rng(6)
    drift = watch(rng, held=DriftKind.INPUTS)
    assert drift.kind is DriftKind.INPUTS
    drift.observe(*outputs(rng, WINDOW - 1))
    assert drift.kind is DriftKind.INPUTS

    drift.observe(*outputs(rng, 1))

    assert drift.kind is None


def test_a_bundle_for_which_recent_inputs_are_strange_too_keeps_the_alarm():
    rng = np.random.default_rng(7)
    drift = watch(rng, held=DriftKind.INPUTS)

    assert drift.alarm == Alarm(DriftKind.INPUTS, 1), "the bundle before raised it"
    for _ in range(10):
        drift.observe(*outputs(rng, WINDOW, shift=2.0))
        assert drift.alarm == Alarm(DriftKind.INPUTS, 2)

    drift.observe(*outputs(rng, 10 * WINDOW))
    assert drift.kind is None


def test_an_alarm_stays_while_nothing_says_what_is_usual():
    rng = np.random.default_rng(8)
    drift = Drift(None, 2, Alarm(DriftKind.INPUTS, 1))
    drift.observe(*outputs(rng, 3 * WINDOW))
    assert drift.kind is DriftKind.INPUTS

    drift.home = at_home(rng)
    drift.observe(*outputs(rng, 1))

    assert drift.kind is None


def test_what_labels_contradicted_only_labels_can_clear():
    rng = np.random.default_rng(9)
    drift = watch(rng, held=DriftKind.LABELS)
    drift.observe(*outputs(rng, 3 * WINDOW))
    assert drift.kind is DriftKind.LABELS

    tell(drift, MIN_FITTING - 1, 1.0)
    assert drift.kind is DriftKind.LABELS
    tell(drift, 1, 1.0)

    assert drift.kind is None


def test_labels_that_come_rarely_clear_what_labels_contradicted():
    """One answer in fifty is labelled; what inputs showed such labels do not clear."""
    rng = np.random.default_rng(11)
    kinds = []
    for held in (DriftKind.LABELS, DriftKind.INPUTS):
        drift = watch(rng, held=held)
        drift.home = None
        drift._own = None  # nothing is known of energies
        for _ in range(MIN_FITTING):
            drift.observe(*outputs(rng, 50))
            tell(drift, 1, 1.0)
        kinds.append(drift.kind)
    assert kinds == [None, DriftKind.INPUTS]


def test_a_few_labels_that_fit_clear_an_alarm_before_a_window_of_answers():
    rng = np.random.default_rng(10)
    drift = watch(rng, held=DriftKind.INPUTS)

    tell(drift, MIN_FITTING, 1.0)

    assert drift.kind is None


def test_nothing_is_said_before_a_whole_window():
    rng = np.random.default_rng(2)
    drift = watch(rng)

    drift.observe(*outputs(rng, WINDOW - 1, shift=9.0, shares=HOME[::-1]))

    assert drift.kind is None


def test_samples_in_one_call_or_in_many_are_the_same_stream():
    rng = np.random.default_rng(11)
    weights, energies, probabilities = outputs(rng, 3 * WINDOW, shares=HOME[::-1])
    whole, single = watch(np.random.default_rng(0)), watch(np.random.default_rng(0))

    whole.observe(weights, energies, probabilities)
    for i in range(3 * WINDOW):
        single.observe(weights[i : i + 1], energies[i : i + 1], probabilities[i : i + 1])

    assert single.shift == whole.shift
    assert single._shares.value == pytest.approx(whole._shares.value)
    assert single._shares.square == pytest.approx(whole._shares.square)


def test_samples_without_a_usable_candidate_are_left_out():
    drift = Drift(yardstick(np.random.default_rng(3), 60))
    n = 2 * WINDOW

    drift.observe(np.zeros((n, 2)), np.full((n, 2), NAN), np.full((n, 4), 0.25))
    drift.observe(np.ones((n, 2)) / 2, np.zeros((n, 2)), np.full((n, 4), NAN))

    assert drift.shift == (0.0, 0.0)
    assert drift.kind is None
    assert compute_home_reference(np.full((3, 4), NAN), np.zeros((3, 2)), np.full((3, 2), NAN), None) is None
