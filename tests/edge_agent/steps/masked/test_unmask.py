"""What a device shows to open a sum: of each peer one of two secrets, for the one sum that it has confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedge.steps.contract import Failed
from fedge.steps.masked.unmask import Unmasked
from tests.support.cohort import Cohort
from tests.support.orders import TASK

EVERYBODY = tuple(range(6))


@pytest.fixture
def cohort(tmp_path: Path) -> Cohort:
    made = Cohort(tmp_path)
    made.masked()
    return made


def test_of_each_neighbour_one_secret_is_shown(cohort: Cohort) -> None:
    cohort.confirm(0, 1, 2, 3, 5)
    action = cohort.opening()
    shown = cohort.result(0, action)
    assert isinstance(shown, Unmasked)
    action.check(shown, TASK)
    assert (set(shown.seeds), set(shown.keys)) == ({1, 2, 3, 5}, {4})


def test_who_is_not_summed_helps_as_well(cohort: Cohort) -> None:
    cohort.confirm(0, 1, 2, 3, 5)
    shown = cohort.result(4, cohort.opening())
    assert isinstance(shown, Unmasked)
    assert (set(shown.seeds), set(shown.keys)) == ({0, 1, 2, 3, 5}, set())


def test_asked_again_it_shows_the_same_also_after_a_kill(cohort: Cohort) -> None:
    cohort.confirm(*EVERYBODY)
    first = cohort.result(0, cohort.opening())
    cohort.workers[0] = cohort.started(0)
    assert cohort.result(0, cohort.opening()) == first
    del cohort.signed[3]
    assert cohort.result(0, cohort.opening()) == first, "five of six are enough"


def refusal(cohort: Cohort, k: int = 0) -> str:
    refused = cohort.result(k, cohort.opening())
    assert isinstance(refused, Failed), refused
    return refused.reason


def test_without_more_than_two_thirds_of_the_cohort_nothing_is_shown(cohort: Cohort) -> None:
    cohort.confirm(*EVERYBODY, who=range(4))
    assert refusal(cohort) == "4 of 6 devices of the cohort have confirmed the sum, 5 are needed"
    cohort.confirm(*EVERYBODY, who=[4])
    assert isinstance(cohort.result(0, cohort.opening()), Unmasked)


def test_without_more_than_two_thirds_of_the_sum_nothing_is_shown(tmp_path: Path) -> None:
    """Cohorts of two sessions may be nearly disjoint, not sums that differ by few."""
    cohort = Cohort(tmp_path, 10)
    cohort.masked()
    cohort.confirm(0, 1, 2, 3, 4, 5, who=(0, 1, 2, 6, 7, 8, 9))
    assert refusal(cohort) == "3 of 6 devices of the sum have confirmed the sum, 5 are needed"


def test_confirmations_of_others_sums_and_forged_ones_do_not_count(cohort: Cohort) -> None:
    cohort.confirm(0, 1, 2, 3, 4, who=(4, 5))
    cohort.confirm(*EVERYBODY, who=range(4))
    assert refusal(cohort).startswith("4 of 6 devices")
    for forged in (cohort.signed[0], bytes(64), cohort.trained[4].statement):
        cohort.signed |= {4: forged, 5: forged, 6: forged}
        assert refusal(cohort).startswith("4 of 6 devices")


def test_confirmations_of_an_earlier_sum_do_not_count(cohort: Cohort) -> None:
    """Of the same devices: each session has keys of its own."""
    cohort.confirm(*EVERYBODY)
    cohort.masked(number=2)
    cohort.confirm(*EVERYBODY, who=[0], number=2)
    refused = cohort.result(0, cohort.opening(), number=2)
    assert isinstance(refused, Failed)
    assert refused.reason.startswith("1 of 6 devices")


def test_who_has_masked_or_confirmed_nothing_shows_nothing(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    for k in range(1, 6):
        cohort.train(k)
    cohort.confirm(1, 2, 3, 4, 5, who=range(5))
    assert refusal(cohort, 0) == "this device has masked nothing for this sum"
    assert refusal(cohort, 5) == "this device has confirmed no sum of this session"


def test_bytes_that_are_no_confirmations_are_refused(cohort: Cohort) -> None:
    cohort.confirm(*EVERYBODY)
    cohort.signed[0] = b"short"
    assert "no signatures" in refusal(cohort)


def test_a_share_that_was_not_sealed_for_it_is_left_out(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    cohort.made[3] = type(cohort.made[3])(sealed=dict.fromkeys(range(6), bytes(82)), commitment=bytes(32))
    for k in EVERYBODY:
        cohort.train(k)
    cohort.confirm(*EVERYBODY)
    shown = cohort.result(0, cohort.opening())
    assert isinstance(shown, Unmasked)
    assert set(shown.seeds) == {1, 2, 4, 5}
