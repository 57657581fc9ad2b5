"""What a device checks before it confirms a sum, and that it confirms one alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_agent.privacy.masking import Session
from fedge.steps.contract import Declined, Failed, Refusal
from fedge.steps.masked.confirm_sum import SumConfirmed
from fedge.wire.messages import Why
from tests.support.cohort import SESSION, Cohort
from tests.support.orders import order

EVERYBODY = tuple(range(6))
UNSIGNED = "did not sign to have masked with these devices"


@pytest.fixture
def cohort(tmp_path: Path) -> Cohort:
    made = Cohort(tmp_path)
    made.masked()
    return made


def refusal(cohort: Cohort, k: int, *summed: int, among: tuple[int, ...] | None = None, number: int = 1) -> str:
    refused = cohort.result(k, cohort.confirming(k, *summed, among=among), number)
    assert isinstance(refused, Refusal), refused
    assert isinstance(refused, Declined) == (refused.why is Why.TOO_FEW)
    return refused.reason


def test_it_signs_the_sum(cohort: Cohort) -> None:
    action = cohort.confirming(0, *EVERYBODY)
    confirmed = cohort.result(0, action)
    assert isinstance(confirmed, SumConfirmed)
    statement = cohort.roster.make_sum_statement(action.sharers, action.summed)
    assert cohort.roster.find_signers(statement, {0: confirmed.confirmation}) == {0}


def test_asked_again_it_signs_the_same_also_after_a_kill(cohort: Cohort) -> None:
    first = cohort.result(0, cohort.confirming(0, *EVERYBODY))
    cohort.workers[0] = cohort.started(0)
    assert cohort.result(0, cohort.confirming(0, *EVERYBODY)) == first


@pytest.mark.parametrize("summed", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 5)])
def test_another_sum_of_the_session_is_refused_also_after_a_kill(cohort: Cohort, summed: tuple[int, ...]) -> None:
    """It would show the other secret of a peer: both together open that peer's update."""
    cohort.confirm(*EVERYBODY, who=[0])
    cohort.workers[0] = cohort.started(0)
    assert refusal(cohort, 0, *summed) == "another sum of this session was confirmed"


def test_killed_before_it_has_signed_it_takes_no_sum_that_is_too_close(cohort: Cohort) -> None:
    """The sum is noted for the run first, then for the session."""
    Session(cohort.workers[0].make_device(order(cohort.sharing()), cohort.blobs), SESSION).record_sum(
        [f"d{k}" for k in EVERYBODY]
    )
    cohort.workers[0] = cohort.started(0)
    assert "differs by 1 devices" in refusal(cohort, 0, 0, 1, 2, 3, 4)
    cohort.confirm(*EVERYBODY, who=[0])


def test_a_sum_of_too_few_is_declined(cohort: Cohort) -> None:
    assert refusal(cohort, 0, 0, 1, 2, 3) == "a sum of 4 devices, 5 are the fewest"
    assert refusal(cohort, 0) == "a sum of 0 devices, 5 are the fewest"
    cohort.confirm(*EVERYBODY, who=[0])


def test_a_sum_that_differs_by_few_from_an_earlier_one_is_declined_also_after_a_kill(cohort: Cohort) -> None:
    """Whether or not the earlier one was opened: others may have shown enough."""
    cohort.confirm(*EVERYBODY)
    cohort.masked(number=2)
    cohort.workers[0] = cohort.started(0)
    reason = "a sum that differs by 1 devices from an earlier one, 5 are the fewest"
    assert refusal(cohort, 0, 0, 1, 2, 3, 4, number=2) == reason
    cohort.confirm(*EVERYBODY, who=[0], number=2)


def test_a_sum_in_which_somebody_has_few_neighbours_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a large cohort, where not everybody is everybody's neighbour: these few might work for the coordinator."""
    monkeypatch.setattr("fedge.privacy.masked_sums.DEGREE", 4)
    cohort = Cohort(tmp_path, 10)
    cohort.masked()
    circle = cohort.roster._circle
    for summed in ([*circle[:3], *circle[5:8]], circle[:6], circle[::2]):
        assert refusal(cohort, circle[0], *summed) == "too few masks join the parts of the sum"
    cohort.confirm(*set(circle) - {circle[4]}, who=[circle[0]])


@pytest.mark.parametrize("summed", [(0, 1, 2, 3, 4, 6), (1, 0, 2, 3, 4), (0, 0, 1, 2, 3, 4)])
@pytest.mark.parametrize("field", ["summed", "sharers"])
def test_positions_that_are_none_are_refused(cohort: Cohort, field: str, summed: tuple[int, ...]) -> None:
    file = cohort.blobs.file(msgspec.msgpack.encode(summed))
    refused = cohort.result(0, msgspec.structs.replace(cohort.confirming(0, *EVERYBODY), **{field: file}))
    assert isinstance(refused, Failed)
    assert "not ascending" in refused.reason


# --------------------------------------------------------------------------------------------- with whom was masked


def test_a_sum_of_a_device_that_has_not_shared_is_refused(cohort: Cohort) -> None:
    reason = "the sum has devices that have shared no secrets"
    assert refusal(cohort, 0, *EVERYBODY, among=(0, 1, 2, 3, 4)) == reason


def test_other_sharers_than_it_has_masked_with_are_refused(cohort: Cohort) -> None:
    reason = "this device has not masked with these devices"
    assert refusal(cohort, 0, 0, 1, 2, 3, 4, among=(0, 1, 2, 3, 4)) == reason
    assert refusal(cohort, 5, 0, 1, 2, 3, 4, among=(0, 1, 2, 3, 4)) == reason, "it is not in the sum"


def test_one_that_has_masked_nothing_is_in_no_sum_and_may_confirm_that_of_others(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    for k in range(5):
        cohort.train(k)
    assert refusal(cohort, 5, *EVERYBODY) == "this device has not masked with these devices"
    assert refusal(cohort, 0, *EVERYBODY) == f"d5 {UNSIGNED}"
    cohort.confirm(0, 1, 2, 3, 4)


def test_statements_of_others_and_of_other_sums_and_forged_ones_are_refused(cohort: Cohort) -> None:
    """Also one's own confirmation, and what the same device signed in another session, round or run."""
    earlier, home = dict(cohort.trained), cohort.home
    cohort.confirm(*EVERYBODY)
    other = Cohort(home / "other", run="other")
    other.masked()
    cohort.masked(number=2)
    action = cohort.confirming(0, *EVERYBODY)
    others = [earlier[1], earlier[2], cohort.trained[2], other.trained[1]]
    for statement in (*(told.statement for told in others), cohort.signed[1], bytes(64)):
        forged = msgspec.structs.replace(action, statements={**action.statements, 1: statement})
        refused = cohort.result(0, forged, 2)
        assert isinstance(refused, Failed)
        assert refused.reason == f"d1 {UNSIGNED}"
    missing = {k: signed for k, signed in action.statements.items() if k not in {2, 4}}
    refused = cohort.result(0, msgspec.structs.replace(action, statements=missing), 2)
    assert isinstance(refused, Failed)
    assert refused.reason == f"d2, d4 {UNSIGNED}"
    assert isinstance(cohort.result(0, action, 2), SumConfirmed)


def test_one_that_masked_with_fewer_than_the_others_is_in_no_sum(tmp_path: Path) -> None:
    """The others would take its masks with the rest for masks that it does not have."""
    cohort = Cohort(tmp_path, 10)
    cohort.advertise()
    cohort.share()
    cohort.train(0, among=(0, 5, 6, 7, 8, 9))
    for k in range(1, 10):
        cohort.train(k)
    assert refusal(cohort, 1, 0, 1, 2, 3, 4) == f"d0 {UNSIGNED}"
    assert refusal(cohort, 0, 0, 1, 2, 3, 4) == "this device has not masked with these devices"
    assert refusal(cohort, 0, 0, 5, 6, 7, 8, among=(0, 5, 6, 7, 8, 9)) == f"d5, d6, d7, d8 {UNSIGNED}"
    cohort.confirm(*range(1, 10), who=range(1, 10))


def test_before_its_secrets_are_shared_it_confirms_nothing(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    for k in range(1, 6):
        cohort.made[k] = cohort.result(k, cohort.sharing())  # type: ignore[assignment]
    assert refusal(cohort, 0, 1, 2, 3, 4, 5) == "no secrets were shared for this roster"
