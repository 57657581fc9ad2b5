"""What a device shows to open a sum: of each peer one of two secrets, for one sum of a session that is large enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedge.messages import Why
from fedge.step import Declined, Failed
from fedge.steps.unmask import Unmasked
from tests.support.cohort import Cohort
from tests.support.orders import TASK

EVERYBODY = tuple(range(6))


@pytest.fixture
def cohort(tmp_path: Path) -> Cohort:
    made = Cohort(tmp_path)
    made.masked()
    return made


def test_of_each_neighbour_one_secret_is_shown(cohort: Cohort) -> None:
    action = cohort.opening(0, 1, 2, 3, 5)
    shown = cohort.result(0, action)
    assert isinstance(shown, Unmasked)
    action.check(shown, TASK)
    assert (set(shown.seeds), set(shown.keys)) == ({1, 2, 3, 5}, {4})


def test_asked_again_it_shows_the_same_also_after_a_kill(cohort: Cohort) -> None:
    action = cohort.opening(*EVERYBODY)
    first = cohort.result(0, action)
    cohort.workers[0] = cohort.started(0)
    assert cohort.result(0, action) == first


@pytest.mark.parametrize("summed", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 5)])
def test_another_sum_of_the_session_is_refused_also_after_a_kill(cohort: Cohort, summed: tuple[int, ...]) -> None:
    """It would show the other secret of a peer: both together open that peer's update."""
    assert isinstance(cohort.result(0, cohort.opening(*EVERYBODY)), Unmasked)
    cohort.workers[0] = cohort.started(0)
    refused = cohort.result(0, cohort.opening(*summed))
    assert isinstance(refused, Failed)
    assert refused.reason == "another sum of this session was opened"


def test_a_sum_of_too_few_is_declined(cohort: Cohort) -> None:
    refused = cohort.result(0, cohort.opening(0, 1, 2, 3))
    assert isinstance(refused, Declined)
    assert (refused.why, refused.reason) == (Why.TOO_FEW, "a sum of 4 devices, 5 are the fewest")
    assert isinstance(cohort.result(0, cohort.opening(*EVERYBODY)), Unmasked), "nothing was shown"


def test_a_sum_that_differs_by_few_from_an_earlier_one_is_declined_also_after_a_kill(cohort: Cohort) -> None:
    assert isinstance(cohort.result(0, cohort.opening(*EVERYBODY)), Unmasked)
    cohort.masked(number=2)
    cohort.workers[0] = cohort.started(0)
    refused = cohort.result(0, cohort.opening(0, 1, 2, 3, 4), number=2)
    assert isinstance(refused, Declined)
    assert (refused.why, refused.reason) == (
        Why.TOO_FEW, "a sum that differs by 1 devices from an earlier one, 5 are the fewest"
    )  # fmt: skip
    assert isinstance(cohort.result(0, cohort.opening(*EVERYBODY), number=2), Unmasked)


def test_a_sum_of_parts_that_no_masks_join_is_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large cohort, where not everybody is everybody's neighbour: each part would be seen by itself."""
    monkeypatch.setattr("fedge.masking.DEGREE", 2)
    cohort = Cohort(tmp_path, 10)
    cohort.masked()
    circle = cohort.roster._circle
    refused = cohort.result(circle[0], cohort.opening(*sorted([*circle[:3], *circle[5:8]])))
    assert isinstance(refused, Declined)
    assert (refused.why, refused.reason) == (Why.TOO_FEW, "a sum of parts that no masks join")
    assert isinstance(cohort.result(circle[0], cohort.opening(*sorted(circle[:6]))), Unmasked)


@pytest.mark.parametrize("summed", [(0, 1, 2, 3, 4, 6), (1, 0, 2, 3, 4), (0, 0, 1, 2, 3, 4)])
def test_positions_that_are_none_are_refused(cohort: Cohort, summed: tuple[int, ...]) -> None:
    refused = cohort.result(0, cohort.opening(*summed))
    assert isinstance(refused, Failed)
    assert "not ascending" in refused.reason


def test_who_has_masked_nothing_shows_nothing(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    refused = cohort.result(0, cohort.opening(*EVERYBODY))
    assert isinstance(refused, Failed)
    assert refused.reason == "this device has masked nothing for this sum"


def test_a_share_that_was_not_sealed_for_it_is_left_out(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    cohort.made[3] = type(cohort.made[3])(sealed=dict.fromkeys(range(6), bytes(82)), commitment=bytes(32))
    cohort.does(0, cohort.training(0))
    shown = cohort.result(0, cohort.opening(*EVERYBODY))
    assert isinstance(shown, Unmasked)
    assert set(shown.seeds) == {1, 2, 4, 5}
