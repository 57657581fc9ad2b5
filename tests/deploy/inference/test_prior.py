"""The probabilities follow the classes' shares, without labels, and only as far as they may."""

import numpy as np
import pytest

from deploy.inference.prior import LARGEST_RATIO, WINDOW, SharesEstimate

pytestmark = pytest.mark.torch_free

HOME = np.array([0.6, 0.3, 0.1])
CENTRES = np.array([-1.0, 0.0, 1.0])


def draw(rng, n, shares):
    """n samples of three classes: their classes, and the probabilities of a classifier calibrated for `HOME`."""
    y = rng.choice(3, n, p=shares)
    x = rng.normal(CENTRES[y], 0.7)
    joint = HOME * np.exp(-((x[:, None] - CENTRES) ** 2) / (2 * 0.49))
    return y, joint / joint.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(3))
def test_under_other_shares_more_answers_are_right_nearly_as_many_as_are_possible(seed):
    rng, shares = np.random.default_rng(seed), HOME[::-1]
    estimate = SharesEstimate(HOME)
    estimate.observe(draw(rng, 3 * WINDOW, shares)[1])
    y, p = draw(rng, 5000, shares)

    adapted = estimate.observe(p)

    right = [(q.argmax(axis=1) == y).mean() for q in (p, adapted, p * shares / HOME)]
    assert right[1] > right[0] + 0.1
    assert right[1] > right[2] - 0.02
    assert adapted.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(3))
def test_at_home_nothing_is_lost(seed):
    rng = np.random.default_rng(seed)
    y, p = draw(rng, 5000, HOME)

    adapted = SharesEstimate(HOME).observe(p)

    assert (adapted.argmax(axis=1) == y).mean() > (p.argmax(axis=1) == y).mean() - 0.01


def test_it_returns_with_the_shares():
    rng = np.random.default_rng(0)
    estimate = SharesEstimate(HOME)
    estimate.observe(draw(rng, 5 * WINDOW, HOME[::-1])[1])
    assert estimate.ratio[2] > 3

    estimate.observe(draw(rng, 20 * WINDOW, HOME)[1])

    assert estimate.ratio == pytest.approx(np.ones(3), abs=0.5)


def test_the_factors_are_bounded():
    estimate = SharesEstimate(np.array([0.001, 0.999]))

    estimate.observe(np.tile([1.0, 0.0], (20 * WINDOW, 1)))

    assert estimate.ratio[0] == LARGEST_RATIO
    assert estimate.ratio[1] > 1 / LARGEST_RATIO


def test_samples_in_one_call_or_in_many_are_the_same_stream_and_are_not_changed():
    _, p = draw(np.random.default_rng(1), 50, HOME)
    kept = p.copy()
    whole, single = SharesEstimate(HOME), SharesEstimate(HOME)

    adapted = whole.observe(p)

    assert np.array_equal(adapted, np.concatenate([single.observe(row[None]) for row in p]))
    assert np.array_equal(p, kept)


def test_what_is_not_finite_is_passed_on_and_not_counted():
    estimate = SharesEstimate(HOME)

    adapted = estimate.observe(np.array([[np.nan, 0.5, 0.5]]))

    assert np.isnan(adapted[0, 0])
    assert not estimate.observe(np.zeros((1, 3))).any(), "no candidate is usable"
    assert np.array_equal(estimate.ratio, np.ones(3))


def test_weights_worked_numbers():
    """Two candidates that are equal at home, and a gate that gives the second 0.8 for all samples.

    At the fixed point v = α v' / Σ α v' with v' = (200 v + 10) / 220, so 600 v² - 650 v + 10 = 0 for the first.
    """
    estimate = SharesEstimate(np.array([0.5, 0.5]))
    first = estimate.observe(np.array([[0.2, 0.8]]))
    estimate.observe(np.tile([0.2, 0.8], (20 * WINDOW, 1)))

    assert first[0] == pytest.approx([0.2, 0.8]), "a sample counts from the next one on"
    v = (650 - np.sqrt(650**2 - 24000)) / 1200
    assert v == pytest.approx(0.015610, abs=1e-6)
    assert (200 * v + 10) / 110 == pytest.approx(0.119290, abs=1e-6)
    assert estimate.ratio == pytest.approx([0.119290, 1.880710], abs=1e-5)
    assert estimate.observe(np.array([[0.2, 0.8]]))[0, 0] == pytest.approx(v, abs=1e-6)
