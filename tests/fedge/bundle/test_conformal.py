import math

import numpy as np
import pytest

from fedge.bundle.conformal import GAMMA, adapt_level, compute_threshold, count_needed, summarise_scores
from fedge.data.problems.classification import Classification
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.regression import Regression

THREE = Classification(classes=("a", "b", "c"))


@pytest.mark.parametrize(("n", "coverage", "k"), [(9, 0.9, 9), (10, 0.9, 10), (19, 0.9, 18), (99, 0.99, 99)])
def test_the_threshold_is_the_order_statistic_that_promises_the_coverage(n: int, coverage: float, k: int) -> None:
    assert compute_threshold([float(i) for i in range(1, n + 1)], 1 - coverage) == k


def test_too_few_samples_promise_nothing_and_sets_hold_everything() -> None:
    for coverage in (0.9, 0.95, 0.99):
        needed = count_needed(coverage)
        assert compute_threshold([0.5] * (needed - 1), 1 - coverage) == math.inf
        assert compute_threshold([0.5] * needed, 1 - coverage) == 0.5
    assert compute_threshold([], 0.1) == math.inf


@pytest.mark.parametrize(("n", "coverage"), [(12, 0.9), (40, 0.8), (37, 0.95)])
def test_a_further_sample_is_covered_with_the_promised_probability_and_hardly_more(n: int, coverage: float) -> None:
    """Each of n + 1 exchangeable scores is the new one equally often, so the probability is counted, not drawn."""
    scores = np.random.default_rng(n).random(n + 1)
    others = [np.sort(np.delete(scores, i)).tolist() for i in range(n + 1)]
    covered = np.mean([scores[i] <= compute_threshold(others[i], 1 - coverage) for i in range(n + 1)])
    assert coverage <= covered <= coverage + 1 / (n + 1)


def test_the_share_of_misses_comes_to_the_wanted_one_whatever_the_world_does() -> None:
    """Gibbs and Candes (2021), Proposition 4.1, against a world that changes for the worse twice."""
    rng = np.random.default_rng(3)
    scores = np.sort(rng.random(50)).tolist()
    stream = np.concatenate([rng.random(400), 0.5 + rng.random(400), 2 * rng.random(400)])
    level, missed = 0.1, []
    for score in stream:
        missed.append(score > compute_threshold(scores, level))
        level = adapt_level(level, 0.9, missed=missed[-1])
        assert -GAMMA <= level <= 1 + GAMMA
    assert abs(np.mean(missed) - 0.1) <= (0.9 + GAMMA) / (GAMMA * len(stream))
    assert np.mean(stream[400:] > compute_threshold(scores, 0.1)) > 0.3, "without labels far more are missed"


def test_sets_of_classes_hold_what_is_probable_enough_and_always_the_best() -> None:
    answers = (np.array([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]], np.float32),)
    assert summarise_scores(THREE, answers, np.array([0, 2])) == pytest.approx((0.3, 0.75), abs=2e-6)
    assert THREE.make_sets(answers, 0.65 + 1e-6) == {
        "set": pytest.approx(np.array([[True, False, False], [True, True, False]])),
        "set_names": ("a", "a,b"),
        "abstains": pytest.approx(np.array([False, True])),
    }
    assert THREE.make_sets(answers, math.inf)["set_names"] == ("a,b,c", "a,b,c")
    for small in (0.1, -math.inf):
        assert THREE.make_sets(answers, small)["set_names"] == ("a", "a")
        assert THREE.find_covered(answers, np.array([0, 1]), small).tolist() == [True, False]


def test_intervals_hold_all_targets_of_a_sample_in_their_own_units() -> None:
    problem = Regression(targets=("delay", "load"), mean=(30.0, 5.0), std=(10.0, 2.0))
    answers = np.array([[0.0, 1.0]]), np.array([[0.5, 0.1]])
    (score,) = summarise_scores(problem, answers, np.array([[0.5, 1.3]]))
    assert score == pytest.approx(3.0), "the load is three spreads off, the delay one"
    found = problem.make_sets(answers, score)
    assert np.concatenate([found["low"], found["high"]]) == pytest.approx(np.array([[15.0, 6.4], [45.0, 7.6]]))
    assert problem.find_covered(answers, np.array([[0.5, 1.3]]), score).all()
    assert np.isinf(problem.make_sets(answers, math.inf)["high"]).all()


def test_a_problem_with_thresholds_of_its_own_has_no_scores_and_a_broken_answer_is_the_worst() -> None:
    assert summarise_scores(MultiLabel(labels=("hot", "wet")), (np.ones((3, 2)),), np.ones((3, 2), np.int64)) == ()
    answers = (np.array([[np.nan] * 3, [0.5, 0.3, 0.2]]),)
    first, last = summarise_scores(THREE, answers, np.array([0, 0]))
    assert first == pytest.approx(0.5, abs=2e-6)
    assert last >= 1e9
