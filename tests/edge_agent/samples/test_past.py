"""What of a device's past still holds: turned cameras, other meanings, and what is no contradiction."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_agent.samples.past import (
    SET_ASIDE,
    compute_divergence,
    compute_sign_test,
    examine_past,
    find_changes,
    find_turn,
    has_moved,
    measure_contradiction,
    preserve_frame,
    recall_frame,
    turn_inputs,
)
from fedge.tasks import load_pool
from fedge.tasks.pool import Pool

POOL: Pool = load_pool("digits", limit=400)
X: NDArray[np.float32] = (POOL.x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
Y = POOL.y
NONE = np.zeros(len(Y), np.bool_)


def turned_from(n_old: int, n: int, quarters: int = 1) -> NDArray[np.float32]:
    """The first n digits, turned from number `n_old` on."""
    return turn_inputs(X[:n], np.where(np.arange(n) < n_old, 0, quarters))


def with_wrong_labels(share: float, since: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(5)
    wrong = (rng.random(len(Y)) < share) & (np.arange(len(Y)) >= since)
    return np.where(wrong, (Y + rng.integers(1, 10, len(Y))) % 10, Y)


# ------------------------------------------------------------------------------------------------------- worked numbers


def test_worked_contradiction() -> None:
    # 1 of 10 right where 9 of 10 are expected, by chance 1 of 10: 10 (0.1 ln (0.1/0.9) + 0.9 ln (0.9/0.1)) nats
    assert measure_contradiction(10, 0.1, 0.9, 0.1) == pytest.approx(8 * math.log(9))
    # more than half of what is expected beyond chance: no contradiction, however many samples say so
    assert measure_contradiction(10_000, 0.55, 0.9, 0.1) == 0
    assert measure_contradiction(10_000, 0.49, 0.9, 0.1) > 0
    # few samples are not sure: 2 (0.1 ... ) stays below ln 1000
    assert measure_contradiction(3, 0.1, 0.9, 0.1) == 0
    assert measure_contradiction(4, 0.1, 0.9, 0.1) == pytest.approx(3.2 * math.log(9))
    assert measure_contradiction(10, 0.95, 0.9, 0.1) == 0


def test_worked_divergence() -> None:
    assert compute_divergence(0.1, 0.9) == pytest.approx(0.8 * math.log(9))
    assert compute_divergence(0.0, 0.5) == pytest.approx(math.log(2))
    assert compute_divergence(0.3, 0.3) == 0


def test_worked_sign_test() -> None:
    one, other = np.array([True] * 4 + [False] + [True] * 7), np.array([False] * 4 + [True] + [True] * 7)
    assert compute_sign_test(one, other) == pytest.approx((5 + 1) / 2**5)  # 4 of 5 that differ, or all of them
    assert compute_sign_test(one, one) == 1


def test_inputs_have_moved_if_most_are_farther_and_this_is_sure() -> None:
    near = np.arange(20.0)
    assert has_moved(near, near + 20)
    assert not has_moved(near, near + 4)
    assert not has_moved(near[:2], near[:2] + 20), "4 comparisons are no proof"
    assert not has_moved(near, near), "ties count half"


# -------------------------------------------------------------------------------------------------- what is a change


def test_a_turned_camera_is_found_with_13_labels_and_its_past_is_turned_along() -> None:
    quarters = examine_past(turned_from(90, 103), Y[:103], NONE[:103])
    assert quarters.tolist() == [1] * 90 + [0] * 13
    assert np.array_equal(turn_inputs(turned_from(90, 103), quarters), np.rot90(X[:103], 1, axes=(2, 3)))


@pytest.mark.parametrize("n_new", [13, 40, 100, 300])
def test_however_many_labels_come_the_change_stays_where_it_is(n_new: int) -> None:
    quarters = examine_past(turned_from(90, 90 + n_new, 3), Y[: 90 + n_new], NONE[: 90 + n_new])
    assert quarters.tolist() == [3] * 90 + [0] * n_new


def test_a_camera_that_is_turned_twice_keeps_both_pasts_turned() -> None:
    x = turn_inputs(X[:240], np.repeat([0, 1, 2], [90, 110, 40]))
    assert examine_past(x, Y[:240], NONE[:240]).tolist() == [2] * 90 + [1] * 110 + [0] * 40


def test_a_camera_that_is_turned_back_has_its_first_samples_again_as_they_were() -> None:
    x = turn_inputs(X[:220], np.repeat([0, 1, 0], [90, 110, 20]))
    assert examine_past(x, Y[:220], NONE[:220]).tolist() == [0] * 90 + [3] * 110 + [0] * 20


def test_what_no_turn_explains_is_set_aside() -> None:
    mirrored = X[:150].copy()
    mirrored[90:] = np.roll(mirrored[90:, :, ::-1, ::-1], 3, axis=3)
    assert examine_past(mirrored, Y[:150], NONE[:150]).tolist() == [SET_ASIDE] * 90 + [0] * 60


def test_other_inputs_than_images_are_set_aside() -> None:
    flat = turned_from(90, 150).reshape(150, -1)
    assert examine_past(flat, Y[:150], NONE[:150]).tolist() == [SET_ASIDE] * 90 + [0] * 60


def test_classes_of_another_meaning_contradict_once_enough_labels_agree() -> None:
    other = np.where(np.arange(400) < 150, Y, (Y + 3) % 10)
    assert examine_past(X[:160], other[:160], NONE[:160]).tolist() == [0] * 160
    found = examine_past(X[:250], other[:250], NONE[:250])
    assert np.mean(found == np.repeat([SET_ASIDE, 0], [150, 100])) > 0.98


def test_the_first_samples_that_hold_stay_as_they_are() -> None:
    turns, now = preserve_frame(np.array([1, 1, 3, 0]))
    assert (turns.tolist(), now) == ([0, 0, 2, 3], 3)
    turns, now = preserve_frame(np.array([SET_ASIDE, 2, 0]))
    assert (turns.tolist(), now) == ([SET_ASIDE, 0, 2], 2)
    turns, now = preserve_frame(np.array([SET_ASIDE, 0, 0]))
    assert (turns.tolist(), now) == ([SET_ASIDE, 0, 0], 0)


def test_a_known_change_is_found_however_many_samples_came_since() -> None:
    order = np.concatenate([np.arange(90), np.random.default_rng(3).integers(90, 400, 9000)])
    x, y, marks = turn_inputs(X[order], np.repeat([0, 1], [90, 9000])), Y[order], np.zeros(9090, np.bool_)
    assert not examine_past(x, y, marks).any(), "90 of 9090 are too few in an even choice"
    assert np.mean(examine_past(x, y, marks, known=90) == np.repeat([1, 0], [90, 9000])) > 0.99


def test_a_turn_is_recalled_when_hardly_a_sample_from_before_it_is_left() -> None:
    marks = np.zeros(60, np.bool_)
    assert recall_frame(marks, 0, 3).tolist() == [3] * 60
    assert recall_frame(marks, 10, 3).tolist() == [0] * 10 + [3] * 50
    assert recall_frame(marks, 40, 3) is None, "enough are left to say that it was no turn"
    assert recall_frame(np.arange(60) < 40, 50, 3).tolist() == [0] * 50 + [3] * 10
    assert recall_frame(marks, 10, 0) is None


# --------------------------------------------------------------------------------------------- what is no contradiction


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("n", [110, 150, 250, 400])
def test_wrong_labels_never_make_a_device_throw_away_its_past(share: float, n: int) -> None:
    assert not examine_past(X[:n], with_wrong_labels(share, 90)[:n], NONE[:n]).any()


def test_a_turned_camera_is_found_among_wrong_labels_too() -> None:
    found = examine_past(turned_from(90, 150), with_wrong_labels(0.2, 90)[:150], NONE[:150])
    assert np.mean(found == np.repeat([1, 0], [90, 60])) > 0.95


def test_nothing_contradicts_when_nothing_changes_or_light_does() -> None:
    for n in range(20, 400, 29):
        assert not examine_past(X[:n], Y[:n], NONE[:n]).any()
        darker = X[:n] * np.where(np.arange(n) < 2 * n // 3, 1, 0.6).astype(np.float32).reshape(-1, 1, 1, 1)
        assert not examine_past(darker, Y[:n], NONE[:n]).any()


def test_new_classes_and_other_shares_do_not_contradict() -> None:
    late = np.concatenate([np.flatnonzero(Y < 7), np.flatnonzero(Y >= 7)])
    assert not examine_past(X[late], Y[late], NONE).any()
    assert not examine_past(X[late[::-1]], Y[late[::-1]], NONE).any()


def test_samples_that_are_alike_for_a_time_do_not_contradict() -> None:
    # ten sessions, in each of which every class looks like itself only: whatever comes next was never well explained
    rng = np.random.default_rng(0)
    y = np.tile(np.repeat(np.arange(5), 4), 10)
    looks = rng.normal(size=(10, 5, 16))
    x = np.concatenate([np.repeat(session, 4, axis=0) for session in looks]) + rng.normal(0, 0.01, (200, 16))
    assert not examine_past(x.astype(np.float32), y, np.zeros(200, np.bool_)).any()


def test_a_source_without_an_order_holds_as_a_whole() -> None:
    x = turned_from(90, 150)
    assert not examine_past(x, Y[:150], NONE[:150], begun_with=150).any()
    assert examine_past(x, Y[:150], NONE[:150], begun_with=90).tolist() == [1] * 90 + [0] * 60


@pytest.mark.parametrize("n", [0, 1, 7])
def test_few_samples_contradict_nothing(n: int) -> None:
    assert examine_past(X[:n], Y[:n], NONE[:n]).tolist() == [0] * n
    assert find_changes(X[:n].reshape(n, 64).astype(np.float64), Y[:n]) == []
    assert find_turn(X[:90], Y[:90], X[90 : 90 + n], Y[90 : 90 + n]) == SET_ASIDE


# -------------------------------------------------------------------------------------------------------------- privacy


def test_sensitive_samples_decide_nothing_about_the_others() -> None:
    marks = np.arange(250) % 3 == 0
    x = turned_from(150, 250)
    rng = np.random.default_rng(1)
    other = np.where(marks.reshape(-1, 1, 1, 1), rng.random(x.shape, np.float32), x)
    labels = np.where(marks, rng.integers(0, 10, 250), Y[:250])
    found, again = examine_past(x, Y[:250], marks), examine_past(other, labels, marks)
    alone = examine_past(x[~marks], Y[:250][~marks], marks[~marks])
    assert np.array_equal(found[~marks], alone)
    assert np.array_equal(again[~marks], alone)
    assert set(found[:150]) == {1}, "sensitive ones go with those of their time"


def test_many_samples_are_compared_by_a_choice_of_them() -> None:
    order = np.random.default_rng(2).integers(0, 400, 3000)
    y = Y[order]
    x = turn_inputs(X[order], np.where(np.arange(3000) < 2800, 0, 1))
    found = examine_past(x, y, np.zeros(3000, np.bool_))
    assert set(found[:2790]) == {1}
    assert set(found[2810:]) == {0}
